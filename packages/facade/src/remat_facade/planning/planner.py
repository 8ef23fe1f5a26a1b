"""From a graph to a plan: resolve the budget, ask a solver, believe only the referee.

This is what the entry points and the command share, and all that they know of solvers. No torch here.
"""

import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import attrs

from remat_facade.errors import BudgetAboveDevice, NotFound
from remat_facade.planning.method import Method
from remat_facade.planning.onednn_note import scratch_note
from remat_facade.planning.zoo import Zoo
from remat_graph import Graph, Implementation, Op, Schedule, Value
from remat_graph.budget import resolve_budget
from remat_graph.errors import BadBudget, OverBudget, shown
from remat_graph.fingerprint import fingerprint
from remat_graph.plan import Plan
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.units import format_nbytes, format_seconds
from remat_solvers import Deadline, InfeasibleBudget, Problem, Solution, get_solver
from remat_solvers import Progress as SolverProgress
from remat_solvers.protocol import SMALLEST
from remat_solvers.queries import min_budget

Progress = Callable[[str], None]
"""Told in a few words what begins now."""

PLANNING_S = "planning_s"
"""Key of `Plan.solver_stats` under which the seconds that planning took are found."""

SAVED = "saved"
"""Key of `Plan.solver_stats` that is there, and true, if the plan was found in the zoo."""


def silent(_: str) -> None:
    """A `Progress` that tells nobody."""


@attrs.define(kw_only=True)
class Planner:
    """Plans any graph at one budget; what the executor calls for each new graph it captures.

    Attributes:
        budget: as the user gave it; percentages are of each graph.
        method: what solves.
        reserve_nbytes: bytes of the budget left to the caller.
        device_nbytes: what the device has, if that is known, and
        device: its name for people.
        platform: where the graph's times come from, for the record.
        on_progress: told what begins.
        zoo: where plans are looked for first, and kept; None: each one is made.
        granted_nbytes: what the first graph was given, the sample's: a smaller one, the last batch of an
            epoch say, may take as much, although a percentage of it is less.
    """

    budget: int | str
    method: Method = attrs.field(factory=Method)
    reserve_nbytes: int = attrs.field(default=0)
    device_nbytes: int | None = None
    device: str = ""
    platform: str = ""
    on_progress: Progress = silent
    zoo: Zoo | None = None
    granted_nbytes: int = 0

    @reserve_nbytes.validator
    def _check_reserve(self, _: "attrs.Attribute[int]", value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise BadBudget(
                budget=self.budget if isinstance(self.budget, str) else shown(self.budget),
                problem=f"reserve_nbytes {shown(value)} is no number of bytes",
            )

    def check(self) -> None:
        """Find what is wrong with budget and solver before there is a graph.

        Raises:
            BadBudget: the budget means nothing.
            BudgetAboveDevice: the device has less.
            UnknownSolver: there is no such solver.
            BadParameter: it does not take these parameters.
        """
        get_solver(self.method.solver, **self.method.parameters)
        large = Value(name="large", nbytes=2**40)
        op = Op(name="op", target="op", implementations=(Implementation(inputs=(), outputs=(0,)),))
        anything = Graph(name="anything", values=(large,), ops=(op,))  # what a percentage is of
        if isinstance(self.budget, str) and "%" in self.budget:
            resolve_budget(self.budget, anything)
        else:
            self.budget_for(anything)

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of `graph` may take.

        Raises:
            BadBudget: the budget means nothing, or the reserve leaves nothing of it.
            BudgetAboveDevice: the device has less.
        """
        nbytes = max(resolve_budget(self.budget, graph), self.granted_nbytes)
        if self.device_nbytes is not None and nbytes > self.device_nbytes:
            has = f"{self.device}, which has {format_nbytes(self.device_nbytes)}"
            raise BudgetAboveDevice(budget=str(self.budget), device=has)
        if nbytes <= self.reserve_nbytes:
            problem = f"reserve_nbytes {self.reserve_nbytes} leaves nothing of its {nbytes} bytes"
            raise BadBudget(budget=str(self.budget), problem=problem)
        return nbytes - self.reserve_nbytes

    def tighter(self, nbytes: int) -> "Planner":
        """The same planner in so many bytes less."""
        return attrs.evolve(self, reserve_nbytes=self.reserve_nbytes + nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """Plan.

        Raises:
            InfeasibleBudget: no schedule fits; says which budget works.
            NotFound: this solver found none, but there is one.
            OverBudget: the referee caught a solver whose schedule does not fit what it was given.
        """
        budget_nbytes = self.budget_for(graph)
        began_s = time.perf_counter()
        found = None if self.zoo is None else self.zoo.find(graph, budget_nbytes, self.method)
        if found is not None:
            self.granted_nbytes = self.granted_nbytes or budget_nbytes + self.reserve_nbytes
            stats = {**found.solver_stats, PLANNING_S: time.perf_counter() - began_s, SAVED: True}
            return attrs.evolve(found, solver_stats=stats)
        self.on_progress(f"planning {graph.name}: {len(graph.ops)} ops in {format_nbytes(budget_nbytes)}")
        deadline = Deadline(self.method.time_limit_s, self._tell)
        solver = get_solver(self.method.solver, **self.method.parameters)
        solution = solver.solve(Problem(graph, budget_nbytes), deadline)
        schedule = solution.schedule or self._smallest(graph, budget_nbytes, deadline, solution)
        plan = Plan.from_schedule(
            graph,
            schedule,
            budget_nbytes=budget_nbytes,
            lower_bound_s=solution.lower_bound_s,
            solver=self.method.solver,
            solver_stats={**solution.stats, PLANNING_S: time.perf_counter() - began_s},
            versions=versions(),
            platform=self.platform,
            deadline_hit=deadline.hit,
        )
        self.granted_nbytes = self.granted_nbytes or budget_nbytes + self.reserve_nbytes
        if self.zoo is not None:
            self.zoo.keep(graph, budget_nbytes, self.method, plan)
        return plan

    def _smallest(self, graph: Graph, budget_nbytes: int, deadline: Deadline, solution: Solution) -> Schedule:
        """What needs least, where the solver found nothing; the portfolio may use it."""
        self.on_progress(f"no schedule in {format_nbytes(budget_nbytes)}: looking for the smallest budget")
        smallest = min_budget(graph, deadline)
        if smallest.nbytes > budget_nbytes:
            raise InfeasibleBudget(
                budget_nbytes=budget_nbytes,
                smallest_nbytes=min(smallest.nbytes, int(solution.stats.get(SMALLEST, smallest.nbytes))),
                floor_nbytes=smallest.floor_nbytes,
                floor_op=smallest.floor_op,
                floor_op_nbytes=smallest.floor_op_nbytes,
                cut_short=smallest.cut_short,
            )
        if self.method.solver == "auto":
            return smallest.schedule
        # One method may fail where another would not; "infeasible" would then be a lie.
        raise NotFound(
            solver=self.method.solver,
            budget=format_nbytes(budget_nbytes),
            smallest=format_nbytes(smallest.nbytes),
        )

    def _tell(self, progress: SolverProgress) -> None:
        best = f"{format_seconds(progress.time_s)} a step" if progress.time_s is not None else "no plan yet"
        bound = format_seconds(progress.lower_bound_s)
        self.on_progress(
            f"planning by {progress.solver}: {best}, at best {bound} ({progress.elapsed_s:.0f} s)"
        )


def versions() -> dict[str, str]:
    """Of the packages that a plan depends on, by name."""
    names = ("remat-graph", "remat-solvers", "remat-facade")
    found = {name: version(name) for name in names}
    if "torch" in sys.modules:  # a plan made without torch does not depend on it
        found["torch"] = version("torch")
    return found


class SavedPlan:
    """A planner that has a plan already: hands it out for its graph, and asks `otherwise` for later ones."""

    def __init__(self, plan: Plan, otherwise: Planner, source: str = "the plan") -> None:
        self.plan, self.otherwise, self.source = plan, otherwise, source
        self.used = False

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan may take now, whatever the saved one was made for."""
        return self.otherwise.budget_for(graph)

    def tighter(self, nbytes: int) -> Planner:
        """Plan anew in so many bytes less: the saved plan took more than it says."""
        return self.otherwise.tighter(nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """The saved plan, judged again on this graph.

        Raises:
            ForeignPlan: the first graph asked for is not the plan's.
            OverBudget: the plan's peak on this graph is above the budget.
        """
        if self.used and fingerprint(graph) != self.plan.fingerprint:
            return self.otherwise(graph)
        plan = plan_from_data(plan_to_data(self.plan), graph=graph, source=self.source)
        budget_nbytes = self.otherwise.budget_for(graph)
        if plan.peak_nbytes > budget_nbytes:
            raise OverBudget(solver=plan.solver, peak_nbytes=plan.peak_nbytes, budget_nbytes=budget_nbytes)
        self.used = True
        return plan


@attrs.frozen
class Noted:
    """A planner whose plans say something beside what they are.

    Attributes:
        planner: plans.
        note: what to say of a plan, in lines; what its budget does not count is said as well.
    """

    planner: Any
    note: Callable[[Plan], tuple[str, ...]]

    def budget_for(self, graph: Graph) -> int:
        """The planner's."""
        nbytes: int = self.planner.budget_for(graph)
        return nbytes

    def tighter(self, nbytes: int) -> "Noted":
        """The planner's."""
        return attrs.evolve(self, planner=self.planner.tighter(nbytes))

    def __call__(self, graph: Graph) -> Plan:
        """The planner's plan, with notes."""
        plan: Plan = self.planner(graph)
        return attrs.evolve(plan, notes=(*self.note(plan), *scratch_note(graph)))
