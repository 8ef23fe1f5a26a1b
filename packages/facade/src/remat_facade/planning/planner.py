"""From a graph to a plan: resolve the budget, ask a solver, believe only the referee.

This is what the entry points and the command share, and all that they know of solvers. No torch here.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import version
from typing import Self

import attrs

from remat_facade.errors import BudgetAboveDevice, NotFound
from remat_facade.planning.method import Method
from remat_facade.planning.zoo import Zoo
from remat_graph import BadBudget, Budget, Graph, Plan, Schedule, format_nbytes, format_seconds
from remat_graph.errors import shown
from remat_solvers import Deadline, InfeasibleBudget, Problem, Solution, get_solver, min_budget
from remat_solvers import Progress as SolverProgress
from remat_solvers.protocol import SMALLEST

Progress = Callable[[str], None]
"""Told in a few words what begins now."""

PLANNING_S = "planning_s"
"""Key of `Plan.solver_stats` under which the seconds that planning took are found."""

SAVED = "saved"
"""Key of `Plan.solver_stats` that is there, and true, if the plan was found in the zoo."""


def silent(_: str) -> None:
    """A `Progress` that tells nobody."""


@attrs.define(kw_only=True)
class StepPlanner(ABC):
    """Plans graphs at one budget: a saved plan is used if there is one, else a solver makes one.

    Attributes:
        budget: as the user gave it.
        reserve_nbytes: bytes of the budget left to the caller.
        platform: where the graph's times come from, for the record.
        on_progress: told what begins.
        zoo: where plans are looked for first, and kept; None: each one is made.
    """

    budget: int | str
    reserve_nbytes: int = 0
    platform: str = ""
    on_progress: Progress = silent
    zoo: Zoo | None = None

    @abstractmethod
    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of `graph` may take."""

    @abstractmethod
    def solve(self, graph: Graph, budget_nbytes: int, began_s: float) -> Plan:
        """Make a plan; `began_s` is when planning began."""

    @abstractmethod
    def saved_as(self) -> Method:
        """What a saved plan depends on in addition to its graph, its budget and the source of its times."""

    def serves(self, graph: Graph, plan: Plan) -> bool:
        """Whether a saved plan of this graph and budget can be used now."""
        return True

    def finished(self, plan: Plan, budget_nbytes: int) -> Plan:
        """The plan as it is returned."""
        return plan

    def with_margin(self, nbytes: int) -> Self:
        """The same planner with a margin of n bytes."""
        return attrs.evolve(self, reserve_nbytes=self.reserve_nbytes + nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """Plan.

        Raises:
            RematError: the budget is invalid, or no plan keeps to it.
        """
        began_s = time.perf_counter()
        budget_nbytes = self.budget_for(graph)
        method = self.saved_as()
        plan = None if self.zoo is None else self.zoo.find(graph, budget_nbytes, method)
        if plan is not None and self.serves(graph, plan):
            stats = {**plan.solver_stats, PLANNING_S: time.perf_counter() - began_s, SAVED: True}
            return self.finished(attrs.evolve(plan, solver_stats=stats), budget_nbytes)
        self.on_progress(f"planning {graph.name}: {len(graph.ops)} ops in {format_nbytes(budget_nbytes)}")
        plan = self.finished(self.solve(graph, budget_nbytes, began_s), budget_nbytes)
        if self.zoo is not None:
            self.zoo.keep(graph, budget_nbytes, method, plan)
        return plan


@attrs.define(kw_only=True)
class Planner(StepPlanner):
    """Plans any graph at one budget; what the executor calls for each new graph it captures.

    A percentage is of each graph.

    Attributes:
        method: what solves.
        device_nbytes: what the device has, if that is known, and
        device: its name for people.
        granted_nbytes: what the first graph was given, the sample's: a smaller one, the last batch of an
            epoch say, may take as much, although a percentage of it is less.
    """

    method: Method = attrs.field(factory=Method)
    device_nbytes: int | None = None
    device: str = ""
    granted_nbytes: int = 0

    def __attrs_post_init__(self) -> None:
        reserve: object = self.reserve_nbytes
        if not isinstance(reserve, int) or isinstance(reserve, bool) or not 0 <= reserve < 2**63:
            raise BadBudget(
                budget=self.budget if isinstance(self.budget, str) else shown(self.budget),
                problem=f"reserve_nbytes {shown(reserve)} is no number of bytes",
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
        nbytes = Budget.parse(self.budget).nbytes
        if nbytes is not None:
            self._without_reserve(nbytes)

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of `graph` may take.

        Raises:
            BadBudget: the budget means nothing, or the reserve leaves nothing of it.
            BudgetAboveDevice: the device has less.
        """
        return self._without_reserve(Budget.parse(self.budget).resolve(graph))

    def _without_reserve(self, nbytes: int) -> int:
        """What is left of a budget for plans."""
        nbytes = max(nbytes, self.granted_nbytes)
        if self.device_nbytes is not None and nbytes > self.device_nbytes:
            has = f"{self.device}, which has {format_nbytes(self.device_nbytes)}"
            raise BudgetAboveDevice(budget=str(self.budget), device=has)
        if nbytes <= self.reserve_nbytes:
            problem = f"reserve_nbytes {self.reserve_nbytes} leaves nothing of its {nbytes} bytes"
            raise BadBudget(budget=str(self.budget), problem=problem)
        return nbytes - self.reserve_nbytes

    def saved_as(self) -> Method:
        """The method."""
        return self.method

    def finished(self, plan: Plan, budget_nbytes: int) -> Plan:
        """The plan, whose budget is granted to later graphs too."""
        self.granted_nbytes = self.granted_nbytes or budget_nbytes + self.reserve_nbytes
        return plan

    def solve(self, graph: Graph, budget_nbytes: int, began_s: float) -> Plan:
        """Make a plan.

        Raises:
            InfeasibleBudget: no schedule fits; says which budget works.
            NotFound: this solver found none, but there is one.
            OverBudget: the referee caught a solver whose schedule does not fit what it was given.
        """
        deadline = Deadline(self.method.time_limit_s, self._tell)
        solver = get_solver(self.method.solver, **self.method.parameters)
        solution = solver.solve(Problem(graph, budget_nbytes), deadline)
        schedule = solution.schedule or self._smallest(graph, budget_nbytes, deadline, solution)
        return Plan.from_schedule(
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
