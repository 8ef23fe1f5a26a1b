"""Compiled recomputation of a value: after its dead inputs, in the order that needs the least memory.

A part of the change that a move describes.
"""

from remat_solvers.kernels.incremental import insert, spans, uniform
from remat_solvers.kernels.jit import njit_inner as inner

NO_SAVING = -(1 << 60)  # below every saving of bytes


@inner
def close_over(S, value, gap, hold, most):  # type: ignore[no-untyped-def]
    """Insert the producer of `value` before `gap`, after the producers of its inputs that are dead there.

    Values whose `value_stamp` is current count as dead. With chance `hold` a dead input is kept from its last
    use instead. False if that needs over `most` runs, takes over `meta.left_s` seconds or is impossible.
    """
    count = list_dead(S, value, gap, hold, most)
    if count <= 2:  # one input at most: there is only one order
        good = count >= 0
        for n in range(count):
            good = good and insert(S, gap, S.extra[n].listed)
        return good
    for n in range(count):
        set_need(S, S.extra[n].listed)
    return insert_listed(S, gap, S.val[value].producer)


@inner
def list_dead(S, value, gap, hold, most):  # type: ignore[no-untyped-def]
    """List the producer of `value` and before it those of its inputs that are dead at `gap`: how many.

    That is 0 if the change has it already, and -1 where `close_over` is to be False.
    """
    stamp = S.meta.stamp
    S.meta.listings += 1
    i = S.val[value].producer
    if i < 0 or not S.val[value].recomputable or S.ops[i].first >= gap:
        return -1
    if S.ops[i].op_stamp == stamp:
        return 0
    S.ops[i].op_stamp = stamp
    top = S.extra[0]
    top.stack = i
    top.stack_at = S.var[S.ops[i].now + 1].in_ptr
    depth, count = 1, 0
    while depth > 0:
        top = S.extra[depth - 1]
        run = S.var[S.ops[top.stack].now + 1]
        if top.stack_at == run.in_end:
            depth -= 1
            S.meta.left_s -= run.time
            if S.meta.left_s < 0.0 or S.meta.inserted + count >= most:
                return -1
            S.extra[count].listed = top.stack
            count += 1
            continue
        v = S.idx[top.stack_at]
        top.stack_at += 1
        source = S.val[v]
        if source.pinned:
            continue
        given_up = source.value_stamp == stamp
        if not given_up and spans(S, v, gap):
            continue
        i = source.producer
        if i < 0 or not source.recomputable or S.ops[i].op_stamp == stamp:
            continue
        if not given_up and uniform(S) < hold:
            continue
        if depth >= most or depth >= 255:
            return -1
        S.ops[i].op_stamp = stamp
        top = S.extra[depth]
        top.stack = i
        top.stack_at = S.var[S.ops[i].now + 1].in_ptr
        depth += 1
    return count


@inner
def next_input(S, run, saving, at):  # type: ignore[no-untyped-def]
    """The place of the input to compute after the one at `at`, and its saving; -1 if none is left.

    The saving of an input is how many bytes less are held once it is there than while it is computed. Inputs
    with a large one come first, which needs the least where they share nothing (R. Sethi and J. D. Ullman,
    1970; for values of different sizes J. W. H. Liu, 1986).
    """
    most, place = NO_SAVING, -1
    for k in range(run.in_ptr, run.in_end):
        i = S.val[S.idx[k]].producer
        if i < 0 or S.ops[i].listing != S.meta.listings:
            continue
        saved = S.ops[i].need - S.val[S.idx[k]].size
        if saved > most and (saved < saving or (saved == saving and k > at)):
            most, place = saved, k
    return most, place


@inner
def set_need(S, i):  # type: ignore[no-untyped-def]
    """Note that a listed op waits, and the bytes that computing it takes, its listed inputs first."""
    op = S.ops[i]
    run = S.var[op.now + 1]
    need, held = 0, 0
    saving, at = next_input(S, run, -NO_SAVING, -1)
    while at >= 0:
        size = S.val[S.idx[at]].size
        need = max(need, held + saving + size)
        held += size
        saving, at = next_input(S, run, saving, at)
    op.need = max(need, held + run.out_total + run.workspace)
    op.listing = S.meta.listings


@inner
def insert_listed(S, gap, root):  # type: ignore[no-untyped-def]
    """Insert the waiting ops before `gap`, `root` last; False if there is no space."""
    S.extra[0].stack = root
    depth = 1
    while depth > 0:
        i = S.extra[depth - 1].stack
        _, at = next_input(S, S.var[S.ops[i].now + 1], -NO_SAVING, -1)
        if at >= 0:
            S.extra[depth].stack = S.val[S.idx[at]].producer
            depth += 1
            continue
        depth -= 1
        S.ops[i].listing = 0
        if not insert(S, gap, i):
            return False
    return True
