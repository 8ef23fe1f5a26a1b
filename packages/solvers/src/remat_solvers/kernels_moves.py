"""Compiled moves of the sequence search: each describes one change to the state; `trial` then evaluates it.

Dropping or adding single repeats has no gradient where rebuilt values pile up, so a move brings along what
it implies: an evicted value comes back together with the producers of its dead inputs, a dropped repeat
takes the repeats with it that only it needed, and whole runs of neighbours are given up or kept at once.
"""

from remat_solvers.compiled import njit_inner as inner
from remat_solvers.kernels_state import (
    BOUNDARY,
    COUNT,
    DELETED,
    INSERTED,
    REPEATS,
    STAMP,
    below,
    delete,
    insert,
    next_event,
    spans,
    uniform,
)


@inner
def close_over(S, value, gap, hold, most):  # type: ignore[no-untyped-def]
    """Insert the producer of `value` before `gap`, after the producers of its inputs that are dead there.

    Values whose `value_stamp` is current count as dead. With chance `hold` a dead input is kept from its last
    use instead. False if that takes more than `most` runs or cannot be done.
    """
    stamp = S.meta[STAMP]
    op = S.val[value].producer
    if op < 0 or not S.val[value].remake or S.ops[op].first >= gap:
        return False
    if S.ops[op].op_stamp == stamp:
        return True
    S.ops[op].op_stamp = stamp
    S.extra[0].stack = op
    S.extra[0].stack_at = S.var[2 * op + 1].in_ptr
    depth = 1
    while depth > 0:
        op = S.extra[depth - 1].stack
        at = S.extra[depth - 1].stack_at
        if at == S.var[2 * op + 2].in_ptr:
            depth -= 1
            if S.meta[INSERTED] >= most or not insert(S, gap, op):
                return False
            continue
        S.extra[depth - 1].stack_at = at + 1
        v = S.idx[at]
        if S.val[v].pinned:
            continue
        if S.val[v].value_stamp != stamp and spans(S, v, gap):
            continue
        maker = S.val[v].producer
        if maker < 0 or not S.val[v].remake or S.ops[maker].op_stamp == stamp:
            continue
        if S.val[v].value_stamp != stamp and uniform(S) < hold:
            continue
        if depth >= most or depth >= 255:
            return False
        S.ops[maker].op_stamp = stamp
        S.extra[depth].stack = maker
        S.extra[depth].stack_at = S.var[2 * maker + 1].in_ptr
        depth += 1
    return True


@inner
def useless(S, p):  # type: ignore[no-untyped-def]
    """Whether nothing reads what the repeat at `p` makes, once the deletions are done."""
    stamp = S.meta[STAMP]
    variant = S.pos[p].variant
    for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
        v = S.idx[k]
        if S.val[v].pinned:
            continue
        e = next_event(S, v, p + 1)
        while e < S.val[v + 1].ev_ptr and S.pos[S.events[e] >> 1].deleted_stamp == stamp:
            e += 1
        if e < S.val[v + 1].ev_ptr and S.events[e] & 1 == 0:
            return False
    return True


@inner
def drop(S, p, cascade):  # type: ignore[no-untyped-def]
    """Delete the repeat at `p` and, if asked, the repeats that become useless."""
    done = S.meta[DELETED]
    delete(S, p)
    while cascade and done < S.meta[DELETED]:
        variant = S.pos[S.extra[done].deleted].variant
        q = S.extra[done].deleted
        done += 1
        for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
            v = S.idx[k]
            e = next_event(S, v, q) - 1
            while e >= S.val[v].ev_ptr and S.events[e] & 1 == 0:
                e -= 1
            if e < S.val[v].ev_ptr:
                continue
            maker = S.events[e] >> 1
            if S.pos[maker].variant & 1 and S.pos[maker].deleted_stamp != S.meta[STAMP] and useless(S, maker):
                delete(S, maker)


@inner
def pick_gap(S, budget):  # type: ignore[no-untyped-def]
    """A random (value, gap): the value is next read at the gap, some way after its last event."""
    count = S.meta[COUNT]
    for _ in range(20):
        q = below(S, count)
        variant = S.pos[q].variant
        width = S.var[variant + 1].in_ptr - S.var[variant].in_ptr
        if width == 0:
            continue
        v = S.idx[S.var[variant].in_ptr + below(S, width)]
        if S.val[v].pinned or S.val[v].size == 0 or not S.val[v].remake:
            continue
        e = next_event(S, v, q)
        if e == S.val[v].ev_ptr:
            continue
        before = S.events[e - 1] >> 1
        if q - before < 2:
            continue
        # Where the sequence is over the budget, look only at what is held there.
        if S.pos[count].excess > 0 and uniform(S) < 0.8 and S.pos[q].excess <= S.pos[before + 1].excess:
            continue
        return v, q, before
    return -1, 0, 0


@inner
def evict(S, budget, hold):  # type: ignore[no-untyped-def]
    """Give a value up between two uses and rebuild it for the second."""
    v, q, before = pick_gap(S, budget)
    if v < 0:
        return False
    gap = q
    if uniform(S) < 0.15:
        gap = before + 1 + below(S, q - before)
    if gap - before < 2:
        return False
    S.val[v].value_stamp = S.meta[STAMP]
    return close_over(S, v, gap, hold, 40)


@inner
def evict_run(S, budget, hold):  # type: ignore[no-untyped-def]
    """Give up what a stretch of consecutive ops made and rebuild it together."""
    v, q, _ = pick_gap(S, budget)
    if v < 0:
        return False
    middle = S.val[v].producer
    span = 1 + below(S, 12)
    low = max(0, middle - below(S, span + 1))
    high = min(S.ops.shape[0], low + span + 1)
    any_value = False
    for op in range(low, high):
        for k in range(S.var[2 * op].out_ptr, S.var[2 * op + 1].out_ptr):
            w = S.idx[k]
            if S.val[w].pinned or not S.val[w].remake or not spans(S, w, q):
                continue
            e = next_event(S, w, q)
            if e > S.val[w].ev_ptr and q - (S.events[e - 1] >> 1) > 1:
                S.val[w].value_stamp = S.meta[STAMP]
                any_value = True
    if not any_value:
        return False
    for op in range(low, high):
        for k in range(S.var[2 * op].out_ptr, S.var[2 * op + 1].out_ptr):
            w = S.idx[k]
            if S.val[w].value_stamp == S.meta[STAMP] and not close_over(S, w, q, hold, 58):
                return False
    return True


@inner
def pick_repeat(S):  # type: ignore[no-untyped-def]
    """Position of a random repeat, or -1."""
    repeats = S.meta[REPEATS]
    return S.pos[below(S, repeats)].repeats if repeats > 0 else -1


@inner
def drop_run(S):  # type: ignore[no-untyped-def]
    """Delete a stretch of consecutive repeats and what only they needed."""
    repeats = S.meta[REPEATS]
    if repeats == 0:
        return False
    i = below(S, repeats)
    for k in range(i, min(repeats, i + 2 + below(S, 8))):
        drop(S, S.pos[k].repeats, True)
    return True


@inner
def shift(S):  # type: ignore[no-untyped-def]
    """Move a repeat elsewhere between the last event of its inputs and the first reader of its outputs."""
    p = pick_repeat(S)
    if p < 0:
        return False
    op = S.pos[p].order
    variant = S.pos[p].variant
    low, high = S.ops[op].first + 1, S.meta[COUNT]
    for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
        e = next_event(S, S.idx[k], p + 1)
        if e < S.val[S.idx[k] + 1].ev_ptr:
            high = min(high, S.events[e] >> 1)
    for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
        v = S.idx[k]
        e = next_event(S, v, p) - 1
        if e >= S.val[v].ev_ptr:
            low = max(low, (S.events[e] >> 1) + 1)
    if uniform(S) < 0.3:
        low = max(S.ops[op].first + 1, low - below(S, 40))
    if high <= low:
        return False
    gap = high if uniform(S) < 0.4 else low + below(S, high - low + 1)
    if gap == p or gap == p + 1:
        return False
    delete(S, p)
    return insert(S, gap, op)


@inner
def shift_first(S):  # type: ignore[no-untyped-def]
    """Move the first run of a backward op within what its inputs and readers allow."""
    count, boundary = S.meta[COUNT], S.meta[BOUNDARY]
    if count <= boundary:
        return False
    p = boundary + below(S, count - boundary)
    variant = S.pos[p].variant
    op = S.pos[p].order
    if variant & 1 or not S.ops[op].backward or S.var[variant + 1].guard_ptr > S.var[variant].guard_ptr:
        return False
    if S.var[variant + 1].over_ptr > S.var[variant].over_ptr:
        return False
    low, high = boundary, count
    for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
        e = next_event(S, S.idx[k], p + 1)
        if e < S.val[S.idx[k] + 1].ev_ptr:
            high = min(high, S.events[e] >> 1)
    for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
        v = S.idx[k]
        e = next_event(S, v, p) - 1
        while e >= S.val[v].ev_ptr and S.events[e] & 1 == 0:
            e -= 1
        if e >= S.val[v].ev_ptr:
            low = max(low, (S.events[e] >> 1) + 1)
    low, high = max(low, p - 60), min(high, p + 60)
    if high <= low:
        return False
    gap = low + below(S, high - low + 1)
    if gap == p or gap == p + 1:
        return False
    delete(S, p)
    return insert(S, gap, op)


@inner
def exchange(S, budget, hold):  # type: ignore[no-untyped-def]
    """Keep what a repeat made and give up something else, near to it if chance says so."""
    p = pick_repeat(S)
    if p < 0:
        return False
    drop(S, p, uniform(S) < 0.8)
    if uniform(S) < 0.5:
        return evict(S, budget, hold)
    # A value made near the dropped op: the neighbour that could be the checkpoint instead.
    op = S.pos[p].order
    for _ in range(8):
        other = op + below(S, 17) - 8
        if other < 0 or other >= S.ops.shape[0] or other == op:
            continue
        variant = 2 * other
        width = S.var[variant + 1].out_ptr - S.var[variant].out_ptr
        if width == 0:
            continue
        v = S.idx[S.var[variant].out_ptr + below(S, width)]
        if S.val[v].pinned or not S.val[v].remake or not spans(S, v, p):
            continue
        e = next_event(S, v, p)
        gap = S.events[e] >> 1
        S.val[v].value_stamp = S.meta[STAMP]
        return close_over(S, v, gap, hold, 40)
    return False
