"""Carry a plan over to a graph of the same structure: another batch, length or resolution of a model.

Ops and values correspond by index, only bytes and times differ, so the sequence of the plan is a valid one.
Where it exceeds the budget, more values are evicted; where it does not, `polish` drops repeats that are no
longer needed. Short annealing of that sequence and of a greedy one follows, and with switches flips of single
ones. Some tenths of a second at 600 ops, where a search takes seconds. Deterministic unless the deadline cuts
in.

Imperfect: what is kept follows the plan's sizes; the caller decides by the bound whether that is good enough.
"""

from typing import ClassVar

import attrs

from remat_graph import Schedule
from remat_solvers.bounds.decisions import NEAR, bounding_graphs, decided_bound_s, time_bound_s
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.local_search.anneal import AnnealingWalk, fewer_moves
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.joint import FIRST_PRICE, JointSearch
from remat_solvers.protocol import Deadline, Problem, Solution, Status, judge_schedule

MOVES = 20_000  # of each annealing
ANNEALING = ((0.1, 0.3), (0.3, 0.3), (0.1, 0.3))  # start temperature, price of memory


@attrs.frozen(kw_only=True, eq=False)
class Carried:
    """A solver that repairs a plan of another graph with the same `structure`.

    Attributes:
        schedule: of that graph, without transfers.
        gap: a distance to the lower bound, as a ratio of base time, that is near enough: no better bound is
            looked for.
    """

    name: ClassVar[str] = "carried"
    plans_switches: ClassVar[bool] = True
    schedule: Schedule
    gap: float = NEAR

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring; nothing is found where the repair does not reach the budget."""
        return _carry_over(problem, self.schedule, self.gap, deadline)


def _carry_over(problem: Problem, schedule: Schedule, gap: float, deadline: Deadline | None) -> Solution:
    deadline = deadline or Deadline()
    graph, budget_nbytes = problem.graph, problem.budget_nbytes
    lower_s = min(time_bound_s(each, budget_nbytes, deadline) for each in bounding_graphs(graph))
    if lower_s == float("inf"):
        nothing = judge_schedule(problem, None)
        return attrs.evolve(nothing, status=Status.INFEASIBLE, lower_bound_s=lower_s)
    search = JointSearch(graph, budget_nbytes)
    search.take(schedule, deadline)
    moves = fewer_moves(MOVES, len(graph.ops))
    for one in list(search.found.values()):
        if one.peak_nbytes > budget_nbytes:
            arrays = flatten(one.made.graph)
            order = evict(arrays, budget_nbytes, deadline, one.order)
            if evaluate(arrays, order).peak_nbytes > budget_nbytes:
                repair = AnnealingWalk(arrays, order, budget_nbytes, 0, FIRST_PRICE)
                reached = repair.reach(2 * moves, 1.0, 0.1, deadline)
                order = order if reached is None else reached
            search.add(one.made, arrays, order, deadline)
        search.quick(one.made.on, deadline)
    for hot, price in ANNEALING:
        fitting = search.fitting
        if not fitting or deadline.reached():
            break
        search.anneal_sequence(fitting[0], moves, hot, price, deadline)
    if graph.switches and search.fitting:
        search.flip_greedily(search.fitting[0], deadline)
    best = search.fitting[0].schedule if search.fitting else None
    found = judge_schedule(problem, best, stats={"method": "carried", "moves": search.tried})
    if found.time_s is not None:
        enough_s = found.time_s - gap * graph.time_s
        if graph.switches and lower_s < enough_s:
            known = {"relaxed_s": lower_s, "enough_s": enough_s}
            lower_s = decided_bound_s(graph, budget_nbytes, deadline, **known)
        lower_s = min(lower_s, found.time_s)
    proven = found.time_s is not None and found.time_s <= lower_s * (1 + 1e-12)
    status = Status.OPTIMAL if proven else found.status if best is None else Status.FEASIBLE
    return attrs.evolve(found, lower_bound_s=lower_s, status=status)
