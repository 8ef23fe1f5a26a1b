"""Host memory for the values that a plan moves off the device."""

from remat_offload.errors import CannotPin, HostPoolExhausted, HostPoolMisuse
from remat_offload.pool import HostPool, HostPoolStatistics

__version__ = "0.1.0"

__all__ = ["CannotPin", "HostPool", "HostPoolExhausted", "HostPoolMisuse", "HostPoolStatistics"]
