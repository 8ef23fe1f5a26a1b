"""Links: how fast bytes move between the device and the host."""

import attrs

from remat_graph.schedule import Lane

# What a copy takes is a number of seconds that can be added to others, however large the value.
_rate = attrs.validators.and_(attrs.validators.ge(1e-12), attrs.validators.le(1e18))

_rate_or_none = attrs.validators.optional(_rate)

_LEAST = 0.05  # of its own speed, which the CPU's optimizer keeps however busy the host's memory is


@attrs.frozen(kw_only=True)
class Links:
    """What lies between device and host, bytes per second: numbers from 1e-12 to 1e18.

    Attributes:
        to_host_nbytes_per_s: away from the device, alone.
        to_device_nbytes_per_s: to the device, alone.
        to_host_duplex_nbytes_per_s: away from it while the other direction is busy; None: as alone.
        to_device_duplex_nbytes_per_s: to it while the other direction is busy; None: as alone.
        host_nbytes_per_s: what the host's memory gives to copies and the CPU's optimizer together, and to the
            optimizer alone; None: copies do not slow it.
    """

    to_host_nbytes_per_s: float = attrs.field(default=25e9, validator=_rate)
    to_device_nbytes_per_s: float = attrs.field(default=25e9, validator=_rate)
    to_host_duplex_nbytes_per_s: float | None = attrs.field(default=None, validator=_rate_or_none)
    to_device_duplex_nbytes_per_s: float | None = attrs.field(default=None, validator=_rate_or_none)
    host_nbytes_per_s: float | None = attrs.field(default=None, validator=_rate_or_none)

    def alone_s(self, lane: Lane, nbytes: int) -> float:
        """Seconds of a copy with nothing beside it."""
        rate = self.to_host_nbytes_per_s if lane is Lane.TO_HOST else self.to_device_nbytes_per_s
        return nbytes / rate

    def speeds(self, busy: frozenset[Lane]) -> dict[Lane, float]:
        """How fast each busy lane goes beside the others, 1 being as alone."""
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
