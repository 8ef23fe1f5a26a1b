"""Take the times of operators at a new size of a step from a size that was measured.

Two sizes of a step have the same operators on tensors of other shapes. The time of each is scaled by its
work: the FLOPs of its products, or else the bytes that it reads and writes. Its workspace and its outputs
are bytes of the budget, so they are always measured, by one run. That run also limits the time: on the CPU
no operator is taken to be slower than it was.

Only measured times are scaled, and only from a size that differs by less than `NEAR_SIZE` in all its work.
Another size is measured as the first was. What was scaled once is kept in memory, so that the same call gives
the same graph again, and is never saved among measured costs.

Imperfect: operators that take microseconds do not depend on their work, and caches hold small tensors.
"""

from collections.abc import Mapping
from math import log

import attrs

from remat_executor.costs.cache import MeasuredCost
from remat_executor.costs.device_timer import Seconds

NEAR_SIZE = 2.0
MOST_SIZES = 8  # measured ones that are kept for each step

Place = tuple[int, int]
"""An op and one of its implementations."""


@attrs.frozen(kw_only=True)
class MeasuredSize:
    """The work and the times of a step at one size."""

    work: Mapping[Place, float]
    seconds: Mapping[Place, Seconds]

    @property
    def total(self) -> float:
        """The work of all operators; products and bytes add up, since only ratios count."""
        return sum(self.work.values())


@attrs.define(eq=False)
class ScaledTimes:
    """The measured sizes of steps, and what was scaled from them.

    Attributes:
        sizes: per step, by a name that all of its sizes share.
        kept: per step the costs with scaled times, by key.
    """

    sizes: dict[str, list[MeasuredSize]] = attrs.field(factory=dict)
    kept: dict[str, dict[str, MeasuredCost]] = attrs.field(factory=dict)

    def expected(
        self, step: str, work: Mapping[Place, float], keys: Mapping[Place, str]
    ) -> dict[str, Seconds]:
        """Per key the seconds by the nearest measured size; nothing if none is near enough.

        Args:
            step: what all sizes of a step share.
            work: of each implementation that runs something.
            keys: what their measurements are saved under.
        """
        total = sum(work.values())
        distance = {
            i: abs(log(total / size.total)) for i, size in enumerate(self.sizes.get(step, ())) if total
        }
        nearest = min(distance, key=distance.__getitem__, default=None)
        if nearest is None or distance[nearest] > log(NEAR_SIZE):
            return {}
        size = self.sizes[step][nearest]
        found: dict[str, Seconds] = {}
        for place, key in keys.items():
            seconds, before = size.seconds.get(place), size.work.get(place, 0.0)
            if seconds is not None:
                ratio = work[place] / before if before else 1.0
                found.setdefault(key, Seconds(seconds.run_s * ratio, seconds.issue_s))
        return found

    def remember(
        self,
        step: str,
        work: Mapping[Place, float],
        keys: Mapping[Place, str],
        costs: Mapping[str, MeasuredCost],
        scaled: frozenset[str],
    ) -> None:
        """Keep the costs of a size: as measured if none is scaled, else those that are."""
        if scaled:
            self.kept.setdefault(step, {}).update({key: costs[key] for key in scaled if key in costs})
            return
        seconds = {
            place: Seconds(costs[key].time_s, costs[key].issue_s)
            for place, key in keys.items()
            if key in costs
        }
        size = MeasuredSize(work=dict(work), seconds=seconds)
        sizes = self.sizes.setdefault(step, [])
        sizes[:] = [each for each in sizes if each.work != size.work]
        sizes.append(size)
        del sizes[:-MOST_SIZES]
