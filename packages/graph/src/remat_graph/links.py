"""Describe how fast bytes move between the device and the host, alone and concurrently."""

import attrs

from remat_graph.schedule import Lane

# Within these limits the seconds of any copy are finite and can be added to others.
_rate = attrs.validators.and_(attrs.validators.ge(1e-12), attrs.validators.le(1e18))

_rate_or_none = attrs.validators.optional(_rate)

_start = attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.le(1e6))

_LEAST = 0.05  # share of its speed that the CPU optimizer keeps, however busy the host memory is


@attrs.frozen(kw_only=True)
class Links:
    """Bandwidths between device and host in bytes per second, from 1e-12 to 1e18.

    Attributes:
        to_host_nbytes_per_s: device to host, alone.
        to_device_nbytes_per_s: host to device, alone.
        to_host_duplex_nbytes_per_s: device to host while the other direction is busy; None: as alone.
        to_device_duplex_nbytes_per_s: host to device while the other direction is busy; None: as alone.
        host_nbytes_per_s: bandwidth of the host memory, which copies and the CPU optimizer share; None:
            copies do not slow the optimizer.
        start_s: seconds of the host to start a copy. During forward and backward the device works meanwhile;
            in the optimizer's call it waits.
    """

    to_host_nbytes_per_s: float = attrs.field(default=25e9, validator=_rate)
    to_device_nbytes_per_s: float = attrs.field(default=25e9, validator=_rate)
    to_host_duplex_nbytes_per_s: float | None = attrs.field(default=None, validator=_rate_or_none)
    to_device_duplex_nbytes_per_s: float | None = attrs.field(default=None, validator=_rate_or_none)
    host_nbytes_per_s: float | None = attrs.field(default=None, validator=_rate_or_none)
    start_s: float = attrs.field(default=0.0, validator=_start, repr=False)  # keys of saved plans are older

    def alone_s(self, lane: Lane, nbytes: int) -> float:
        """Seconds of a copy while no other lane is busy."""
        rate = self.to_host_nbytes_per_s if lane is Lane.TO_HOST else self.to_device_nbytes_per_s
        return nbytes / rate

    def speeds(self, busy: frozenset[Lane]) -> dict[Lane, float]:
        """Speed of each busy lane while all of them are busy, relative to its speed alone."""
        speeds = dict.fromkeys(busy, 1.0)
        if {Lane.TO_HOST, Lane.TO_DEVICE} <= busy:
            speeds[Lane.TO_HOST] = _ratio(self.to_host_duplex_nbytes_per_s, self.to_host_nbytes_per_s)
            speeds[Lane.TO_DEVICE] = _ratio(self.to_device_duplex_nbytes_per_s, self.to_device_nbytes_per_s)
        if self.host_nbytes_per_s is not None and Lane.CPU_OPTIMIZER in busy:
            copied = 0.0
            if Lane.TO_HOST in busy:
                copied += speeds[Lane.TO_HOST] * self.to_host_nbytes_per_s
            if Lane.TO_DEVICE in busy:
                copied += speeds[Lane.TO_DEVICE] * self.to_device_nbytes_per_s
            speeds[Lane.CPU_OPTIMIZER] = max(_LEAST, 1.0 - copied / self.host_nbytes_per_s)
        return speeds


def _ratio(rate: float | None, alone: float) -> float:
    return 1.0 if rate is None else rate / alone
