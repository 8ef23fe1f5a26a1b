"""Repair: make the plans of a method that sees a simplified picture fit the budget, then trim them.

A table or a program over whole groups estimates what is held inside a group, so the plans it yields at
falling memory levels lie around the budget on both sides. What is over it evicts, as `greedy` does, until
it fits. Where none comes to fit, the nearest one goes down in steps until it does, see `min_peak`. The
fastest is polished. What is kept and what is dropped remains the method's choice: repair only adds what the
budget asks for and takes away what it does not.

Deterministic; a few milliseconds for each plan, some seconds for a descent.
"""

from collections.abc import Iterable

from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.min_peak import minimize_peak
from remat_solvers.local_search.polish import polish
from remat_solvers.protocol import Deadline

POLISHED = 4  # of the plans that fit, the fastest so many
MOVES = 400_000  # that a descent may try: some seconds at 500 ops


def repair_orders(
    arrays: Arrays, orders: Iterable[Ints], budget_nbytes: int, deadline: Deadline, moves: int = MOVES
) -> Ints | None:
    """The fastest sequence within the budget that the given ones lead to; None if none does.

    Args:
        arrays: the graph.
        orders: valid sequences; others are left out.
        budget_nbytes: the budget.
        deadline: limit by the clock.
        moves: that a descent may try; 0 for none.
    """
    fitting: list[tuple[float, int, Ints]] = []
    over: list[tuple[int, int, Ints]] = []
    for place, order in enumerate(orders):
        if not evaluate(arrays, order).valid:
            continue
        evicted = evict(arrays, budget_nbytes, deadline, order)
        result = evaluate(arrays, evicted)
        if result.peak_nbytes <= budget_nbytes:
            fitting.append((result.time_s, place, evicted))
        else:
            over.append((result.peak_nbytes, place, order))
    if not fitting and over and moves and not deadline.reached():
        order = minimize_peak(arrays, budget_nbytes, budget_nbytes, deadline, moves=moves, start=min(over)[2])
        result = evaluate(arrays, order)
        if result.peak_nbytes <= budget_nbytes:
            fitting.append((result.time_s, 0, order))
    polished: list[tuple[float, int, Ints]] = []
    for _, place, order in sorted(fitting)[:POLISHED]:
        order = polish(arrays, order, budget_nbytes, deadline)
        polished.append((evaluate(arrays, order).time_s, place, order))
    return min(polished)[2] if polished else None
