"""Leave gradients to a second pass over the step: less is held at the end of the first one.

Gradients stay until the end of the step. Where backward reaches the first layers, whose activations are often
the largest, the gradients of all others are there already. A second pass computes some of them afterwards:
the sequence runs without the ops that only they need, then again up to the moment at which the last of them
was made, and of both passes what nobody reads goes. Of these moments, that with the smallest peak is taken.
It costs up to a step more, and is worth it only where memory is all that counts: in ConvNeXt-T, whose
gradients are made in its small last layers, the smallest peak fell by a fifth.

Imperfect: only gradients that have ops of their own can wait, those of a product of matrices or a sum, not
those that come together with an activation's; and they wait in the order in which they are made.
"""

import numpy as np

from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate
from remat_solvers.protocol import Deadline

MOMENTS = 64  # that are tried; of more, evenly spaced ones


def with_second_pass(arrays: Arrays, order: Ints, deadline: Deadline) -> tuple[Ints, int] | None:
    """The sequence with the smallest peak of those that leave gradients to a second pass, and this peak.

    None if there are no such gradients.
    """
    from remat_solvers.kernels import second_pass

    serves = ops_of_one_gradient(arrays)
    first: dict[int, int] = {}  # op to the position of its first run
    for position, op in enumerate(order.tolist()):
        first.setdefault(op, position)
    made: dict[int, int] = {}  # gradient to the position at which all that it alone needs has run
    for op, gradient in serves.items():
        made[gradient] = max(made.get(gradient, 0), first[op])
    moments = sorted(set(made.values()))
    again = ((arrays.can_rerun == 1) & (np.diff(arrays.guard_ptr)[1::2] == 0)).astype(np.uint8)
    laid, kept = np.zeros((2, 2 * len(order)), np.int64)
    best: tuple[Ints, int] | None = None
    for last in moments[:: 1 + len(moments) // MOMENTS]:
        if deadline.reached():
            break
        delayed = np.zeros(len(arrays.backward), np.uint8)
        delayed[[op for op, gradient in serves.items() if made[gradient] <= last]] = 1
        runs = second_pass.lay_out(order, last + 1, delayed, again, laid)
        work = np.zeros((3, max(len(arrays.backward), len(arrays.size))), np.int64)
        needed = second_pass.prune(arrays, laid[:runs], kept[:runs], work)
        both = kept[runs - needed : runs].copy()
        result = evaluate(arrays, both)
        if result.valid and (best is None or result.peak_nbytes < best[1]):
            best = both, result.peak_nbytes
    return best


def ops_of_one_gradient(arrays: Arrays) -> dict[int, int]:
    """Backward ops whose outputs lead to one gradient of the step only, each with this gradient."""
    several = -1
    wanted: dict[int, int] = {}  # value to the gradient that needs it
    found: dict[int, int] = {}
    for op in range(len(arrays.backward) - 1, -1, -1):
        needs = set()
        for v in arrays.out_idx[arrays.out_ptr[2 * op] : arrays.out_ptr[2 * op + 1]].tolist():
            if arrays.pinned[v] and arrays.size[v] > 0:
                needs |= {v, wanted.get(v, v)}
            elif v in wanted:
                needs.add(wanted[v])
        one = needs.pop() if len(needs) == 1 else several
        if arrays.backward[op] and one != several:
            found[op] = one
        for row in (2 * op, 2 * op + 1):
            for v in arrays.in_idx[arrays.in_ptr[row] : arrays.in_ptr[row + 1]].tolist():
                wanted[v] = one if wanted.get(v, one) == one else several
    return found
