"""Compiled: derive the state of a sequence, from the sequence alone or from the state before a change.

`apply` carries out the change that `evaluate_change` has evaluated. It leaves what is before the first
position that changes, and where as many runs come as go what is behind the last one. Only the values that the
change touches get other lifetimes; events of the others move. Each value has a part of `State.events` that is
a little longer than it needs; where it becomes too short, the value gets a new one behind those in use, and
`rebuild` puts all in order again.
"""

from remat_solvers.kernels.incremental import NEVER
from remat_solvers.kernels.jit import njit_called as called
from remat_solvers.kernels.jit import njit_inner as inner

SPARE = 2  # events that the part of each value may grow by after `rebuild`


@inner
def capacity_for(events):  # type: ignore[no-untyped-def]
    """The size of a new part for a value with as many events."""
    return events + events // 2 + SPARE


@inner
def add_copy(S, v):  # type: ignore[no-untyped-def]
    """Account for the copy of a value that lives from `born` to `dies`; for `rebuild`."""
    value = S.val[v]
    if value.dies <= value.born:
        return
    S.diff[value.born + 1] += value.size
    S.diff[value.dies + 1] -= value.size
    if S.meta.credits > 0 and value.dies < S.meta.count:
        last = S.pos[value.dies]
        run = S.var[last.variant]
        for k in range(run.credit_ptr, run.credit_end):
            if S.idx[k] == v:
                last.own -= value.size


@called
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
    meta.stamp += 1
    for p in range(count + 2):
        S.diff[p] = 0
    events = 0
    for v in range(values):
        value = S.val[v]
        value.ev_ptr = events
        value.ev_capacity = value.ev_end + SPARE
        events += value.ev_capacity
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
        S.latest[v] = S.events[value.ev_end - 1] if value.ev_end > value.ev_ptr else -1
        if value.born != NEVER:
            if value.pinned or (value.is_tangent and value.dies == value.born):
                value.dies = count
            add_copy(S, v)
    meta.broken = broken
    held = meta.base
    for p in range(count + 1):
        held += S.diff[p]
        S.diff[p] = 0
        S.pos[p].held = held
    S.diff[count + 1] = 0
    S.pos[0].excess = 0.0
    sum_excess(S, 0, count, budget)
    return seconds, S.pos[count].excess


@inner
def changed_part(S):  # type: ignore[no-untyped-def]
    """The positions where the change moves runs: the first, and the one after the last.

    Where as many runs are inserted as deleted, what is behind them stays.
    """
    meta = S.meta
    first, stop = meta.count, 0
    for d in range(meta.deleted):
        first = min(first, S.extra[d].deleted)
        stop = max(stop, S.extra[d].deleted + 1)
    if meta.inserted > 0:
        first = min(first, S.extra[0].in_gap)
        stop = max(stop, S.extra[meta.inserted - 1].in_gap)
    return first, stop if meta.inserted == meta.deleted else meta.count + 1


@inner
def place(S, first, stop):  # type: ignore[no-untyped-def]
    """Give each run of the changed part its new position: in `State.moved` and in `in_at`."""
    meta = S.meta
    i, to = 0, first
    for p in range(first, stop):
        while i < meta.inserted and S.extra[i].in_gap == p:
            S.extra[i].in_at = to
            to += 1
            i += 1
        if S.pos[p].deleted_stamp == meta.stamp:
            S.moved[p] = -1
        else:
            S.moved[p] = to
            to += 1
    while i < meta.inserted:
        S.extra[i].in_at = to
        to += 1
        i += 1


@inner
def move_events(S, first, stop):  # type: ignore[no-untyped-def]
    """Bring the events of all values from `first` to before `stop` to their new positions."""
    meta = S.meta
    for a in range(meta.affected):
        merge_events(S, S.val[a].affected, first, stop)
    for v in range(S.val.shape[0]):
        if S.latest[v] < 2 * first or S.val[v].affected_stamp == meta.stamp:
            continue
        value = S.val[v]
        e = value.ev_end - 1
        while e >= value.ev_ptr:
            p = S.events[e] >> 1
            if p < first:
                break
            if p < stop:
                S.events[e] += 2 * (S.moved[p] - p)
            e -= 1
        S.latest[v] = S.events[value.ev_end - 1]


@inner
def merge_events(S, v, first, stop):  # type: ignore[no-untyped-def]
    """Merge the events of a value with those of inserted runs, at their new positions.

    They are written to free space, and copied back if the value's own part is long enough.
    """
    meta, value = S.meta, S.val[v]
    start = meta.events
    i, e = value.ev_ptr, start
    j = value.head if value.head_stamp == meta.stamp else -1
    while i < value.ev_end or j >= 0:
        code = S.events[i] if i < value.ev_end else 0
        if j >= 0 and (i >= value.ev_end or S.extra[j].extra_key < (code >> 1) * 64 + 63):
            new = S.extra[j]
            S.events[e] = 2 * S.extra[new.extra_key & 63].in_at + new.extra_made
            e += 1
            j = new.extra_next
            continue
        i += 1
        p = code >> 1
        p = p if p < first or p >= stop else S.moved[p]
        S.events[e] = 2 * p + (code & 1)
        e += p >= 0  # else the next event takes the place
    events = e - start
    if events > value.ev_capacity:
        value.ev_ptr = start
        value.ev_capacity = capacity_for(events)
        meta.events += value.ev_capacity
    else:
        for k in range(events):
            S.events[value.ev_ptr + k] = S.events[start + k]
    value.ev_end = value.ev_ptr + events
    S.latest[v] = S.events[value.ev_end - 1] if events > 0 else -1


@inner
def copy_run(S, p, to):  # type: ignore[no-untyped-def]
    """Move what is known of a run to another position."""
    source, target = S.pos[p], S.pos[to]
    target.order, target.variant = source.order, source.variant
    target.held, target.own = source.held, source.own


@inner
def move_runs(S, first, stop):  # type: ignore[no-untyped-def]
    """Bring each run from `first` to before `stop` to its new position."""
    meta = S.meta
    gone = 0  # first towards the front, over what is deleted
    for p in range(first, stop):
        if S.moved[p] < 0:
            gone += 1
        elif gone:
            copy_run(S, p, p - gone)
    if meta.inserted == 0:
        return
    i = meta.inserted
    p = stop - 1 - gone
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
    """Carry out the change that `evaluate_change` has just found valid; returns the excess."""
    meta = S.meta
    held = 0
    for p in range(meta.low, meta.high + 2):
        held += S.diff[p]
        S.diff[p] = 0
        S.pos[p].held += held
    for i in range(meta.touched):
        S.pos[S.touch[i].touched].own += S.touch[i].touched_by
    meta.touched = 0
    first, stop = changed_part(S)
    place(S, first, stop)
    move_events(S, first, stop)
    move_runs(S, first, stop)
    if meta.inserted != meta.deleted:
        meta.count += meta.inserted - meta.deleted
        stop = meta.count
    list_runs(S, first, stop)
    sum_excess(S, min(first, meta.low), max(stop, meta.high + 1), budget)
    meta.deleted = 0
    meta.inserted = 0
    meta.stamp += 1
    return S.pos[meta.count].excess


@inner
def list_runs(S, first, stop):  # type: ignore[no-untyped-def]
    """List repeats and first runs from position `first` to before `stop`."""
    meta = S.meta
    low, high = 0, meta.repeats
    while low < high:
        middle = (low + high) >> 1
        if S.pos[middle].repeats < first:
            low = middle + 1
        else:
            high = middle
    repeats, boundary = low, meta.boundary
    for p in range(first, stop):
        at = S.pos[p]
        if at.variant & 1:
            S.pos[repeats].repeats = p
            repeats += 1
        else:
            op = S.ops[at.order]
            op.first = p
            if not op.backward:
                boundary = p + 1
    if stop >= meta.boundary:  # else a forward op comes later
        meta.boundary = boundary
    if stop == meta.count:
        meta.repeats = repeats


@inner
def sum_excess(S, first, stop, budget):  # type: ignore[no-untyped-def]
    """Enter the bytes of runs from position `first` on and sum their excess; from `stop` on bytes stay."""
    count = S.meta.count
    excess = S.pos[first].excess
    for p in range(first, count):
        at = S.pos[p]
        if p >= stop and at.excess == excess:
            return
        at.excess = excess
        S.load[p] = at.held + at.own
        over = S.load[p] - budget
        if over > 0:
            excess += over
    S.pos[count].excess = excess
