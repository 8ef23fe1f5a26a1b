"""Compiled: derive the state of a sequence, from the sequence alone or from the state before a change.

`apply` carries out the change that `evaluate_change` has evaluated. Only the values that the change touches
get other lifetimes, so it moves the records behind the first change, merges the events, and sums the memory
profile again: a third of the time of `rebuild`. Events are written to the half of `State.events` that is not
in use.
"""

from remat_solvers.kernels.incremental import NEVER, spread
from remat_solvers.kernels.jit import njit_inner as inner


@inner
def add_copy(S, v):  # type: ignore[no-untyped-def]
    """Account for the copy of a value that lives from `born` to `dies`; for `rebuild`."""
    value = S.val[v]
    if value.dies <= value.born:
        return
    S.pos[value.born + 1].diff += value.size
    S.pos[value.dies + 1].diff -= value.size
    if S.meta.credits > 0 and value.dies < S.meta.count:
        last = S.pos[value.dies]
        run = S.var[last.variant]
        for k in range(run.credit_ptr, run.credit_end):
            if S.idx[k] == v:
                last.own -= value.size


@inner
def rebuild(S, budget):  # type: ignore[no-untyped-def]
    """Derive everything from `S.pos.order` and the switches; returns (seconds, excess)."""
    meta = S.meta
    count = meta.count
    for i in range(S.ops.shape[0]):
        S.ops[i].first = -1
    values = S.val.shape[0]
    for v in range(values):
        S.val[v].ev_end = 0
    boundary, repeats, seconds, broken = 0, 0, 0.0, 0
    for p in range(count):
        at = S.pos[p]
        op = S.ops[at.order]
        if op.first < 0:
            op.first = p
            at.variant = op.now
            if not op.backward:
                boundary = p + 1
        else:
            at.variant = op.now + 1
            S.pos[repeats].repeats = p
            repeats += 1
        run = S.var[at.variant]
        broken = max(broken, run.runs_once)
        seconds += run.time
        for k in range(run.in_ptr, run.in_end):
            S.val[S.idx[k]].ev_end += 1
        for k in range(run.out_ptr, run.out_end):
            S.val[S.idx[k]].ev_end += 1
        at.own = run.out_total + run.workspace
    meta.boundary = boundary
    meta.repeats = repeats
    meta.deleted = 0
    meta.inserted = 0
    meta.half = 0
    meta.stamp += 1
    for p in range(count + 2):
        S.pos[p].diff = 0
    events = 0
    for v in range(values):
        value = S.val[v]
        value.ev_ptr = events
        events += value.ev_end
        value.ev_end = value.ev_ptr  # grows while events are entered
        value.born = boundary - 1 if value.is_tangent else NEVER
        value.dies = value.born
    meta.events = events
    for p in range(count):
        run = S.var[S.pos[p].variant]
        for k in range(run.in_ptr, run.in_end):
            value = S.val[S.idx[k]]
            S.events[value.ev_end] = 2 * p
            value.ev_end += 1
            if value.born == NEVER or (value.is_tangent and p < boundary):
                broken = 1
            value.dies = p
        for k in range(run.out_ptr, run.out_end):
            v = S.idx[k]
            value = S.val[v]
            S.events[value.ev_end] = 2 * p + 1
            value.ev_end += 1
            if value.born != NEVER:
                if value.pinned:
                    continue
                add_copy(S, v)
            value.born = p
            value.dies = p
    for v in range(values):
        value = S.val[v]
        if value.born != NEVER:
            if value.pinned or (value.is_tangent and value.dies == value.born):
                value.dies = count
            add_copy(S, v)
    meta.broken = broken
    held = meta.base
    excess = 0.0
    for p in range(count + 1):
        at = S.pos[p]
        held += at.diff
        at.diff = 0
        at.held = held
        at.excess = excess
        over = held + at.own - budget
        if over > 0:
            excess += over
    S.pos[count + 1].diff = 0
    return seconds, S.pos[count].excess


@inner
def place(S):  # type: ignore[no-untyped-def]
    """Give each run its new position: in `spare`, -1 if deleted, and in `in_at`; returns the new length."""
    meta = S.meta
    i, to = 0, 0
    for p in range(meta.count + 1):
        while i < meta.inserted and S.extra[i].in_gap == p:
            S.extra[i].in_at = to
            to += 1
            i += 1
        at = S.pos[p]
        if at.deleted_stamp == meta.stamp:
            at.spare = -1
        else:
            at.spare = to
            to += 1
    return to - 1


@inner
def merge_events(S):  # type: ignore[no-untyped-def]
    """Write the events of all values at their new positions to the other half of `S.events`."""
    meta = S.meta
    e = 0 if meta.half else S.events.shape[0] // 2
    meta.half = 1 - meta.half
    begin = e
    for v in range(S.val.shape[0]):
        value = S.val[v]
        i, stop = value.ev_ptr, value.ev_end
        value.ev_ptr = e
        j = -1
        if value.affected_stamp == meta.stamp and value.head_stamp == meta.stamp:
            j = value.head
        while i < stop or j >= 0:
            code = S.events[i] if i < stop else 0
            if j >= 0 and (i >= stop or S.extra[j].extra_key < (code >> 1) * 64 + 63):
                new = S.extra[j]
                S.events[e] = 2 * S.extra[new.extra_key & 63].in_at + new.extra_made
                e += 1
                j = new.extra_next
                continue
            i += 1
            p = S.pos[code >> 1].spare
            S.events[e] = 2 * p + (code & 1)
            e += p >= 0  # else the next event takes the place
        value.ev_end = e
    meta.events = e - begin


@inner
def copy_run(S, p, to):  # type: ignore[no-untyped-def]
    """Move what is known of a run to another position."""
    source, target = S.pos[p], S.pos[to]
    target.order, target.variant = source.order, source.variant
    target.held, target.own = source.held, source.own


@inner
def move_runs(S):  # type: ignore[no-untyped-def]
    """Bring each run to its new position."""
    meta = S.meta
    gone = 0  # first towards the front, over what is deleted
    low = meta.count
    for d in range(meta.deleted):
        low = min(low, S.extra[d].deleted)
    for p in range(low, meta.count + 1):
        if S.pos[p].spare < 0:
            gone += 1
        elif gone:
            copy_run(S, p, p - gone)
    if meta.inserted == 0:
        return
    i = meta.inserted
    p = meta.count - gone
    while i > 0:
        to = p + i
        if S.extra[i - 1].in_at == to:
            i -= 1
            new, target = S.extra[i], S.pos[to]
            target.order, target.variant = new.in_op, new.in_variant
            target.held, target.own = new.in_held, new.in_own
        else:
            copy_run(S, p, to)
            p -= 1


@inner
def apply(S, budget):  # type: ignore[no-untyped-def]
    """Carry out the change that was evaluated last; returns (seconds, excess)."""
    meta = S.meta
    spread(S)
    held = 0
    for p in range(meta.low, meta.high + 2):
        at = S.pos[p]
        held += at.diff
        at.diff = 0
        at.held += held
    for i in range(meta.touched):
        S.pos[S.touch[i].touched].own += S.touch[i].touched_by
    meta.touched = 0
    count = place(S)
    merge_events(S)
    move_runs(S)
    meta.count = count
    boundary, repeats, seconds, excess = 0, 0, 0.0, 0.0
    for p in range(count):
        at = S.pos[p]
        seconds += S.var[at.variant].time
        if at.variant & 1:
            S.pos[repeats].repeats = p
            repeats += 1
        else:
            op = S.ops[at.order]
            op.first = p
            if not op.backward:
                boundary = p + 1
        at.excess = excess
        over = at.held + at.own - budget
        if over > 0:
            excess += over
    S.pos[count].excess = excess
    meta.boundary = boundary
    meta.repeats = repeats
    meta.deleted = 0
    meta.inserted = 0
    meta.stamp += 1
    return seconds, excess
