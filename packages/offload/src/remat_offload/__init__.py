"""Moving values off the device: host memory, lanes, and optimizers stepped where their state is."""

from remat_offload.errors import (
    CannotPin,
    HostPoolExhausted,
    HostPoolMisuse,
    LaneFailed,
    MachineMisuse,
    RefusedOptimizer,
    StepMisuse,
)
from remat_offload.host_memory.pool import HostPool, HostPoolStatistics
from remat_offload.machine.base import Machine, Ticket
from remat_offload.machine.cuda import CudaMachine
from remat_offload.machine.races import Operation, Race, find_races
from remat_offload.machine.recorder import Recorder
from remat_offload.machine.simulated import SimulatedMachine
from remat_offload.optimizer.chunked_step import ChunkedStep
from remat_offload.optimizer.partial_step import Stepper, kind_of, state_layout
from remat_offload.optimizer.profile import Kind, StateTensor

__version__ = "0.1.0"

__all__ = [
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
    "Operation",
    "Race",
    "Recorder",
    "RefusedOptimizer",
    "SimulatedMachine",
    "StateTensor",
    "StepMisuse",
    "Stepper",
    "Ticket",
    "find_races",
    "kind_of",
    "state_layout",
]
