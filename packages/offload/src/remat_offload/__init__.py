"""Move values off the device: host memory, copy lanes, optimizers stepped in parts, training sessions."""

from remat_offload.copy_lanes.bandwidth import measure_links
from remat_offload.copy_lanes.cuda_streams import CudaMachine
from remat_offload.copy_lanes.machine import Machine, Ticket
from remat_offload.copy_lanes.races import Operation, Race, find_races
from remat_offload.copy_lanes.recorder import Recorder
from remat_offload.copy_lanes.simulated import SimulatedMachine
from remat_offload.engine.training_session import TrainingSession
from remat_offload.engine.weight_loading import WeightReader, Weights
from remat_offload.errors import (
    BadWeights,
    CannotPin,
    HostPoolExhausted,
    HostPoolMisuse,
    LaneFailed,
    MachineMisuse,
    OffloadMisuse,
    RefusedOptimizer,
    StepMisuse,
)
from remat_offload.host_memory.pool import HostPool, HostPoolStatistics
from remat_offload.optimizer.chunked_step import ChunkedStep
from remat_offload.optimizer.partial_step import Stepper, kind_of, state_layout
from remat_offload.optimizer.profile import Kind, StateTensor

__version__ = "0.1.0"

__all__ = [
    "BadWeights",
    "CannotPin",
    "ChunkedStep",
    "CudaMachine",
    "HostPool",
    "HostPoolExhausted",
    "HostPoolMisuse",
    "HostPoolStatistics",
    "Kind",
    "LaneFailed",
    "Machine",
    "MachineMisuse",
    "OffloadMisuse",
    "Operation",
    "Race",
    "Recorder",
    "RefusedOptimizer",
    "SimulatedMachine",
    "StateTensor",
    "StepMisuse",
    "Stepper",
    "Ticket",
    "TrainingSession",
    "WeightReader",
    "Weights",
    "find_races",
    "kind_of",
    "measure_links",
    "state_layout",
]
