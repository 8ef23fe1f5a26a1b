"""Compiled evaluation of an op sequence; `evaluation.arrays` explains it."""

from remat_solvers.kernels.jit import njit_in_place as njit

VALID, DEAD_INPUT, RUNS_AGAIN, OVERWRITTEN, MISSING = 0, 1, 2, 3, 4


@njit
def evaluate(A, order, profile, work):  # type: ignore[no-untyped-def]
    """Whether a sequence is valid, the position at fault, its peak in bytes and its seconds.

    `profile` is filled with the bytes held while each position runs; `work` has nine rows of zeros, as long
    as there are ops, values, positions, inputs and outputs run.
    """
    count = order.shape[0]
    ops = A.time.shape[0] // 2
    seen, variant = work[0], work[1]
    slots_in, slots_out, boundary = 0, 0, 0
    for p in range(count):
        op = order[p]
        if seen[op] and not A.can_rerun[op]:
            return RUNS_AGAIN, p, 0, 0.0
        if not seen[op] and not A.backward[op]:
            boundary = p + 1
        variant[p] = 2 * op + seen[op]
        seen[op] = 1
        slots_in += A.in_ptr[variant[p] + 1] - A.in_ptr[variant[p]]
        slots_out += A.out_ptr[variant[p] + 1] - A.out_ptr[variant[p]]
    for op in range(ops):
        if not seen[op]:
            return MISSING, op, 0, 0.0

    # Backward over the sequence: which inputs and outputs are dead after each position.
    dies_in, dies_out, needed = work[2], work[3], work[4]
    i, o = slots_in, slots_out
    for p in range(count - 1, -1, -1):
        v = variant[p]
        for k in range(A.out_ptr[v + 1] - 1, A.out_ptr[v] - 1, -1):
            value = A.out_idx[k]
            o -= 1
            dies_out[o] = not needed[value] and not A.pinned[value]
            needed[value] = 0
        for k in range(A.in_ptr[v + 1] - 1, A.in_ptr[v] - 1, -1):
            value = A.in_idx[k]
            i -= 1
            dies_in[i] = not needed[value] and not A.pinned[value]
            needed[value] = 1

    live, gone = work[5], work[6]
    taken = work[7]  # position + 1 at which an output took over the storage
    dying = work[8]  # position + 1 at which the value dies as an input
    held = A.base_nbytes
    peak = held
    seconds = 0.0
    i, o = 0, 0
    for p in range(count):
        v = variant[p]
        if p == boundary:
            for value in A.tangents:
                live[value] = 1
                held += A.size[value]
            peak = max(peak, held)
        for k in range(A.guard_ptr[v], A.guard_ptr[v + 1]):
            if gone[A.guard_idx[k]]:
                return OVERWRITTEN, p, 0, 0.0
        for k in range(A.in_ptr[v], A.in_ptr[v + 1]):
            value = A.in_idx[k]
            if not live[value]:
                return DEAD_INPUT, p, 0, 0.0
            if dies_in[i + k - A.in_ptr[v]]:
                dying[value] = p + 1
        for k in range(A.over_ptr[v], A.over_ptr[v + 1]):
            gone[A.over_idx[k]] = 1
        spike, stays = 0, 0
        for k in range(A.out_ptr[v], A.out_ptr[v + 1]):
            value = A.out_idx[k]
            reused = False
            if not live[value]:
                for r in range(A.reuse_ptr[v], A.reuse_ptr[v + 1]):
                    source = A.reuse_src[r]
                    if A.reuse_out[r] == value and dying[source] == p + 1 and taken[source] != p + 1:
                        taken[source] = p + 1
                        reused = True
                        break
            if reused:
                live[value] = 1
                continue
            spike += A.size[value]
            if not live[value]:
                live[value] = 1
                stays += A.size[value]
        profile[p] = held + spike + A.workspace[v]
        peak = max(peak, profile[p])
        held += stays
        for k in range(A.out_ptr[v], A.out_ptr[v + 1]):
            if dies_out[o]:
                live[A.out_idx[k]] = 0
                held -= A.size[A.out_idx[k]]
            o += 1
        for k in range(A.in_ptr[v], A.in_ptr[v + 1]):
            if dies_in[i]:
                value = A.in_idx[k]
                live[value] = 0
                if taken[value] != p + 1:
                    held -= A.size[value]
            i += 1
        seconds += A.time[v]
    if boundary == count:
        for value in A.tangents:
            held += A.size[value]
        peak = max(peak, held)
    return VALID, 0, peak, seconds
