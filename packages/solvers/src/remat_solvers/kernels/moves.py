"""Compiled moves of the sequence search; each describes a change, which `evaluate_change` then evaluates.

Single deletions and insertions have no gradient where recomputed values accumulate, so a move includes its
consequences: an evicted value comes back together with the producers of its dead inputs, in the order that
needs the least memory, and the run that made it goes if nobody else reads it; a dropped repeat removes the
repeats that only it needed, and whole sequences of neighbouring ops are evicted or kept at once.
"""

from remat_solvers.kernels.incremental import below, delete, insert, next_event, spans, uniform
from remat_solvers.kernels.jit import njit_inner as inner
from remat_solvers.kernels.recompute import close_over

EVICT, DROP, SHIFT, EXCHANGE, EVICT_RUN, DROP_RUN, SHIFT_FIRST = range(7)  # kinds of moves
FEW, MANY = 40, 58  # runs that a move may insert
EVEN = 1e-9  # share of a step by which sums of times in different orders may differ


@inner
def want(S, value):  # type: ignore[no-untyped-def]
    """Evict a value, for `recompute_wanted` to recompute it, unless the list is full."""
    if S.meta.wanted < S.extra.shape[0]:
        S.val[value].value_stamp = S.meta.stamp
        S.extra[S.meta.wanted].wanted = value
        S.meta.wanted += 1


@inner
def recompute_wanted(S, gap, hold, most):  # type: ignore[no-untyped-def]
    """Insert before `gap` what computes the wanted values again; False as for `close_over`."""
    for d in range(S.meta.deleted):
        S.meta.left_s += S.var[S.pos[S.extra[d].deleted].variant].time
    i, good = 0, True
    while good and i < S.meta.wanted:
        good = close_over(S, S.extra[i].wanted, gap, hold, most)
        i += 1
    return good


@inner
def useless(S, p):  # type: ignore[no-untyped-def]
    """Whether no op reads the outputs of the repeat at `p`, after the deletions."""
    run = S.var[S.pos[p].variant]
    for k in range(run.out_ptr, run.out_end):
        v = S.idx[k]
        value = S.val[v]
        if value.pinned:
            continue
        e = next_event(S, v, p + 1)
        while e < value.ev_end and S.pos[S.events[e] >> 1].deleted_stamp == S.meta.stamp:
            e += 1
        if e < value.ev_end and S.events[e] & 1 == 0:
            return False
    return True


@inner
def made_before(S, v, p):  # type: ignore[no-untyped-def]
    """Position of the last run before `p` that computes a value; -1 if none."""
    start = S.val[v].ev_ptr
    e = next_event(S, v, p) - 1
    while e >= start and S.events[e] & 1 == 0:
        e -= 1
    return S.events[e] >> 1 if e >= start else -1


@inner
def read_after(S, run, p):  # type: ignore[no-untyped-def]
    """Position of the first event after `p` of a run's outputs; the sequence's length if none."""
    first = S.meta.count
    for k in range(run.out_ptr, run.out_end):
        e = next_event(S, S.idx[k], p + 1)
        if e < S.val[S.idx[k]].ev_end:
            first = min(first, S.events[e] >> 1)
    return first


@inner
def drop(S, p, cascade):  # type: ignore[no-untyped-def]
    """Delete the repeat at `p` and, if `cascade`, the repeats that become useless."""
    done = S.meta.deleted
    delete(S, p)
    while cascade and done < S.meta.deleted:
        q = S.extra[done].deleted
        run = S.var[S.pos[q].variant]
        done += 1
        for k in range(run.in_ptr, run.in_end):
            maker = made_before(S, S.idx[k], q)
            if maker < 0:
                continue
            at = S.pos[maker]
            if at.variant & 1 and at.deleted_stamp != S.meta.stamp and useless(S, maker):
                delete(S, maker)


@inner
def pick_gap(S):  # type: ignore[no-untyped-def]
    """A random (value, gap, last event before it): the value is next read at the gap, not directly after."""
    count = S.meta.count
    for _ in range(20):
        q = below(S, count)
        at = S.pos[q]
        run = S.var[at.variant]
        width = run.in_end - run.in_ptr
        if width == 0:
            continue
        v = S.idx[run.in_ptr + below(S, width)]
        value = S.val[v]
        if value.pinned or value.size == 0 or not value.recomputable:
            continue
        e = next_event(S, v, q)
        if e == value.ev_ptr:
            continue
        before = S.events[e - 1] >> 1
        if q - before < 2:
            continue
        # Where the sequence exceeds the budget, choose only among values held there.
        if S.pos[count].excess > 0 and uniform(S) < 0.8 and at.excess <= S.pos[before + 1].excess:
            continue
        return v, q, before
    return -1, 0, 0


@inner
def give_way(S, value, p, gap):  # type: ignore[no-untyped-def]
    """Delete the run at `p` if it makes the value, which comes back at `gap`, and nobody reads it before."""
    at = S.pos[p]
    run = S.var[at.variant]
    if at.order != S.val[value].producer or read_after(S, run, p) < gap:
        return
    for k in range(run.out_ptr, run.out_end):
        if S.val[S.idx[k]].pinned:
            return
    if at.variant & 1:
        drop(S, p, True)
    elif S.ops[at.order].backward and not run.bound_to_place:
        delete(S, p)


@inner
def evict(S):  # type: ignore[no-untyped-def]
    """Evict a value between two uses, to recompute it for the second; returns the gap, or -1."""
    v, q, before = pick_gap(S)
    if v < 0:
        return -1
    gap = q
    if uniform(S) < 0.15:
        gap = before + 1 + below(S, q - before)
    if gap - before < 2:
        return -1
    if gap == q:
        give_way(S, v, before, q)
    want(S, v)
    return gap


@inner
def evict_run(S):  # type: ignore[no-untyped-def]
    """Evict the outputs of several consecutive ops, to recompute them together; returns the gap, or -1."""
    v, q, _ = pick_gap(S)
    if v < 0:
        return -1
    middle = S.val[v].producer
    span = 1 + below(S, 12)
    low = max(0, middle - below(S, span + 1))
    high = min(S.ops.shape[0], low + span + 1)
    for op in range(low, high):
        run = S.var[S.ops[op].now]
        for k in range(run.out_ptr, run.out_end):
            w = S.idx[k]
            value = S.val[w]
            if value.pinned or not value.recomputable or not spans(S, w, q):
                continue
            e = next_event(S, w, q)
            if e > value.ev_ptr and q - (S.events[e - 1] >> 1) > 1:
                want(S, w)
    return q if S.meta.wanted else -1


@inner
def drop_repeats(S, several):  # type: ignore[no-untyped-def]
    """Delete a random repeat, or several consecutive ones; returns the position of the first, or -1.

    What only they needed goes too; with one repeat it stays now and then.
    """
    repeats = S.meta.repeats
    if repeats == 0:
        return -1
    first = below(S, repeats)
    last, cascade = first + 1, True
    if several:
        last = min(repeats, first + 2 + below(S, 8))
    else:
        cascade = uniform(S) < 0.8
    for k in range(first, last):
        drop(S, S.pos[k].repeats, cascade)
    return S.pos[first].repeats


@inner
def move(S, p, gap):  # type: ignore[no-untyped-def]
    """Run the op at `p` before position `gap` instead; False if it is there already."""
    if gap == p or gap == p + 1:
        return False
    delete(S, p)
    return insert(S, gap, S.pos[p].order)


@inner
def shift(S):  # type: ignore[no-untyped-def]
    """Move a repeat elsewhere between the last event of its inputs and the first reader of its outputs."""
    repeats = S.meta.repeats
    if repeats == 0:
        return False
    p = S.pos[below(S, repeats)].repeats
    at = S.pos[p]
    run = S.var[at.variant]
    earliest = S.ops[at.order].first + 1
    low, high = earliest, read_after(S, run, p)
    for k in range(run.in_ptr, run.in_end):
        v = S.idx[k]
        e = next_event(S, v, p) - 1
        if e >= S.val[v].ev_ptr:
            low = max(low, (S.events[e] >> 1) + 1)
    if uniform(S) < 0.3:
        low = max(earliest, low - below(S, 40))
    if high <= low:
        return False
    gap = high if uniform(S) < 0.4 else low + below(S, high - low + 1)
    return move(S, p, gap)


@inner
def shift_first(S):  # type: ignore[no-untyped-def]
    """Move the first run of a backward op within what its inputs and readers allow."""
    count, boundary = S.meta.count, S.meta.boundary
    if count <= boundary:
        return False
    p = boundary + below(S, count - boundary)
    at = S.pos[p]
    run = S.var[at.variant]
    if at.variant & 1 or not S.ops[at.order].backward or run.bound_to_place:
        return False
    low, high = boundary, read_after(S, run, p)
    for k in range(run.in_ptr, run.in_end):
        low = max(low, made_before(S, S.idx[k], p) + 1)
    low, high = max(low, p - 60), min(high, p + 60)
    if high <= low:
        return False
    return move(S, p, low + below(S, high - low + 1))


@inner
def evict_near(S, p):  # type: ignore[no-untyped-def]
    """Evict a value computed near the op of a dropped repeat, which could be the checkpoint instead.

    Returns the gap, or -1 if there is none.
    """
    op = S.pos[p].order
    for _ in range(8):
        other = op + below(S, 17) - 8
        if other < 0 or other >= S.ops.shape[0] or other == op:
            continue
        run = S.var[S.ops[other].now]
        width = run.out_end - run.out_ptr
        if width == 0:
            continue
        v = S.idx[run.out_ptr + below(S, width)]
        value = S.val[v]
        if value.pinned or not value.recomputable or not spans(S, v, p):
            continue
        want(S, v)
        return S.events[next_event(S, v, p)] >> 1
    return -1


@inner
def describe_random(S, weights, most_s):  # type: ignore[no-untyped-def]
    """Describe a random change, of a kind by its cumulated weight.

    False if none was found, or one that `evaluate_change` would refuse with `most_s`.

    Each part is called once: where it is inlined it takes long to compile.
    """
    u = uniform(S)
    hold = 0.3 * uniform(S)
    kind = EVICT
    while kind < weights.shape[0] - 1 and u >= weights[kind]:
        kind += 1
    if kind == SHIFT:
        return shift(S)
    if kind == SHIFT_FIRST:
        return shift_first(S)
    gap, most = -1, FEW
    S.meta.left_s = most_s + S.meta.price * S.meta.excess + EVEN * S.meta.seconds
    if kind in (DROP, DROP_RUN, EXCHANGE):
        p = drop_repeats(S, kind == DROP_RUN)
        if p < 0 or kind != EXCHANGE:
            return p >= 0
        if uniform(S) < 0.5:
            kind = EVICT
        else:
            gap = evict_near(S, p)
    if kind == EVICT_RUN:
        gap = evict_run(S)
        most = MANY
    elif kind == EVICT:
        gap = evict(S)
    return gap >= 0 and recompute_wanted(S, gap, hold, most)
