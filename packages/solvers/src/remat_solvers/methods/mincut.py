"""`mincut`: a minimum cut between forward and backward decides what is saved, at a price per byte.

The idea of torch's partitioner (and of AOTAutograd's before it): every value is either saved, which costs its
bytes, or recomputed, which costs its op's time, and the cheapest choice is a minimum cut. Here the price of a
byte is a Lagrange multiplier: it rises from zero until the step fits, and the simulated peak decides, not the
sum of the saved bytes. A plan that does not fit is repaired by further evictions.

One maximum flow a price, some 1 ms at 600 ops; the repair is `greedy`'s. Imperfect: one cut, at the boundary,
ignores the memory of values that are recomputed in the backward.
"""

from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.bounds.time_bound import TICKS, CutBound
from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate, flatten
from remat_solvers.local_search.evict import keep_only
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge, part_count


@attrs.frozen(kw_only=True)
class MinCut(Rematerializer):
    """The parametric cut at the boundary.

    Attributes:
        prices: how many prices to try, geometrically spaced around the mean time per byte.
    """

    name: ClassVar[str] = "mincut"
    prices: int = part_count(24)

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        arrays, bound = flatten(problem.graph), CutBound(problem.graph)
        best, cuts = cheapest(arrays, bound, problem.budget_nbytes, self.prices, deadline)
        return judge(problem, best, stats={"cuts": cuts})


def cheapest(
    arrays: Arrays, bound: CutBound, budget_nbytes: int, prices: int, deadline: Deadline
) -> tuple[Ints | None, int]:
    """The fastest order within the budget from cuts at the boundary, and the number of distinct cuts."""
    backward = np.flatnonzero(arrays.backward)
    if not len(backward) or not bound.tick_s > 0:
        return None, 0
    at = int(backward[0])
    mean = TICKS / max(1, len(arrays.backward)) / max(1.0, float(arrays.size.mean()))
    best, best_s, tried = None, float("inf"), set[frozenset[int]]()
    for price in mean * np.geomspace(1e-3, 1e3, prices):
        if deadline.reached():
            break
        kept = frozenset(bound.kept(at, float(price)))
        if kept in tried:
            continue
        tried.add(kept)
        order = keep_only(arrays, budget_nbytes, at, set(kept), deadline)
        result = evaluate(arrays, order)
        if result.valid and result.peak_nbytes <= budget_nbytes and result.time_s < best_s:
            best, best_s = order, result.time_s
    return best, len(tried)
