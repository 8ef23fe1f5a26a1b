"""Compiled greedy eviction; `methods.greedy` explains it."""

import numpy as np

from remat_solvers.kernels.derived import apply, rebuild
from remat_solvers.kernels.incremental import begin, evaluate_change, forget, next_event, spans
from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.jit import njit_inner as inner
from remat_solvers.kernels.recompute import close_over

LOOKED_AT = 64  # values evaluated per step; more are sampled by a stride


@inner
def describe(S, v, gap):  # type: ignore[no-untyped-def]
    """The change that evicts `v` until `gap` and recomputes it there."""
    begin(S)
    S.val[v].value_stamp = S.meta.stamp
    S.meta.left_s = np.inf
    return close_over(S, v, gap, 0.0, 50)


@inner
def worst_position(S):  # type: ignore[no-untyped-def]
    """Position of the peak."""
    worst, most = 0, -1
    for p in range(S.meta.count):
        if S.load[p] > most:
            worst, most = p, S.load[p]
    return worst


@inner
def gap_over(S, v, p):  # type: ignore[no-untyped-def]
    """The next use of a value that is held over position `p` but not used there; -1 if there is none."""
    value = S.val[v]
    if value.pinned or value.size == 0 or not value.recomputable or not spans(S, v, p):
        return -1
    gap = S.events[next_event(S, v, p)] >> 1
    return gap if gap > p else -1


@inner
def evict_latest(S, p, keep):  # type: ignore[no-untyped-def]
    """Evict the value over `p`, not marked in `keep`, that is used last; False if there is none.

    The latest use comes first because its recomputation may use other values before their next use.
    """
    while S.meta.count + 100 <= S.pos.shape[0]:
        found, found_gap = -1, -1
        for v in range(S.val.shape[0]):
            if keep[v] == 0:
                gap = gap_over(S, v, p)
                if gap > found_gap:
                    found, found_gap = v, gap
        if found < 0:
            return False
        if describe(S, found, found_gap):
            return True
        keep[found] = 1
    return False


@njit
def greedy(S, budget, steps, op, keep):  # type: ignore[no-untyped-def]
    """Evict until there is no more to do or `steps` are done; returns whether there is more.

    With `op` at -1 evict what costs least per byte of excess removed, until the budget holds or nothing
    helps; else evict everything that `keep` does not mark over the first run of `op`. One function for both,
    since each function that evaluates changes takes half a second to compile.
    """
    _, excess = rebuild(S, budget)
    values = S.val.shape[0]
    for _ in range(steps):
        if op >= 0:
            if not evict_latest(S, S.ops[op].first, keep):
                return False
        else:
            if excess <= 0:
                return False
            p = worst_position(S)
            count = 0
            for v in range(values):
                if gap_over(S, v, p) >= 0:
                    count += 1
            stride = 1 + count // LOOKED_AT
            best, best_gap, best_score = -1, 0, np.inf
            seen = 0
            for v in range(values):
                gap = gap_over(S, v, p)
                if gap < 0:
                    continue
                seen += 1
                if seen % stride or not describe(S, v, gap):
                    continue
                good, change, new_excess = evaluate_change(S, budget, np.inf)
                if good:
                    forget(S)
                if good and new_excess < excess:
                    score = change / (excess - new_excess)
                    if score < best_score:
                        best, best_gap, best_score = v, gap, score
            if best < 0:
                return False
            describe(S, best, best_gap)
        good, _, _ = evaluate_change(S, budget, np.inf)
        if not good:
            return False  # the arrays are full
        excess = apply(S, budget)
    return True
