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
def drop_pass(S, budget, bar):  # type: ignore[no-untyped-def]
    """Try to delete each repeat, with what only it needed, from the last to the first.

    What saves `bar` seconds or more goes at once. Returns whether any went, and the most that any that was
    left would save; -1 if none can go.
    """
    most, any_went = -1.0, False
    r = S.meta[REPEATS] - 1
    while r >= 0:
        begin(S)
        drop(S, S.pos[r].repeats, True)
        good, change, new_excess = trial(S, budget)
        if good and new_excess <= S.pos[S.meta[COUNT]].excess:
            if -change >= bar:
                apply(S, budget)
                any_went = True
                r = min(r, S.meta[REPEATS])
            else:
                most = max(most, -change)
        r -= 1
    return any_went, most


@inner
def delay(S, budget, r):  # type: ignore[no-untyped-def]
    """Move the r-th repeat to right before its first reader, if nothing is lost by it."""
    p = S.pos[r].repeats
    variant = S.pos[p].variant
    gap = S.meta[COUNT]
    for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
        v = S.idx[k]
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


@inner
def delay_pass(S, budget):  # type: ignore[no-untyped-def]
    """Delay each repeat; returns whether any moved."""
    moved = False
    for r in range(S.meta[REPEATS] - 1, -1, -1):
        moved = delay(S, budget, r) or moved
    return moved


@njit
def polish_pass(S, budget, bar, delaying):  # type: ignore[no-untyped-def]
    """One pass over the repeats: `delay_pass` if so asked, else `drop_pass` with its bar.

    One function for both, since each one that evaluates changes takes a second or more to compile.
    """
    rebuild(S, budget)
    if delaying:
        return delay_pass(S, budget), 0.0
    return drop_pass(S, budget, bar)
