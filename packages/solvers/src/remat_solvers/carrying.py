"""Carry a plan over to a graph of the same structure: another batch, length or resolution of a model.

Ops and values correspond by index, only bytes and times differ, so the sequence of the plan is a valid one.
Where it exceeds the budget, more values are evicted; where it does not, `polish` drops repeats that are no
longer needed. Unless that is near enough to the bound, short annealing of that sequence and, if values were
evicted, of a greedy one follows, and with switches flips of single ones. Some tenths of a second at 600 ops,
where a search takes many seconds. Deterministic unless the deadline cuts in.

Imperfect: what is kept follows the plan's sizes; the caller decides whether that is good enough.
"""

from typing import ClassVar

import attrs

from remat_graph import Schedule
from remat_solvers.bounds.decisions import MOST_COMBINED, NEAR, bounding_graphs, decided_bound_s, time_bound_s
from remat_solvers.evaluation.arrays import evaluate
from remat_solvers.local_search.anneal import AnnealingWalk, fewer_moves
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.joint import FIRST_PRICE, JointSearch, Walk
from remat_solvers.protocol import Deadline, Problem, Solution, Status, judge_schedule

MOVES = 20_000  # of each annealing
ANNEALING = ((0.3, 0.3), (0.1, 0.3))  # start temperature, price of memory
STALLED = 0.0005  # a ratio of base time: annealing that gains less is the last


@attrs.frozen(kw_only=True, eq=False)
class Carried:
    """A solver that repairs a plan of another graph with the same `structure`.

    Attributes:
        schedule: of that graph, without transfers.
        gap: a distance to the lower bound, as a ratio of base time, that is near enough: the repair ends.
        far: a distance from which on a better bound is looked for, which takes as long as the repair.
    """

    name: ClassVar[str] = "carried"
    plans_switches: ClassVar[bool] = True
    schedule: Schedule
    gap: float = NEAR
    far: float = NEAR

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring; nothing is found where the repair does not reach the budget."""
        deadline = deadline or Deadline()
        graph, budget_nbytes = problem.graph, problem.budget_nbytes
        lower_s = min(time_bound_s(each, budget_nbytes, deadline) for each in bounding_graphs(graph))
        if lower_s == float("inf"):
            nothing = judge_schedule(problem, None)
            return attrs.evolve(nothing, status=Status.INFEASIBLE, lower_bound_s=lower_s)
        search = JointSearch(graph, budget_nbytes)
        _repair(search, self.schedule, deadline)
        _improve(search, lower_s + self.gap * graph.time_s, deadline)
        best = search.fitting[0].schedule if search.fitting else None
        found = judge_schedule(problem, best, stats={"method": self.name, "moves": search.tried})
        if found.time_s is not None:
            enough_s = found.time_s - self.far * graph.time_s
            if len(graph.switches) > MOST_COMBINED and lower_s < enough_s:
                decided_s = decided_bound_s(graph, budget_nbytes, deadline, enough_s=enough_s)
                lower_s = max(lower_s, decided_s)
            lower_s = min(lower_s, found.time_s)
        proven = found.time_s is not None and found.time_s <= lower_s * (1 + 1e-12)
        status = Status.OPTIMAL if proven else found.status if best is None else Status.FEASIBLE
        return attrs.evolve(found, lower_bound_s=lower_s, status=status)


def _repair(search: JointSearch, schedule: Schedule, deadline: Deadline) -> None:
    """Take a schedule over, and evict what exceeds the budget."""
    budget_nbytes = search.budget_nbytes
    search.take(schedule, deadline)
    for one in [each for each in search.found.values() if each.peak_nbytes > budget_nbytes]:
        arrays = search.arrays(one.made)
        order = evict(arrays, budget_nbytes, deadline, one.order)
        if evaluate(arrays, order).peak_nbytes > budget_nbytes:
            annealing = AnnealingWalk(arrays, order, budget_nbytes, 0, FIRST_PRICE)
            reached = annealing.reach(2 * _moves(search), 1.0, 0.1, deadline)
            order = order if reached is None else reached
        search.add(one.made, order, deadline)
        search.quick(one.made.on, deadline=deadline)


def _improve(search: JointSearch, enough_s: float, deadline: Deadline) -> None:
    """Anneal the best sequence, and flip switches, until it takes no longer than `enough_s`."""

    def near() -> bool:
        return not search.fitting or search.fitting[0].time_s <= enough_s

    if search.graph.switches and not near():
        search.flip_greedily(search.fitting[0], deadline)
    for hot, price in ANNEALING:
        if near() or deadline.reached():
            return
        before_s = search.fitting[0].time_s
        walk = Walk(start=search.fitting[0], moves=_moves(search), hot=hot, price=price)
        search.anneal_sequences([walk], deadline)
        if before_s - search.fitting[0].time_s < STALLED * search.graph.time_s:
            break
    if search.graph.switches and not near():
        search.flip_greedily(search.fitting[0], deadline)


def _moves(search: JointSearch) -> int:
    return fewer_moves(MOVES, len(search.graph.ops))
