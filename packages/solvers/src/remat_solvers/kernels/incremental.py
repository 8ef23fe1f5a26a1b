"""Compiled incremental evaluation: the effect of a change on a sequence's time and excess over the budget.

A sequence is a list of op runs. Its *excess* is the sum over positions of the bytes above the budget. A
change is a set of deleted positions and of inserted runs. Inserting a repeat of an op already run and
deleting any repeat keep a sequence valid, and only the lifetimes of the values that those runs touch change,
so `evaluate_change` derives these few lifetimes again and adds the difference to the stored memory profile:
about 1 us at 600 ops, where a full evaluation takes 10. `derived.apply` carries a change out.

Moments are ints: the run at old position p has key ``64 p + 63``, the k-th run inserted before it ``64 p +
k``.

One simplification keeps this an upper bound of the referee's memory: an output reuses only the one input that
`State.idx` names, never a second choice.

A record is looked up once and then used by name: numba takes about ten times as long to compile a look-up as
a field access.
"""

import numpy as np

from remat_solvers.kernels.jit import njit_inner as inner

MOST = 60  # inserted runs per change, below the 63 keys between two positions
GONE = 1 << 60
NEVER = -9
TOGETHER = 128  # positions between two looks at whether a change is refused


@inner
def close_copy(S, v, born, dies, sign):  # type: ignore[no-untyped-def]
    """Account for one copy of a value, alive after the run at key `born` until the run at key `dies`."""
    meta = S.meta
    size = sign * S.val[v].size
    low = (born + 1) >> 6
    high = ((dies + 1) >> 6) - 1
    if low <= high:
        S.diff[low] += size
        S.diff[high + 1] -= size
        meta.low = min(meta.low, low)
        meta.high = max(meta.high, high)
    slot = -1
    for i in range(meta.inserted):
        new = S.extra[i]
        if new.in_key == dies:
            slot = i
        if sign < 0:
            if low <= new.in_gap <= high:
                new.in_held += size
        elif born < new.in_key <= dies:
            new.in_held += size
    if meta.credits == 0 or dies <= born:
        return
    p = dies >> 6
    if dies & 63 < 63:
        new = S.extra[slot]
        run = S.var[new.in_variant]
        for k in range(run.credit_ptr, run.credit_end):
            if S.idx[k] == v:
                new.in_own -= size
    elif p < meta.count:
        run = S.var[S.pos[p].variant]
        for k in range(run.credit_ptr, run.credit_end):
            if S.idx[k] == v:
                touch = S.touch[meta.touched]
                touch.touched = p
                touch.touched_by = -size
                meta.touched += 1
                meta.low = min(meta.low, p)
                meta.high = max(meta.high, p)


@inner
def copies(S, v, sign, changed):  # type: ignore[no-untyped-def]
    """Account for each copy of a value, by its old or its changed events."""
    value, meta = S.val[v], S.meta
    i, j = value.ev_ptr, -1
    if changed and value.head_stamp == meta.stamp:
        j = value.head
    last = meta.count * 64 + 63
    alive = value.is_tangent == 1
    born = meta.boundary * 64 - 1
    dies = born
    used = False
    while i < value.ev_end or j >= 0:
        key = last
        made = 0
        if i < value.ev_end:
            code = S.events[i]
            key = (code >> 1) * 64 + 63
            made = code & 1
            if changed and S.pos[code >> 1].deleted_stamp == meta.stamp:
                i += 1
                continue
        if j >= 0 and S.extra[j].extra_key < key:
            new = S.extra[j]
            key = new.extra_key
            made = new.extra_made
            j = new.extra_next
        else:
            i += 1
        if made:
            if alive and value.pinned:
                continue
            if alive:
                close_copy(S, v, born, dies, sign)
            alive, born, dies, used = True, key, key, False
        else:
            if not alive or key <= born:
                meta.bad = 1
                return
            dies = key
            used = True
    if alive:
        if value.pinned or (value.is_tangent and not used):
            dies = last
        close_copy(S, v, born, dies, sign)


@inner
def affect(S, v):  # type: ignore[no-untyped-def]
    """Record that a change touches a value."""
    value = S.val[v]
    if value.affected_stamp != S.meta.stamp:
        value.affected_stamp = S.meta.stamp
        S.val[S.meta.affected].affected = v
        S.meta.affected += 1


@inner
def add_extra(S, v, key, made):  # type: ignore[no-untyped-def]
    """Record an event of an inserted run; called in the order of keys."""
    affect(S, v)
    value, meta = S.val[v], S.meta
    e = meta.extra
    meta.extra += 1
    new = S.extra[e]
    new.extra_key = key
    new.extra_made = made
    new.extra_next = -1
    if value.head_stamp == meta.stamp:
        S.extra[value.tail].extra_next = e
    else:
        value.head_stamp = meta.stamp
        value.head = e
    value.tail = e


@inner
def begin(S):  # type: ignore[no-untyped-def]
    """Start describing a change."""
    meta = S.meta
    meta.stamp += 1
    meta.deleted = 0
    meta.inserted = 0
    meta.wanted = 0
    meta.affected = 0
    meta.extra = 0
    meta.bad = 0


@inner
def delete(S, p):  # type: ignore[no-untyped-def]
    """Add the deletion of position `p` to the change."""
    at, meta = S.pos[p], S.meta
    if at.deleted_stamp != meta.stamp and meta.deleted < MOST:
        at.deleted_stamp = meta.stamp
        S.extra[meta.deleted].deleted = p
        meta.deleted += 1


@inner
def insert(S, gap, op):  # type: ignore[no-untyped-def]
    """Add a repeat of `op` before position `gap`, after what was inserted there already; False if full."""
    i = S.meta.inserted
    if i >= MOST:
        return False
    new = S.extra[i]
    while i > 0 and S.extra[i - 1].in_gap > gap:
        before = S.extra[i - 1]
        new.in_gap = before.in_gap
        new.in_op = before.in_op
        new = before
        i -= 1
    new.in_gap = gap
    new.in_op = op
    S.meta.inserted += 1
    return True


@inner
def added_seconds(S):  # type: ignore[no-untyped-def]
    """The seconds that the change adds; which variant each inserted run is."""
    meta = S.meta
    seconds = 0.0
    for d in range(meta.deleted):
        seconds -= S.var[S.pos[S.extra[d].deleted].variant].time
    for i in range(meta.inserted):
        new = S.extra[i]
        op = S.ops[new.in_op]
        new.in_variant = op.now + (S.pos[op.first].deleted_stamp != meta.stamp)
        seconds += S.var[new.in_variant].time
    return seconds


@inner
def list_events(S):  # type: ignore[no-untyped-def]
    """List the values that the change affects, and events of inserted runs; False if there is no space."""
    meta = S.meta
    for d in range(meta.deleted):
        run = S.var[S.pos[S.extra[d].deleted].variant]
        for k in range(run.in_ptr, run.in_end):
            affect(S, S.idx[k])
        for k in range(run.out_ptr, run.out_end):
            affect(S, S.idx[k])
    for i in range(meta.inserted):
        new = S.extra[i]
        new.in_key = new.in_gap * 64 + i
        run = S.var[new.in_variant]
        if meta.extra + run.in_end - run.in_ptr + run.out_end - run.out_ptr > S.extra.shape[0]:
            return False
        for k in range(run.in_ptr, run.in_end):
            add_extra(S, S.idx[k], new.in_key, 0)
        for k in range(run.out_ptr, run.out_end):
            add_extra(S, S.idx[k], new.in_key, 1)
    events = meta.extra
    for a in range(meta.affected):
        value = S.val[S.val[a].affected]
        events += value.ev_end - value.ev_ptr
    # The most that `apply` takes, and what `rebuild` leaves free.
    needed = 2 * (events + meta.affected + S.val.shape[0])
    return meta.count + meta.inserted + 8 <= S.pos.shape[0] and meta.events + needed <= S.events.shape[0]


@inner
def spread(S):  # type: ignore[no-untyped-def]
    """Enter the bytes that the change adds: in `diff` at old positions, in inserted runs, and in `touch`."""
    meta = S.meta
    meta.touched = 0
    meta.low = meta.count
    meta.high = -1
    for i in range(meta.inserted):
        new = S.extra[i]
        run = S.var[new.in_variant]
        new.in_held = S.pos[new.in_gap].held
        new.in_own = run.out_total + run.workspace
    for a in range(meta.affected):
        v = S.val[a].affected
        if S.val[v].size > 0 or S.val[v].is_tangent:
            for sign in range(-1, 2, 2):  # one call: it is inlined, and takes long to compile
                copies(S, v, sign, sign > 0)


@inner
def forget(S):  # type: ignore[no-untyped-def]
    """Remove what `spread` has entered."""
    meta = S.meta
    for p in range(meta.low, meta.high + 2):
        S.diff[p] = 0
    meta.touched = 0


@inner
def evaluate_change(S, budget, most):  # type: ignore[no-untyped-def]
    """Evaluate the change; returns (whether it is valid, change in seconds, new excess).

    A change whose seconds, and its excess at the price `meta.price`, rise by more than `most` counts as not
    valid: most changes are refused, and these are refused as soon as they are known to be. What a valid one
    does to the memory profile stays entered until `derived.apply` or `forget`.
    """
    meta = S.meta
    count = meta.count
    seconds = added_seconds(S)
    if seconds - meta.price * S.pos[count].excess > most:
        return False, seconds, 0.0
    if not list_events(S):
        return False, seconds, 0.0
    spread(S)
    low, high = meta.low, meta.high
    for d in range(meta.deleted):
        p = S.extra[d].deleted
        S.load[p] -= GONE
        low = min(low, p)
        high = max(high, p)
    high = min(high, count - 1)
    for i in range(meta.touched):
        S.load[S.touch[i].touched] += S.touch[i].touched_by
    excess = S.pos[count].excess
    most_excess = np.inf if meta.price <= 0 else excess + (most - seconds) / meta.price
    if low <= high:
        excess -= S.pos[high + 1].excess - S.pos[low].excess
    for i in range(meta.inserted):
        over = S.extra[i].in_held + S.extra[i].in_own - budget
        if over > 0:
            excess += over
    held = -budget
    p = low
    while p <= high and excess <= most_excess:
        stop = min(p + TOGETHER, high + 1)
        total = 0
        # Of a signed index numba asks whether it counts from the end.
        for q in range(np.uint64(p), np.uint64(stop)):
            held += S.diff[q]
            over = S.load[q] + held
            total += over & ~(over >> 63)  # 0 if it is negative
        excess += total
        p = stop
    for d in range(meta.deleted):
        S.load[S.extra[d].deleted] += GONE
    for i in range(meta.touched):
        S.load[S.touch[i].touched] -= S.touch[i].touched_by
    good = meta.bad == 0 and excess <= most_excess
    if not good:
        forget(S)
    return good, seconds, max(excess, 0.0)


@inner
def next_event(S, v, p):  # type: ignore[no-untyped-def]
    """Index into `S.events` of the value's first event at or after position `p`; the row's end if none."""
    low, high = S.val[v].ev_ptr, S.val[v].ev_end
    while low < high:
        middle = (low + high) >> 1
        if S.events[middle] >> 1 < p:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def spans(S, v, gap):  # type: ignore[no-untyped-def]
    """Whether a copy of the value is held in the gap before position `gap`."""
    value = S.val[v]
    e = next_event(S, v, gap)
    if value.pinned:
        return e > value.ev_ptr
    if e >= value.ev_end or S.events[e] & 1:
        return False
    return e > value.ev_ptr or (value.is_tangent == 1 and gap >= S.meta.boundary)


@inner
def uniform(S):  # type: ignore[no-untyped-def]
    """A random float in [0, 1), by xorshift64* (Vigna 2016)."""
    x = S.meta.random
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    S.meta.random = x
    return np.float64(x * np.uint64(2685821657736338717) >> np.uint64(11)) / 9007199254740992.0


@inner
def below(S, bound):  # type: ignore[no-untyped-def]
    """A random int in [0, bound)."""
    return min(np.int64(uniform(S) * bound), bound - 1)
