"""Minimize the peak: sequence search with memory as the objective.

Greedy eviction towards the floor first; then walks at falling targets, each from the sequence with the
smallest peak so far and ended as soon as its target holds. Time hardly matters here, so sequences may grow to
several times the graph. A missed target is moved halfway back; the search ends when steps are under half a
percent, at the goal, or when the moves are used up. Deterministic for a seed and a number of moves. A search
with a goal passes through the same sequences as a search for the floor, so a budget that was once reached is
reached again.

Imperfect: nothing is proven; the floor may lie below the peak of every schedule.
"""

import numpy as np

from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate
from remat_solvers.local_search.anneal import SMALL_OPS, AnnealingWalk
from remat_solvers.local_search.evict import evict
from remat_solvers.protocol import Deadline

FIRST_STEP = 0.85
LAST_STEP = 0.995


def minimize_peak(
    arrays: Arrays,
    goal_nbytes: int,
    floor_nbytes: int,
    deadline: Deadline,
    *,
    moves: int | None = None,
    start: Ints | None = None,
) -> Ints:
    """Find a sequence with a small peak, from `start` or trace order, with at most `moves` changes.

    The search stops at a peak of `goal_nbytes`; no sequence needs less than `floor_nbytes`.
    """
    ops = len(arrays.backward)
    left = default_peak_moves(ops) if moves is None else moves
    best: Ints = np.arange(ops, dtype=np.int64) if start is None else start
    peak = evaluate(arrays, best).peak_nbytes
    # Evicting straight to a far target accumulates recomputed values; evicting in steps avoids that.
    step = FIRST_STEP
    while peak > goal_nbytes and not deadline.reached():
        order = evict(arrays, max(floor_nbytes, int(peak * step)), deadline, best)
        reached = evaluate(arrays, order).peak_nbytes
        if reached >= peak:
            step = np.sqrt(step)
            if step > 0.98:
                break
            continue
        best, peak = order, reached
    step = FIRST_STEP
    round_ = 0
    while peak > max(goal_nbytes, floor_nbytes) and step < LAST_STEP and left > 0 and not deadline.reached():
        target = max(floor_nbytes, int(peak * step))
        walk = AnnealingWalk(arrays, best, target, round_, price=30.0)
        share = min(left, default_peak_moves(ops) // 12)
        found = walk.reach(share, 1.0, 0.1, deadline)
        left -= max(1, walk.tried)
        round_ += 1
        if found is None:
            step = np.sqrt(step)
            continue
        best, peak = found, evaluate(arrays, found).peak_nbytes
    return best


def default_peak_moves(ops: int) -> int:
    """Work that takes about 2 s at 600 ops and 10 s at 2,700: a move costs more on a longer sequence."""
    most = 300_000 + min(750_000, 450_000_000 // max(1, ops))
    return round(most * min(1.0, 3 * ops / SMALL_OPS))
