"""Moving values off the device: host memory, lanes, and optimizers stepped where their state is."""

from remat_offload.cuda import CudaMachine
from remat_offload.errors import (
    CannotPin,
    HostPoolExhausted,
    HostPoolMisuse,
    LaneFailed,
    MachineMisuse,
    RefusedOptimizer,
    StepMisuse,
)
from remat_offload.lanes import Machine, Ticket
from remat_offload.piecewise import PiecewiseStep
from remat_offload.pool import HostPool, HostPoolStatistics
from remat_offload.probe import Kind, StateTensor
from remat_offload.races import Operation, Race, find_races
from remat_offload.recorder import Recorder
from remat_offload.simulated import SimulatedMachine
from remat_offload.stepper import Stepper, kind_of, state_layout

__version__ = "0.1.0"

__all__ = [
    "CannotPin",
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
    "PiecewiseStep",
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
