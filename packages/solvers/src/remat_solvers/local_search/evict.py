"""Evict values from an order of ops until it fits a budget; `methods.greedy` explains the rule."""

from collections.abc import Iterable

import numpy as np

from remat_solvers.evaluation.arrays import Arrays, Ints
from remat_solvers.protocol import Deadline

CHUNK = 20  # evictions between two checks of the deadline


def evict(
    arrays: Arrays,
    budget_nbytes: int,
    deadline: Deadline,
    order: Ints | None = None,
    *,
    op: int = -1,
    kept: Iterable[int] = (),
) -> Ints:
    """Evict from a sequence (trace order by default) until it fits or no eviction helps.

    With an `op`, evict all values except `kept` over its first run instead, whether it fits or not.
    """
    from remat_solvers.evaluation.search_state import get_order, make_state
    from remat_solvers.kernels.evict import greedy

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
    """Evict all values except `kept` over the first run of `op`, then evict until trace order fits."""
    return evict(arrays, budget_nbytes, deadline, evict(arrays, budget_nbytes, deadline, op=op, kept=kept))
