"""Compiled polishing; `local_search.polish` explains it."""

import numpy as np

from remat_solvers.kernels.derived import apply, rebuild
from remat_solvers.kernels.incremental import begin, evaluate_change, forget
from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.jit import njit_inner as inner
from remat_solvers.kernels.moves import drop, move, read_after


@inner
def delay(S, r):  # type: ignore[no-untyped-def]
    """Move the r-th repeat to right before its first reader; False if it is there or has none."""
    p = S.pos[r].repeats
    gap = read_after(S, S.var[S.pos[p].variant], p)
    return gap < S.meta.count and move(S, p, gap)


@njit
def polish_pass(S, budget, threshold, delaying):  # type: ignore[no-untyped-def]
    """Delay each repeat, or delete it with the repeats that only it needed, from the last to the first.

    A delay without loss is kept; a deletion that saves `threshold` seconds or more is carried out. Returns
    whether anything changed, and the most seconds that deleting a remaining repeat would save; -1 if none can
    go. One function for both, since each function that evaluates changes takes half a second to compile.
    """
    rebuild(S, budget)
    most, changed = -1.0, False
    r = S.meta.repeats - 1
    while r >= 0:
        begin(S)
        described = True
        if delaying:
            described = delay(S, r)
        else:
            drop(S, S.pos[r].repeats, True)
        if described:
            good, change, excess = evaluate_change(S, budget, np.inf)
            helps = good and excess <= S.pos[S.meta.count].excess
            if helps and (delaying or -change >= threshold):
                apply(S, budget)
                changed = True
                r = min(r, S.meta.repeats)
            elif good:
                forget(S)
                if helps:
                    most = max(most, -change)
        r -= 1
    return changed, most
