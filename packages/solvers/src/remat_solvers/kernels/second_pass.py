"""Compiled parts of `local_search.second_pass`, which explains them."""

from remat_solvers.kernels.jit import njit_in_place as njit


@njit
def lay_out(order, cut, delayed, again, out):  # type: ignore[no-untyped-def]
    """Enter a sequence without the delayed ops, then its first `cut` runs again; returns its length.

    Of these, ops that are neither delayed nor marked in `again` are left out.
    """
    count = 0
    for p in range(order.shape[0]):
        if not delayed[order[p]]:
            out[count] = order[p]
            count += 1
    for p in range(cut):
        if delayed[order[p]] or again[order[p]]:
            out[count] = order[p]
            count += 1
    return count


@njit
def prune(A, order, kept, work):  # type: ignore[no-untyped-def]
    """Enter at the end of `kept` the runs of a sequence that something needs; returns how many.

    Every op stays once, a forward op where it runs first. `work` has three rows of zeros, as long as there
    are ops and values.
    """
    before, stays, needed = work[0], work[1], work[2]
    for p in range(order.shape[0]):
        before[order[p]] += 1
    at = order.shape[0]
    for p in range(order.shape[0] - 1, -1, -1):
        op = order[p]
        before[op] -= 1
        first = before[op] == 0
        v = 2 * op + (0 if first else 1)
        keep = first and (stays[op] == 0 or not A.backward[op])
        for k in range(A.out_ptr[v], A.out_ptr[v + 1]):
            keep |= needed[A.out_idx[k]] == 1
        if not keep:
            continue
        stays[op] = 1
        for k in range(A.out_ptr[v], A.out_ptr[v + 1]):
            needed[A.out_idx[k]] = 0
        for k in range(A.in_ptr[v], A.in_ptr[v + 1]):
            needed[A.in_idx[k]] = 1
        at -= 1
        kept[at] = op
    return order.shape[0] - at
