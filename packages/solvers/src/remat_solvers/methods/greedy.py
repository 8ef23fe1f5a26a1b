"""Greedy eviction: at the peak, evict what is cheapest to recompute per byte of excess removed.

The unit is a value between two consecutive uses: a value held across the position where the sequence holds
most. Evicting it inserts its producer before the next use, together with the producers of inputs that are
dead there. The score is the added seconds per byte of excess removed, where excess is summed over all
positions above the budget; so it includes the memory of values that are recomputed along the way. In the
spirit of DTR's eviction heuristic (Kirisame et al. 2021), planned ahead. At most 64 candidates are evaluated
a step: O(evictions * (ops + 64 evaluations)).

Imperfect: an eviction is never undone; `polish` and `search` undo some.
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
