"""Polish: drop every recomputation that is not needed, do the others as late as possible, repeat.

Takes any valid sequence that fits and never makes it slower: the repeat whose deletion (with the repeats
that only it needed) saves most goes first; when none can go, repeats move to right before their first
reader, which may make room for the next deletion. O(deletions * repeats) trials of a few microseconds.

Imperfect: a local optimum of single deletions; `search` climbs out of it.
"""

from remat_solvers.evaluate import Arrays, Ints
from remat_solvers.protocol import Deadline

CHUNK = 8  # improvements between two looks at the clock


def polish(arrays: Arrays, order: Ints, budget_nbytes: int, deadline: Deadline) -> Ints:
    """Make a sequence that fits the budget faster, or return it as it is.

    Args:
        arrays: the graph.
        order: a valid sequence within the budget.
        budget_nbytes: the budget.
        deadline: limit by the clock.
    """
    from remat_solvers import kernels_polish
    from remat_solvers.state import get_order, make_state

    state = make_state(arrays, order, seed=0)
    while kernels_polish.polish(state, budget_nbytes, CHUNK):
        if deadline.reached():
            break
    return get_order(state)
