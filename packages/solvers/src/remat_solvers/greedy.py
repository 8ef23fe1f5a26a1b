"""Greedy eviction: at the worst moment, give up what costs least to rebuild per byte of excess removed.

The unit is a (value, use-gap) pair: a value held from one use to the next over the moment at which the
sequence holds most. Evicting it inserts its producer before the next use, together with the producers of
whatever is dead there, and is scored by seconds added per byte of excess (summed over all positions above
the budget) removed, so what piles up when values are rebuilt counts as well. In the spirit of DTR's
eviction heuristic (Kirisame et al. 2021), planned ahead. At most 64 candidates are looked at a step:
O(evictions * (ops + 64 trials)).

Imperfect: never takes an eviction back; `polish` and `search` do.
"""

from collections.abc import Iterable
from typing import ClassVar

import attrs
import numpy as np

from remat_solvers.evaluate import Arrays, Ints, evaluate, flatten
from remat_solvers.protocol import Deadline, Problem, Solution, judge

CHUNK = 20  # evictions between two looks at the clock


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


def evict(
    arrays: Arrays,
    budget_nbytes: int,
    deadline: Deadline,
    order: Ints | None = None,
    *,
    op: int = -1,
    kept: Iterable[int] = (),
) -> Ints:
    """Evict from a sequence (trace order by default) until it fits or nothing helps any more.

    With an `op`, evict all values but `kept` over its first run instead, whether it fits or not.
    """
    from remat_solvers.kernels_greedy import greedy
    from remat_solvers.state import get_order, make_state

    if order is None:
        order = np.arange(len(arrays.backward), dtype=np.int64)
    state = make_state(arrays, order, seed=0)
    keep = np.zeros(len(arrays.size), np.int64)
    keep[sorted(kept)] = 1
    more = True
    while more and not deadline.reached():
        more = greedy(state, budget_nbytes, CHUNK, op, keep)
    return get_order(state)


def keep_only(arrays: Arrays, budget_nbytes: int, op: int, kept: Iterable[int], deadline: Deadline) -> Ints:
    """Trace order with all but `kept` given up over the first run of `op`, then evicted until it fits."""
    return evict(arrays, budget_nbytes, deadline, evict(arrays, budget_nbytes, deadline, op=op, kept=kept))
