"""Polish: drop every recomputation that is not needed, do the others as late as possible, repeat.

Takes any valid sequence that fits and never makes it slower. Repeats are deleted together with the repeats
that only they needed. A pass deletes those that save at least a threshold of seconds, which is halved from
pass to pass. When none can go, repeats move to right before their first reader, which may allow further
deletions. Some 15 passes of one evaluation per repeat, a few microseconds each.

Imperfect: a local optimum of single deletions; `search` can leave it.
"""

from math import inf

from remat_solvers.evaluation.arrays import Arrays, Ints
from remat_solvers.evaluation.search_state import State
from remat_solvers.protocol import Deadline

LOWEST = 1e-3  # the last threshold above zero, as a share of the first


def polish(arrays: Arrays, order: Ints, budget_nbytes: int, deadline: Deadline) -> Ints:
    """Make a valid sequence that fits the budget faster, or return it unchanged."""
    from remat_solvers.evaluation.search_state import get_order, make_state
    from remat_solvers.kernels import polish

    state = make_state(arrays, order, seed=0)
    _drop(state, budget_nbytes, deadline)
    while not deadline.reached() and polish.polish_pass(state, budget_nbytes, 0.0, True)[0]:
        if not _drop(state, budget_nbytes, deadline):
            break
    return get_order(state)


def _drop(state: State, budget_nbytes: int, deadline: Deadline) -> bool:
    """Delete repeats until none can go; whether any went."""
    from remat_solvers.kernels import polish

    _, first = polish.polish_pass(state, budget_nbytes, inf, False)
    most, threshold, ever = first, first / 2, False
    while most >= 0 and not deadline.reached():
        went, most = polish.polish_pass(state, budget_nbytes, threshold, False)
        ever = ever or went
        if went and threshold == 0:
            most = max(most, 0.0)  # a pass that changed something is followed by another
        threshold = min(threshold, most) / 2 if threshold > LOWEST * first else 0.0
    return ever
