"""Host memory for the values that a plan moves off the device, and the lanes on which they move."""

from remat_offload.cuda import CudaMachine
from remat_offload.errors import (
    CannotPin,
    HostPoolExhausted,
    HostPoolMisuse,
    LaneFailed,
    MachineMisuse,
)
from remat_offload.lanes import Machine, Ticket
from remat_offload.pool import HostPool, HostPoolStatistics
from remat_offload.races import Operation, Race, find_races
from remat_offload.recorder import Recorder
from remat_offload.simulated import SimulatedMachine

__version__ = "0.1.0"

__all__ = [
    "CannotPin",
    "CudaMachine",
    "HostPool",
    "HostPoolExhausted",
    "HostPoolMisuse",
    "HostPoolStatistics",
    "LaneFailed",
    "Machine",
    "MachineMisuse",
    "Operation",
    "Race",
    "Recorder",
    "SimulatedMachine",
    "Ticket",
    "find_races",
]
