"""Greedy eviction: at the worst moment, give up what costs least to rebuild per byte of excess removed.

The unit is a (value, use-gap) pair: a value held from one use to the next over the moment at which the
sequence holds most. Evicting it inserts its producer before the next use, together with the producers of
whatever is dead there, and is scored by seconds added per byte of excess (summed over all positions above
the budget) removed, so what piles up when values are rebuilt counts as well. In the spirit of DTR's
eviction heuristic (Kirisame et al. 2021), planned ahead. At most 64 candidates are looked at a step:
O(evictions * (ops + 64 trials)).

Imperfect: never takes an eviction back; `polish` and `search` do.
"""

from typing import ClassVar

import attrs

from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.local_search.evict import evict
from remat_solvers.protocol import Deadline, Problem, Solution, judge


@attrs.frozen
class Greedy:
    """Evict by seconds per byte until the budget holds."""

    name: ClassVar[str] = "greedy"

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        arrays = flatten(problem.graph)
        order = evict(arrays, problem.budget_nbytes, deadline or Deadline())
        fits = evaluate(arrays, order).peak_nbytes <= problem.budget_nbytes
        return judge(problem, order.tolist() if fits else None)
