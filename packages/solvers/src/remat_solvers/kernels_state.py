"""Compiled incremental evaluation: what a change does to a sequence's time and excess over the budget.

A sequence is a list of op runs. Its *excess* is the sum over positions of the bytes above the budget. A
change is a set of deleted positions and of inserted runs. Inserting a repeat of an op already run and
deleting any repeat keep a sequence valid, and only the lifetimes of the values that those runs touch
change, so `trial` re-derives these few lifetimes and adds the difference to the stored memory profile:
about 1 us at 600 ops, where a full evaluation takes 10. `apply` carries a change out and rebuilds
everything.

Moments are ints: the run at old position p has key ``64 p + 63``, the k-th run inserted before it ``64 p +
k``.

One simplification keeps this an upper bound of the referee's memory: an output takes over only the one
input that `State.idx` names, never a second choice.
"""

import numpy as np

from remat_solvers.compiled import njit_inner as inner

# Places in `State.meta`.
COUNT, BOUNDARY, REPEATS, EVENTS, STAMP, DELETED, INSERTED, AFFECTED, EXTRA, BAD, TOUCHED, LOW, HIGH = range(
    13
)
BASE, CREDITS = 13, 14
MOST = 60  # inserted runs per change, below the 63 keys between two positions
GONE = 1 << 60
NEVER = -9


@inner
def settle(S, v):  # type: ignore[no-untyped-def]
    """Account for the copy of a value that lives from `born` to `dies`; for `rebuild`."""
    born, dies = S.val[v].born, S.val[v].dies
    if dies > born:
        S.pos[born + 1].diff += S.val[v].size
        S.pos[dies + 1].diff -= S.val[v].size
        if S.meta[CREDITS] > 0 and dies < S.meta[COUNT]:
            variant = S.pos[dies].variant
            for k in range(S.var[variant].credit_ptr, S.var[variant + 1].credit_ptr):
                if S.idx[k] == v:
                    S.pos[dies].own -= S.val[v].size


@inner
def rebuild(S, budget):  # type: ignore[no-untyped-def]
    """Derive everything from `S.pos.order`; returns (seconds, excess)."""
    count = S.meta[COUNT]
    for op in range(S.ops.shape[0]):
        S.ops[op].first = -1
    values = S.val.shape[0] - 1
    for v in range(values + 1):
        S.val[v].ev_ptr = 0
    boundary, repeats, seconds = 0, 0, 0.0
    for p in range(count):
        op = S.pos[p].order
        if S.ops[op].first < 0:
            S.ops[op].first = p
            variant = 2 * op
            if not S.ops[op].backward:
                boundary = p + 1
        else:
            variant = 2 * op + 1
            S.pos[repeats].repeats = p
            repeats += 1
        S.pos[p].variant = variant
        seconds += S.var[variant].time
        for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
            S.val[S.idx[k] + 1].ev_ptr += 1
        for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
            S.val[S.idx[k] + 1].ev_ptr += 1
        S.pos[p].own = S.var[variant].out_total + S.var[variant].workspace
    for v in range(values):
        S.val[v + 1].ev_ptr += S.val[v].ev_ptr
        S.val[v].ev_fill = S.val[v].ev_ptr
    S.meta[EVENTS] = S.val[values].ev_ptr
    S.meta[BOUNDARY] = boundary
    S.meta[REPEATS] = repeats
    S.meta[DELETED] = 0
    S.meta[INSERTED] = 0
    S.meta[STAMP] += 1
    for p in range(count + 2):
        S.pos[p].diff = 0
    for v in range(values):
        S.val[v].born = boundary - 1 if S.val[v].is_tangent else NEVER
        S.val[v].dies = S.val[v].born
    for p in range(count):
        variant = S.pos[p].variant
        for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
            v = S.idx[k]
            S.events[S.val[v].ev_fill] = 2 * p
            S.val[v].ev_fill += 1
            S.val[v].dies = p
        for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
            v = S.idx[k]
            S.events[S.val[v].ev_fill] = 2 * p + 1
            S.val[v].ev_fill += 1
            if S.val[v].born == NEVER:
                S.val[v].born = p
                S.val[v].dies = p
            elif not S.val[v].pinned:
                settle(S, v)
                S.val[v].born = p
                S.val[v].dies = p
    for v in range(values):
        if S.val[v].born != NEVER:
            if S.val[v].pinned or (S.val[v].is_tangent and S.val[v].dies == S.val[v].born):
                S.val[v].dies = count
            settle(S, v)
    held = S.meta[BASE]
    excess = 0.0
    for p in range(count):
        held += S.pos[p].diff
        S.pos[p].diff = 0
        S.pos[p].held = held
        S.pos[p].excess = excess
        over = held + S.pos[p].own - budget
        if over > 0:
            excess += over
    S.pos[count].held = held + S.pos[count].diff
    S.pos[count].diff = 0
    S.pos[count + 1].diff = 0
    S.pos[count].excess = excess
    return seconds, excess


@inner
def close_copy(S, v, born, dies, sign):  # type: ignore[no-untyped-def]
    """Account for one copy of a value, alive after the run at key `born` until the run at key `dies`."""
    size = sign * S.val[v].size
    low = (born + 1) >> 6
    high = ((dies + 1) >> 6) - 1
    if low <= high:
        S.pos[low].diff += size
        S.pos[high + 1].diff -= size
        S.meta[LOW] = min(S.meta[LOW], low)
        S.meta[HIGH] = max(S.meta[HIGH], high)
    for i in range(S.meta[INSERTED]):
        key = S.extra[i].in_key
        if sign < 0:
            if low <= S.extra[i].in_gap <= high:
                S.extra[i].in_held += size
        elif born < key <= dies:
            S.extra[i].in_held += size
    if S.meta[CREDITS] > 0 and dies > born:
        slot = -1
        p = dies >> 6
        if dies & 63 == 63:
            if p >= S.meta[COUNT]:
                return
            variant = S.pos[p].variant
        else:
            for i in range(S.meta[INSERTED]):
                if S.extra[i].in_key == dies:
                    slot = i
            variant = S.extra[slot].in_variant
        for k in range(S.var[variant].credit_ptr, S.var[variant + 1].credit_ptr):
            if S.idx[k] == v:
                if slot >= 0:
                    S.extra[slot].in_own -= size
                else:
                    S.touch[S.meta[TOUCHED]].touched = p
                    S.touch[S.meta[TOUCHED]].touched_by = -size
                    S.meta[TOUCHED] += 1
                    S.meta[LOW] = min(S.meta[LOW], p)
                    S.meta[HIGH] = max(S.meta[HIGH], p)


@inner
def copies(S, v, sign, changed):  # type: ignore[no-untyped-def]
    """Walk a value's events, old or changed, and account for each of its copies."""
    i, end = S.val[v].ev_ptr, S.val[v + 1].ev_ptr
    j = -1
    stamp = S.meta[STAMP]
    if changed and S.val[v].head_stamp == stamp:
        j = S.val[v].head
    last = S.meta[COUNT] * 64 + 63
    alive = S.val[v].is_tangent == 1
    born = S.meta[BOUNDARY] * 64 - 1
    dies = born
    used = False
    while i < end or j >= 0:
        key = last
        made = 0
        if i < end:
            code = S.events[i]
            key = (code >> 1) * 64 + 63
            made = code & 1
            if changed and S.pos[code >> 1].deleted_stamp == stamp:
                i += 1
                continue
        if j >= 0 and S.extra[j].extra_key < key:
            key = S.extra[j].extra_key
            made = S.extra[j].extra_made
            j = S.extra[j].extra_next
        else:
            i += 1
        if made:
            if alive and S.val[v].pinned:
                continue
            if alive:
                close_copy(S, v, born, dies, sign)
            alive, born, dies, used = True, key, key, False
        else:
            if not alive or key <= born:
                S.meta[BAD] = 1
                return
            dies = key
            used = True
    if alive:
        if S.val[v].pinned or (S.val[v].is_tangent and not used):
            dies = last
        close_copy(S, v, born, dies, sign)


@inner
def affect(S, v):  # type: ignore[no-untyped-def]
    """Note that a change touches a value."""
    if S.val[v].affected_stamp != S.meta[STAMP]:
        S.val[v].affected_stamp = S.meta[STAMP]
        S.val[S.meta[AFFECTED]].affected = v
        S.meta[AFFECTED] += 1


@inner
def add_extra(S, v, key, made):  # type: ignore[no-untyped-def]
    """Note an event of an inserted run; called in the order of keys."""
    e = S.meta[EXTRA]
    S.meta[EXTRA] += 1
    S.extra[e].extra_key = key
    S.extra[e].extra_made = made
    S.extra[e].extra_next = -1
    if S.val[v].head_stamp == S.meta[STAMP]:
        S.extra[S.val[v].tail].extra_next = e
    else:
        S.val[v].head_stamp = S.meta[STAMP]
        S.val[v].head = e
    S.val[v].tail = e


@inner
def begin(S):  # type: ignore[no-untyped-def]
    """Start describing a change."""
    S.meta[STAMP] += 1
    S.meta[DELETED] = 0
    S.meta[INSERTED] = 0
    S.meta[AFFECTED] = 0
    S.meta[EXTRA] = 0
    S.meta[BAD] = 0


@inner
def delete(S, p):  # type: ignore[no-untyped-def]
    """Add the deletion of position `p` to the change."""
    if S.pos[p].deleted_stamp != S.meta[STAMP] and S.meta[DELETED] < MOST:
        S.pos[p].deleted_stamp = S.meta[STAMP]
        S.extra[S.meta[DELETED]].deleted = p
        S.meta[DELETED] += 1


@inner
def insert(S, gap, op):  # type: ignore[no-untyped-def]
    """Add a repeat of `op` before position `gap`, after what was inserted there already; False if full."""
    i = S.meta[INSERTED]
    if i >= MOST:
        return False
    while i > 0 and S.extra[i - 1].in_gap > gap:
        S.extra[i].in_gap = S.extra[i - 1].in_gap
        S.extra[i].in_op = S.extra[i - 1].in_op
        i -= 1
    S.extra[i].in_gap = gap
    S.extra[i].in_op = op
    S.meta[INSERTED] += 1
    return True


@inner
def trial(S, budget):  # type: ignore[no-untyped-def]
    """Evaluate the change; returns (whether it can be carried out, change in seconds, new excess)."""
    count = S.meta[COUNT]
    seconds = 0.0
    events = S.meta[EVENTS]
    S.meta[TOUCHED] = 0
    S.meta[LOW] = count
    S.meta[HIGH] = -1
    for d in range(S.meta[DELETED]):
        p = S.extra[d].deleted
        variant = S.pos[p].variant
        seconds -= S.var[variant].time
        for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
            affect(S, S.idx[k])
        for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
            affect(S, S.idx[k])
    inserted = S.meta[INSERTED]
    for i in range(inserted):
        gap = S.extra[i].in_gap
        op = S.extra[i].in_op
        key = gap * 64 + i
        S.extra[i].in_key = key
        variant = 2 * op + 1
        if S.pos[S.ops[op].first].deleted_stamp == S.meta[STAMP]:
            variant = 2 * op
        S.extra[i].in_variant = variant
        S.extra[i].in_held = S.pos[gap].held
        S.extra[i].in_own = S.var[variant].out_total + S.var[variant].workspace
        seconds += S.var[variant].time
        for k in range(S.var[variant].in_ptr, S.var[variant + 1].in_ptr):
            affect(S, S.idx[k])
            add_extra(S, S.idx[k], key, 0)
            events += 1
        for k in range(S.var[variant].out_ptr, S.var[variant + 1].out_ptr):
            affect(S, S.idx[k])
            add_extra(S, S.idx[k], key, 1)
            events += 1
        if S.meta[EXTRA] + 64 > S.extra.shape[0]:
            return False, 0.0, 0.0
    if count + inserted + 8 > S.pos.shape[0] or events + 2 > S.events.shape[0]:
        return False, 0.0, 0.0
    for a in range(S.meta[AFFECTED]):
        v = S.val[a].affected
        if S.val[v].size > 0 or S.val[v].is_tangent:
            copies(S, v, -1, False)
            copies(S, v, 1, True)
    low, high = S.meta[LOW], S.meta[HIGH]
    for d in range(S.meta[DELETED]):
        p = S.extra[d].deleted
        S.pos[p].own -= GONE
        low = min(low, p)
        high = max(high, p)
    high = min(high, count - 1)
    for i in range(S.meta[TOUCHED]):
        S.pos[S.touch[i].touched].own += S.touch[i].touched_by
    excess = S.pos[count].excess
    if low <= high:
        excess -= S.pos[high + 1].excess - S.pos[low].excess
        run = -budget
        for p in range(low, high + 1):
            run += S.pos[p].diff
            S.pos[p].diff = 0
            over = S.pos[p].held + S.pos[p].own + run
            if over > 0:
                excess += over
        S.pos[high + 1].diff = 0
    S.pos[count].diff = 0
    S.pos[count + 1].diff = 0
    for i in range(inserted):
        over = S.extra[i].in_held + S.extra[i].in_own - budget
        if over > 0:
            excess += over
    for d in range(S.meta[DELETED]):
        S.pos[S.extra[d].deleted].own += GONE
    for i in range(S.meta[TOUCHED]):
        S.pos[S.touch[i].touched].own -= S.touch[i].touched_by
    S.meta[TOUCHED] = 0
    return S.meta[BAD] == 0, seconds, max(excess, 0.0)


@inner
def apply(S, budget):  # type: ignore[no-untyped-def]
    """Carry the change out; returns (seconds, excess)."""
    count = S.meta[COUNT]
    stamp = S.meta[STAMP]
    i, to = 0, 0
    for p in range(count + 1):
        while i < S.meta[INSERTED] and S.extra[i].in_gap == p:
            S.pos[to].spare = S.extra[i].in_op
            to += 1
            i += 1
        if p < count and S.pos[p].deleted_stamp != stamp:
            S.pos[to].spare = S.pos[p].order
            to += 1
    for p in range(to):
        S.pos[p].order = S.pos[p].spare
    S.meta[COUNT] = to
    return rebuild(S, budget)


@inner
def next_event(S, v, p):  # type: ignore[no-untyped-def]
    """Index into `S.events` of the value's first event at or after position `p`; the row's end if none."""
    low, high = S.val[v].ev_ptr, S.val[v + 1].ev_ptr
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
    e = next_event(S, v, gap)
    if S.val[v].pinned:
        return e > S.val[v].ev_ptr
    if e >= S.val[v + 1].ev_ptr or S.events[e] & 1:
        return False
    return e > S.val[v].ev_ptr or (S.val[v].is_tangent == 1 and gap >= S.meta[BOUNDARY])


@inner
def xorshift(S):  # type: ignore[no-untyped-def]
    """The next 64 random bits."""
    x = S.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    S.random[0] = x
    return x * np.uint64(2685821657736338717)


@inner
def uniform(S):  # type: ignore[no-untyped-def]
    """A random float in [0, 1)."""
    return np.float64(xorshift(S) >> np.uint64(11)) / 9007199254740992.0


@inner
def below(S, bound):  # type: ignore[no-untyped-def]
    """A random int in [0, bound)."""
    return min(np.int64(uniform(S) * bound), bound - 1)
