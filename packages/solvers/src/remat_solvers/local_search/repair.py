"""Repair: make the plans of a method with a simplified model fit the budget, then polish them.

A table or a program over whole groups estimates the memory inside a group, so the peaks of its plans at
falling memory levels lie on both sides of the budget. Plans above it lose values by eviction, as in `greedy`,
until they fit. If none fits, the nearest one is reduced in steps until it does, see `min_peak`. The fastest
are polished. The method's choice of kept and dropped values remains: repair only adds what the budget demands
and removes what it does not.

Deterministic; a few milliseconds for each plan, some seconds for the search for the smallest peak.
"""

from collections.abc import Iterable

from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.min_peak import minimize_peak
from remat_solvers.local_search.polish import polish
from remat_solvers.protocol import Deadline

POLISHED = 4  # number of plans that are polished, the fastest ones that fit
MOVES = 400_000  # of the search for the smallest peak: some seconds at 500 ops


def repair_orders(
    arrays: Arrays, orders: Iterable[Ints], budget_nbytes: int, deadline: Deadline, moves: int = MOVES
) -> Ints | None:
    """The fastest sequence within the budget that the given valid ones lead to; None if none does.

    The search for the smallest peak tries at most `moves` changes.
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
