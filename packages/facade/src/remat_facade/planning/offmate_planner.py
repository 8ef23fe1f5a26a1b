"""Plan a training step together with its optimizer, for a budget on the device and one on the host."""

import time
from typing import Any

import attrs

from remat_facade.errors import NoRoom
from remat_facade.planning.method import Method
from remat_facade.planning.planner import PLANNING_S, StepPlanner, versions
from remat_graph import BadBudget, Budget, Grads, Graph, Links, Plan, simulate
from remat_graph.training import accumulating, with_placement
from remat_offload import TrainingSession
from remat_solvers import Deadline, Problem
from remat_solvers.offload.solver import PERIODS, Offload

ALIKE = 0.2
"""So much may bandwidths and the host's memory, where they are what is found, differ from a saved plan's."""

HOST_BUDGET = "host_budget_nbytes"
"""Key of `Plan.solver_stats` under which the host's budget is found."""


@attrs.define(kw_only=True)
class OffmatePlanner(StepPlanner):
    """Plans training steps for a fixed device and host budget.

    The first plan fixes the placement of all persistent values.

    Attributes:
        host_budget_nbytes: what moved values may take on the host, and
        host_budget_given: whether the user said so.
        links: bandwidths, and
        links_given: whether they were not measured.
        training: what carries plans out.
        time_limit_s: of the solver, in seconds.
        asked_nbytes: what the budget means, once there is a graph: a percentage is of the sample's step,
            whatever comes later.
    """

    host_budget_nbytes: int
    host_budget_given: bool
    links: Links
    links_given: bool
    training: TrainingSession
    time_limit_s: float | None
    asked_nbytes: int | None = None

    def budget_for(self, graph: Graph) -> int:
        """The device bytes that a plan of `graph` may take.

        Raises:
            BadBudget: the budget means nothing, or the reserve leaves nothing of it.
        """
        taken_nbytes = self._taken_nbytes
        budget_nbytes = self._asked_nbytes(graph) - taken_nbytes
        if budget_nbytes <= 0:
            taken = f"buffers, inputs and reserve_nbytes take {taken_nbytes} bytes, all of it"
            raise BadBudget(budget=str(self.budget), problem=taken)
        return budget_nbytes

    def _asked_nbytes(self, graph: Graph) -> int:
        """What the budget means, from the first graph on."""
        if self.asked_nbytes is None:
            budget = Budget.parse(self.budget)
            external_nbytes = self.training.external_nbytes if budget.is_percentage else 0
            self.asked_nbytes = budget.resolve(with_placement(graph, ())) + external_nbytes
        return self.asked_nbytes

    @property
    def _taken_nbytes(self) -> int:
        """What is there whatever the plan."""
        return self.reserve_nbytes + self.training.external_nbytes

    def solve(self, graph: Graph, budget_nbytes: int, began_s: float) -> Plan:
        """Make a plan.

        Raises:
            NoRoom: no plan keeps both budgets.
        """
        names = self.training.on_host
        on_host = None if names is None else {i for i, v in enumerate(graph.values) if v.name in names}
        passes = self.training.accumulation
        solver = Offload(
            in_backward=self.training.in_backward,
            micro_batches=passes,
            on_host=None if on_host is None else frozenset(on_host),
        )
        rounding_nbytes = self._rounding_nbytes(graph)
        host_nbytes = max(0, self.host_budget_nbytes - rounding_nbytes)
        deadline = Deadline(self.time_limit_s)
        solution = solver.solve(Problem(graph, budget_nbytes, self.links, host_nbytes), deadline)
        if solution.schedule is None:
            least_host_nbytes = int(solution.stats["least_host_nbytes"])
            raise NoRoom(
                budget_nbytes=self._asked_nbytes(graph),
                host_budget_nbytes=self.host_budget_nbytes,
                least_nbytes=int(solution.stats["least_nbytes"]) + self._taken_nbytes,
                least_host_nbytes=least_host_nbytes + (rounding_nbytes if least_host_nbytes else 0),
                cut_short=deadline.hit,
            )
        settled = with_placement(graph, solution.on_host)
        plan = Plan.from_schedule(
            settled,
            solution.schedule,
            budget_nbytes=budget_nbytes,
            lower_bound_s=solution.lower_bound_s / passes,  # a plan's figures are of one forward and backward
            solver=solver.name,
            solver_stats={
                **solution.stats,
                PLANNING_S: time.perf_counter() - began_s,
                HOST_BUDGET: self.host_budget_nbytes,
            },
            versions=versions(),
            platform=self.platform,
            deadline_hit=deadline.hit,
            links=self.links,
            periods=PERIODS,
        )
        return self._where_most_is_held(settled, plan)

    def finished(self, plan: Plan, budget_nbytes: int) -> Plan:
        """The plan with what explains it."""
        return attrs.evolve(plan, notes=Offload.explain(plan.solver_stats))

    def _where_most_is_held(self, graph: Graph, plan: Plan) -> Plan:
        """A plan with its peaks in the state of ``.grad`` that needs most."""
        passes = self.training.accumulation
        if self.training.in_backward and passes == 1:
            return plan
        # Gradients that are there already take as much again on the host while new ones arrive.
        again = simulate(
            accumulating(graph),
            plan.schedule,
            grads=Grads.ACCUMULATE,
            links=self.links,
            passes=passes,
            periods=1 if passes == 1 else PERIODS,
        )
        return attrs.evolve(
            plan,
            peak_nbytes=max(plan.peak_nbytes, again.peak_nbytes),
            live_peak_nbytes=max(plan.live_peak_nbytes, again.live_peak_nbytes),
            host_peak_nbytes=max(plan.host_peak_nbytes, again.host_peak_nbytes),
        )

    def saved_as(self) -> Method:
        """What a plan depends on beside its graph, its budget and the source of its times."""
        training = self.training
        return Method(
            solver=Offload.name,
            time_limit_s=self.time_limit_s,
            parameters={
                "host_budget_nbytes": self.host_budget_nbytes if self.host_budget_given else "what is free",
                "in_backward": training.in_backward,
                "accumulation": training.accumulation,
                "optimizer": type(training.optimizer).__qualname__,
                "settled": training.on_host is not None,
                "links": self.links if self.links_given else "measured",
            },
        )

    def _rounding_nbytes(self, graph: Graph) -> int:
        """The most that blocks of the host's memory take beyond their bytes, where they are whole pages."""
        blocks = len(graph.values) + len(graph.gradients)  # gradients that are there already, too
        return self.training.pool.rounding_nbytes * blocks

    def serves(self, graph: Graph, plan: Plan) -> bool:
        """Whether a saved plan keeps the host's budget, and what is found here now is about what was then."""
        if plan.links is None:
            return False
        if plan.on_host and plan.host_peak_nbytes > self.host_budget_nbytes - self._rounding_nbytes(graph):
            return False
        then = (plan.solver_stats.get(HOST_BUDGET), *attrs.astuple(plan.links))
        now = (self.host_budget_nbytes, *attrs.astuple(self.links))
        return all(map(_alike, then, now))


def _alike(was: Any, now: Any) -> bool:
    """Whether a number of a saved plan is about the one that is found now; either may not be known."""
    if isinstance(was, int | float) and isinstance(now, int | float):
        return abs(was - now) <= ALIKE * now
    return was is None and now is None
