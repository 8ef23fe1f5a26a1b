"""Plan a training step together with its optimizer, for a device budget and a host budget."""

import time
from typing import Any

import attrs

from remat_executor.memory.block_slack import worst_case_nbytes
from remat_facade.errors import NoRoom
from remat_facade.planning.known_plans import PLANNING_S
from remat_facade.planning.method import Method
from remat_facade.planning.planner import StepPlanner
from remat_facade.planning.versions import versions
from remat_graph import BadBudget, Budget, Grads, Graph, Links, Plan, simulate
from remat_graph.training import accumulating, with_placement
from remat_offload import TrainingSession
from remat_solvers import Problem
from remat_solvers.offload.candidate import PERIODS
from remat_solvers.offload.solver import Offload
from remat_solvers.running.stopping import INTERRUPTED, stopped_by_interrupts

ALIKE = 0.2
"""Largest relative difference of measured bandwidths and free host memory from those of a saved plan."""

EXPLANATION = "why"
"""Key of `Plan.solver_stats`: the lines of the plan's notes."""

HOST_BUDGET = "host_budget_nbytes"
"""Key of `Plan.solver_stats`: the host budget."""


@attrs.define(kw_only=True)
class OffmatePlanner(StepPlanner):
    """Plans training steps for a fixed device and host budget.

    The first plan fixes the placement of all persistent values.

    Attributes:
        host_budget_nbytes: host bytes for values that move.
        host_budget_given: whether the user gave the host budget; otherwise it is a share of the free memory.
        links: the bandwidths.
        links_given: whether the bandwidths were given; otherwise they were measured.
        training: the session that runs the plans.
        time_limit_s: wall-clock seconds for the solver, or None.
        asked_nbytes: the budget in bytes, from the first graph on: a percentage is of the step of the sample,
            also for later graphs.
    """

    host_budget_nbytes: int
    host_budget_given: bool
    links: Links
    links_given: bool
    training: TrainingSession
    time_limit_s: float | None
    asked_nbytes: int | None = None

    def blocks_nbytes(self, graph: Graph, plan: Plan) -> int:
        """A bound of a plan's peak on CUDA, with ``.grad`` being None, and kept if a step may find it so.

        It holds for each of several micro-batches: one that only accumulates moves no optimizer states, and
        needs no workspace of an update.

        Args:
            graph: the training step; any placement.
            plan: a plan of it.
        """
        placed = with_placement(graph, plan.on_host)
        nbytes = worst_case_nbytes(placed, plan.schedule)
        # The margin for the first state may be enough for both.
        if nbytes > self.budget_for(graph) or not self._keeps_gradients:
            return nbytes
        kept_nbytes = worst_case_nbytes(accumulating(placed), plan.schedule, grads=Grads.ACCUMULATE)
        return max(nbytes, kept_nbytes)

    @property
    def _keeps_gradients(self) -> bool:
        """Whether a step may find a ``.grad`` of an earlier one."""
        return self.training.accumulation > 1 or not self.training.in_backward

    def budget_for(self, graph: Graph) -> int:
        """The device bytes that a plan of `graph` may take.

        Raises:
            BadBudget: the budget is invalid, or buffers, inputs and the reserve are all of it.
        """
        taken_nbytes = self._taken_nbytes
        budget_nbytes = self._asked_nbytes(graph) - taken_nbytes
        if budget_nbytes <= 0:
            taken = f"buffers, inputs and reserve_nbytes take {taken_nbytes} bytes, which leaves nothing"
            raise BadBudget(budget=str(self.budget), problem=taken)
        return budget_nbytes

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes."""
        return nbytes + self._taken_nbytes

    def _asked_nbytes(self, graph: Graph) -> int:
        """The budget in bytes, which the first graph fixes."""
        if self.asked_nbytes is None:
            budget = Budget.parse(self.budget)
            external_nbytes = self.training.external_nbytes if budget.is_percentage else 0
            self.asked_nbytes = budget.resolve(with_placement(graph, ())) + external_nbytes
        return self.asked_nbytes

    @property
    def _taken_nbytes(self) -> int:
        """Device bytes in use with any plan."""
        return self.reserve_nbytes + self.training.external_nbytes

    def solve(self, graph: Graph, budget_nbytes: int, began_s: float) -> Plan:
        """Run the solver.

        Raises:
            NoRoom: no plan was found within both budgets.
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
        search = self.search(graph, budget_nbytes, self.time_limit_s, passes)
        deadline = search.deadline
        with stopped_by_interrupts(deadline):
            solution = solver.solve(Problem(graph, budget_nbytes, self.links, host_nbytes), deadline)
            if solution.schedule is None:
                assert solution.shortage is not None
                least_host_nbytes = solution.shortage.host_nbytes
                raise NoRoom(
                    budget_nbytes=self._asked_nbytes(graph),
                    host_budget_nbytes=self.host_budget_nbytes,
                    least_nbytes=solution.shortage.nbytes + self._taken_nbytes,
                    least_host_nbytes=least_host_nbytes + (rounding_nbytes if least_host_nbytes else 0),
                    smallest_nbytes=solution.shortage.nbytes,
                    cut_short=deadline.hit,
                )
        placed = with_placement(graph, solution.on_host)
        plan = Plan.from_schedule(
            placed,
            solution.schedule,
            budget_nbytes=budget_nbytes,
            lower_bound_s=solution.lower_bound_s / passes,  # a plan's times are of one forward and backward
            solver=solver.name,
            solver_stats={
                **solution.stats,
                EXPLANATION: "\n".join(solution.explanation),
                PLANNING_S: time.perf_counter() - began_s,
                HOST_BUDGET: self.host_budget_nbytes,
                **({INTERRUPTED: True} if deadline.stopped else {}),
            },
            versions=versions(),
            platform=self.platform,
            deadline_hit=deadline.hit,
            links=self.links,
            periods=PERIODS,
        )
        return self._where_most_is_held(placed, plan)

    def finished(self, graph: Graph, plan: Plan, budget_nbytes: int) -> Plan:
        """The plan with notes that explain its decisions."""
        return attrs.evolve(plan, notes=tuple(str(plan.solver_stats.get(EXPLANATION, "")).splitlines()))

    def _where_most_is_held(self, graph: Graph, plan: Plan) -> Plan:
        """The plan with the larger peaks of ``.grad`` being None and being kept from an earlier step."""
        if not self._keeps_gradients:
            return plan
        passes = self.training.accumulation
        # Gradients of an earlier step need the same host memory again while new ones arrive.
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

    def saved_as(self, graph: Graph) -> Method:
        """The key of saved plans, in addition to graph, budget and source of times."""
        training = self.training
        starts = {"start_s": self.links.start_s} if self.links_given and self.links.start_s else {}
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
                **starts,
            },
        )

    def _rounding_nbytes(self, graph: Graph) -> int:
        """Most host bytes that rounding blocks up to pages can add."""
        blocks = len(graph.values) + len(graph.gradients)  # also gradients of an earlier step
        return self.training.pool.rounding_nbytes * blocks

    def serves(self, graph: Graph, plan: Plan) -> bool:
        """Whether a saved plan fits the host budget, and the host and links are about the same as then."""
        if plan.links is None:
            return False
        if plan.on_host and plan.host_peak_nbytes > self.host_budget_nbytes - self._rounding_nbytes(graph):
            return False
        then = (plan.solver_stats.get(HOST_BUDGET), *_bandwidths(plan.links))
        now = (self.host_budget_nbytes, *_bandwidths(self.links))
        return all(map(_alike, then, now))


def _bandwidths(links: Links) -> tuple[float | None, ...]:
    """Without the time to start a copy, which varies more than it matters."""
    return attrs.astuple(links, filter=lambda field, _: field.name != "start_s")


def _alike(then: Any, now: Any) -> bool:
    """Whether a number of a saved plan is about the present one, or both are unknown."""
    if isinstance(then, int | float) and isinstance(now, int | float):
        return abs(then - now) <= ALIKE * now
    return then is None and now is None
