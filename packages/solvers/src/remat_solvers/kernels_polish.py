"""Compiled polishing; `polish` explains it."""

from remat_solvers.compiled import njit_in_place as njit
from remat_solvers.compiled import njit_inner as inner
from remat_solvers.kernels_moves import drop
from remat_solvers.kernels_state import (
    COUNT,
    REPEATS,
    apply,
    begin,
    delete,
    insert,
    next_event,
    rebuild,
    trial,
)


@inner
def drop_best(S, budget):  # type: ignore[no-untyped-def]
    """Delete the repeat (and what only it needed) that saves most within the budget; False if none does."""
    excess = S.pos[S.meta[COUNT]].excess
    best, best_change = -1, 0.0
    for r in range(S.meta[REPEATS]):
        p = S.pos[r].repeats
        begin(S)
        drop(S, p, True)
        good, change, new_excess = trial(S, budget)
        if good and new_excess <= excess and (best < 0 or change < best_change):
            best, best_change = p, change
    if best < 0:
        return False
    begin(S)
    drop(S, best, True)
    apply(S, budget)
    return True


@inner
def delay(S, budget, r):  # type: ignore[no-untyped-def]
    """Move the r-th repeat to right before its first reader, if nothing is lost by it."""
    p = S.pos[r].repeats
    variant = S.pos[p].variant
    gap = S.meta[COUNT]
    for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
        v = S.out_idx[k]
        e = next_event(S, v, p + 1)
        if e < S.val[v + 1].ev_ptr:
            gap = min(gap, S.events[e] >> 1)
    if gap <= p + 1 or gap == S.meta[COUNT]:
        return False
    op = S.pos[p].order
    begin(S)
    delete(S, p)
    insert(S, gap, op)
    good, _, new_excess = trial(S, budget)
    if not good or new_excess > S.pos[S.meta[COUNT]].excess:
        return False
    apply(S, budget)
    return True


@njit
def polish(S, budget, steps):  # type: ignore[no-untyped-def]
    """Up to `steps` improvements; returns whether there may be more."""
    rebuild(S, budget)
    for _ in range(steps):
        if drop_best(S, budget):
            continue
        moved = False
        for r in range(S.meta[REPEATS] - 1, -1, -1):
            moved = delay(S, budget, r) or moved
        if not moved or not drop_best(S, budget):
            return False
    return True
