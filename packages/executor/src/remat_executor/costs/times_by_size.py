"""Estimate how long an operator takes from its times at other sizes of the same step.

A module that is called with sequences of changing lengths has the same operators at every length. Once an
operator has been timed at a smaller and a larger size, its time between them is interpolated, both work and
time by their logarithms, so that new lengths need not time it. Work is what the operator computes: its FLOPs
if it does products, else the bytes that it reads and writes.

On an accelerator the kernel depends on what divides the sizes, so only sizes with the same powers of two are
compared there.
"""

import re
from bisect import bisect_left
from math import exp, gcd, log
from typing import NamedTuple

import attrs

from remat_executor.costs.device_timer import Seconds
from remat_graph import OpCost

MOST_APART = 4.0
"""Two sizes between which times are interpolated differ by this factor of work at most."""

NEAR = 1.1
"""Within this factor of work, one size is enough; the time is proportional to the work."""

ALIGNMENT = 16
"""Elements; kernels of accelerators do not distinguish larger powers of two."""

_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])\d+(?![A-Za-z0-9_.])")


class OperatorKind(NamedTuple):
    """What an operator has in common with itself at other sizes."""

    layer: str  # of the model
    pattern: str  # its key without sizes
    place: int = 0  # among the operators of that layer and pattern


@attrs.define(kw_only=True, eq=False)
class TimesBySize:
    """The times of a module's operators at the sizes so far.

    Attributes:
        alignment: powers of two up to this one keep sizes apart.
        times: by kind, the seconds by work.
    """

    alignment: int
    times: dict[OperatorKind, dict[float, Seconds]] = attrs.field(factory=dict)

    @classmethod
    def on(cls, device_type: str) -> "TimesBySize":
        """No times yet, on this type of device."""
        return cls(alignment=1 if device_type == "cpu" else ALIGNMENT)

    def kind(self, layer: str, key: str) -> OperatorKind:
        """The kind of an operator with this key, the place aside."""
        return OperatorKind(layer, _NUMBER.sub(lambda found: f"~{gcd(int(found[0]), self.alignment)}", key))

    def add(self, kind: OperatorKind, cost: OpCost, seconds: Seconds) -> None:
        """Remember a measured time."""
        self.times.setdefault(kind, {})[_work(cost)] = seconds

    def estimate(self, kind: OperatorKind, cost: OpCost) -> Seconds | None:
        """The time at this size; None where the known sizes are not enough."""
        known, work = self.times.get(kind, {}), _work(cost)
        if work in known:
            return known[work]
        sizes = sorted(known)
        place = bisect_left(sizes, work)
        around = sizes[max(0, place - 1) : place + 1]
        if len(around) == 2 and min(around) > 0 and around[1] <= MOST_APART * around[0]:
            share = log(work / around[0]) / log(around[1] / around[0])
            low, high = (known[size] for size in around)
            return Seconds(*(_between(*pair, share) for pair in zip(low, high, strict=True)))
        for size in around:
            if max(size, work) <= NEAR * min(size, work):
                return Seconds(known[size].run_s * work / size, known[size].issue_s)
        return None


def _work(cost: OpCost) -> float:
    return float(cost.flops or cost.read_nbytes + cost.written_nbytes)


def _between(low_s: float, high_s: float, share: float) -> float:
    """Interpolated by logarithms, which a time of zero has not."""
    if min(low_s, high_s) <= 0:
        return low_s + (high_s - low_s) * share
    return exp(log(low_s) + (log(high_s) - log(low_s)) * share)
