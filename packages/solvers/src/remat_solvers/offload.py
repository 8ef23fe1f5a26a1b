"""Recompute and move: who is at home on the host, in which order to compute, and when to copy.

A plan has three choices. Which parameters, with their gradients and optimizer states, are at home on the
host: the more of them, the more room for activations, the more to copy and to update on the CPU. In which
order to compute, with which repeats: what the portfolio finds for the room left. And which activations
go to the host and back instead of being made again: `transfers.place` moves what an order does not have the
room to keep. Each combination is timed by the referee over several steps after each other, and the fastest
that keeps both budgets is taken.

Parameters move from the end of the model on: the next forward needs those last, so that an update on the CPU
has the most time, and the backward needs them soon after the forward, so that they are fetched once.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, ClassVar

import attrs

from remat_graph import Graph, Home, Links, Role, Schedule, Timeline, simulate
from remat_graph.simulate import Grads
from remat_graph.training import accumulating, at_home
from remat_solvers.gaps import gaps
from remat_solvers.handover import hand_over, without_leaving
from remat_solvers.portfolio import Auto
from remat_solvers.protocol import Deadline, Problem, Solution, Status
from remat_solvers.questions import min_budget
from remat_solvers.transfers import place

PERIODS = 3
_LEAST_S, _ORDER_S = 2.0, 3.0  # for the order that needs least, and for each other


@attrs.frozen(kw_only=True)
class Offload:
    """Plans of a training step that recompute and move.

    Attributes:
        in_backward: whether the optimizer steps during the backward.
        shares: into how many shares the parameters that could move are divided.
        orders: budgets for which an order of ops is looked for.
        homes: values at home on the host, if that is settled already.
    """

    name: ClassVar[str] = "offload"

    in_backward: bool = False
    shares: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    orders: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    homes: frozenset[int] | None = None

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """Find the fastest plan of a training graph (`remat_graph.training`) that keeps both budgets."""
        return _Search(self, problem, deadline or Deadline()).run()


@attrs.frozen(kw_only=True, eq=False)
class _Found:
    graph: Graph
    schedule: Schedule
    timeline: Timeline


class _Search:
    def __init__(self, solver: Offload, problem: Problem, deadline: Deadline) -> None:
        self.solver, self.problem, self.deadline = solver, problem, deadline
        self.links = problem.links or Links()
        self.ladder: list[tuple[int, ...]] = []
        self.tried = 0
        self.least: tuple[int, int] | None = None  # device bytes, and host bytes with them

    def run(self) -> Solution:
        best: _Found | None = None
        for on_host in self.homes():
            graph = at_home(self.problem.graph, on_host)
            for order in self.orders_for(graph):
                base_s = sum(graph.ops[op].first.time_s for op in order)
                if best is not None and base_s >= best.timeline.time_s:
                    continue
                found = self.attempt(graph, order)
                if found is not None and (best is None or found.timeline.time_s < best.timeline.time_s):
                    best = found
                    self.deadline.report("offload", found.timeline.time_s, graph.time_s)
            if best is not None and self.deadline.reached():
                break
        return self.solution(best)

    # -- who is at home where

    def homes(self) -> Iterator[frozenset[int]]:
        """Sets of values at home on the host, from none to all that can be."""
        if self.solver.homes is not None:
            yield self.solver.homes
            return
        graph = self.problem.graph
        params = self.movable()
        sizes = list(accumulate(self.charge(p) for p in params))
        yield frozenset()
        if not params or self.problem.links is None:
            return
        shares = self.solver.shares
        counts = {sum(size <= sizes[-1] * share / shares for size in sizes) for share in range(1, shares + 1)}
        for count in sorted(counts - {0}):
            chosen = set(params[:count])
            yield frozenset(chosen | {i for i, v in enumerate(graph.values) if self.is_state_of(i, chosen)})

    def movable(self) -> list[int]:
        """Parameters that can be at home on the host, those that the forward reads last first."""
        graph = self.problem.graph
        first: dict[int, int] = {}
        for position, op in enumerate(graph.ops):
            for value in op.first.inputs:
                first.setdefault(value, position)
        params = [
            i for i, v in enumerate(graph.values) if v.role is Role.PARAM and v.home is not None and v.nbytes
        ]
        return sorted(params, key=lambda p: -first.get(p, len(graph.ops)))

    def charge(self, param: int) -> int:
        graph = self.problem.graph
        return graph.values[param].nbytes + sum(
            v.nbytes for i, v in enumerate(graph.values) if self.is_state_of(i, {param})
        )

    def is_state_of(self, index: int, params: set[int]) -> bool:
        value = self.problem.graph.values[index]
        return value.role is Role.OPTIMIZER_STATE and value.of in params

    # -- orders

    def orders_for(self, graph: Graph) -> Iterator[tuple[int, ...]]:
        """Orders of ops, those that repeat least first, down to one that needs as little as any."""
        count = len(graph.ops)
        yield tuple(range(count))
        if not self.ladder:
            lent = _lent(self.problem.graph)
            smallest = min_budget(lent, self.deadline.within(_LEAST_S))
            peak = simulate(lent, Schedule.from_order(lent, range(count))).peak_nbytes
            budgets = (
                smallest.nbytes + (peak - smallest.nbytes) * part // (self.solver.orders + 1)
                for part in range(self.solver.orders, 0, -1)
            )
            found = (Auto().solve(Problem(lent, b), self.deadline.within(_ORDER_S)).order for b in budgets)
            self.ladder = [*(order for order in found if order is not None), smallest.schedule.order]
        yield from self.ladder

    # -- schedules

    def attempt(self, graph: Graph, order: tuple[int, ...]) -> _Found | None:
        """The schedule of one choice, if it keeps the budgets."""
        self.tried += 1
        problem = self.problem
        bare = without_leaving(graph)
        away = gaps(bare, order) if problem.links is not None else []
        placed = place(bare, order, away, problem.budget_nbytes, self.links)
        schedule = hand_over(
            graph, placed, problem.budget_nbytes, self.links, in_backward=self.solver.in_backward
        )
        timeline = simulate(graph, schedule, links=self.links, periods=PERIODS)
        readings = [timeline]
        if not self.solver.in_backward:
            readings.append(simulate(accumulating(graph), schedule, grads=Grads.ACCUMULATE, links=self.links))
        nbytes = max(reading.peak_nbytes for reading in readings)
        host_nbytes = max(reading.host_peak_nbytes for reading in readings)
        self.least = min(self.least or (nbytes, host_nbytes), (nbytes, host_nbytes))
        limit = problem.host_budget_nbytes
        if nbytes > problem.budget_nbytes or (limit is not None and host_nbytes > limit):
            return None
        return _Found(graph=graph, schedule=schedule, timeline=timeline)

    def solution(self, found: _Found | None) -> Solution:
        base_s = self.problem.graph.time_s
        stats: dict[str, Any] = {"tried": self.tried}
        if self.least is not None:
            stats |= dict(zip(("least_nbytes", "least_host_nbytes"), self.least, strict=True))
        if found is None:
            return Solution(
                status=Status.NOT_FOUND, schedule=None, lower_bound_s=base_s, base_s=base_s, stats=stats
            )
        return Solution(
            status=Status.FEASIBLE,
            schedule=found.schedule,
            lower_bound_s=base_s,
            base_s=base_s,
            time_s=found.timeline.time_s,
            peak_nbytes=found.timeline.peak_nbytes,
            stats=stats,
            on_host=frozenset(i for i, v in enumerate(found.graph.values) if v.home is Home.HOST),
        )


def _lent(graph: Graph) -> Graph:
    """The same step with parameters and states lent by the caller, as solvers know it that move nothing."""
    values = [v if v.home is None else attrs.evolve(v, home=None, external=True) for v in graph.values]
    return attrs.evolve(graph, values=tuple(values), updates=())
