"""The best plans of one solve so far, and the bound below which there is none."""

import attrs

from remat_solvers.errors import warn
from remat_solvers.evaluation.arrays import Arrays, Evaluation, Ints, evaluate
from remat_solvers.local_search.polish import polish
from remat_solvers.protocol import Deadline

OTHERS = 4  # the fastest plans, which differ


@attrs.define(kw_only=True, eq=False)
class Incumbent:
    """The best order so far of one graph and budget, and the method that found it.

    Attributes:
        arrays: of the graph.
        budget_nbytes: bound on peaks.
        base_s: compute time of the unplanned step.
        gap: the ratio of `base_s` within which a plan is as good as proven.
        cut_s: the cut bound, to which the bound falls back if a schedule contradicts it.
        bound_s: no schedule is faster.
        best: the fastest order that fits.
        best_s: its time; infinite if there is none.
        method: which part found it.
        smallest_nbytes: the peak of any order so far.
        fastest: times and orders of the fastest that differ.
    """

    arrays: Arrays
    budget_nbytes: int
    base_s: float
    gap: float
    cut_s: float
    bound_s: float
    best: Ints | None = None
    best_s: float = float("inf")
    method: str = ""
    smallest_nbytes: int | None = None
    fastest: list[tuple[float, Ints]] = attrs.field(factory=list)

    def copy(self) -> "Incumbent":
        """One that changes alone."""
        return attrs.evolve(self, fastest=list(self.fastest))

    def closed(self, gap: float = 0.0) -> bool:
        """Whether the best is within a ratio of `base_s` from the bound, of `self.gap` at least."""
        return self.best_s - self.bound_s <= max(gap, self.gap) * self.base_s

    def polished(self, order: Ints, deadline: Deadline) -> Ints:
        """An order, polished if it fits; changes nothing here, so that threads may call it."""
        if not self._fits(evaluate(self.arrays, order)):
            return order
        better = polish(self.arrays, order, self.budget_nbytes, deadline)
        return better if self._fits(evaluate(self.arrays, better)) else order

    def add(self, order: Ints, method: str) -> None:
        """Take an order that fits if it is the fastest so far, and its peak if that is the smallest."""
        result = evaluate(self.arrays, order)
        if not result.valid:
            return
        self.smallest_nbytes = min(self.smallest_nbytes or result.peak_nbytes, result.peak_nbytes)
        if not self._fits(result):
            return
        # Plans of the same time count as the same.
        if all(abs(result.time_s - known_s) > 1e-12 * self.base_s for known_s, _ in self.fastest):
            self.fastest = sorted([*self.fastest, (result.time_s, order)], key=lambda each: each[0])[:OTHERS]
        if result.time_s < self.best_s:
            self.best, self.best_s, self.method = order, result.time_s, method
            if self.best_s < self.bound_s - 1e-9 * self.base_s:
                warn("a schedule below the coarse program's bound was found")
                self.bound_s = self.cut_s

    def take(self, other: "Incumbent") -> None:
        """Take the plans of a copy."""
        for _, order in other.fastest:
            self.add(order, other.method)

    def _fits(self, result: Evaluation) -> bool:
        return result.valid and result.peak_nbytes <= self.budget_nbytes
