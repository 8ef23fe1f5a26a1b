"""Plan a graph: resolve the budget, run a solver, and check its schedule with the referee.

The entry points and the command share this module, which imports no torch.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import attrs

from remat_facade.errors import BudgetAboveDevice, NotFound
from remat_facade.planning.interrupts import warn_if_interrupted
from remat_facade.planning.known_plans import (
    PLANNING_S,
    SAVED,
    SAVING_S,
    SEARCHED_S,
    SOLVING_S,
    Kind,
    KnownPlans,
    carried,
)
from remat_facade.planning.method import Method
from remat_facade.planning.plan_search import PlanSearch
from remat_facade.planning.saved_bound import raised_bound, with_bound
from remat_facade.planning.versions import versions
from remat_facade.planning.zoo import Zoo, smallest_as
from remat_graph import (
    BadBudget,
    Budget,
    Grads,
    Graph,
    Plan,
    RematError,
    Schedule,
    format_nbytes,
    format_seconds,
    noremat_peak_nbytes,
    structure,
)
from remat_graph.errors import shown
from remat_solvers import (
    Carried,
    Deadline,
    Problem,
    Solution,
    Status,
    compile_first,
    get_solver,
    min_budget,
    min_present_budget,
    solve_present,
    solve_twice,
)
from remat_solvers.running.stopping import INTERRUPTED, interrupted, stopped_by_interrupts

Progress = Callable[[str], None]
"""Called with a short description when a stage begins."""

SOLVE_SHARE = 0.75  # of the limit; then the search for the smallest budget begins, if nothing was found

NEAR = 0.01
"""A plan that is carried over is near enough to its bound within this share of the step."""

FAR = 0.05
"""A search runs at once where a carried plan is farther from its bound than searched ones by this share."""


def silent(_: str) -> None:
    """A `Progress` that does nothing."""


@attrs.define(kw_only=True)
class StepPlanner(ABC):
    """Plans graphs for one budget: loads a saved plan if one matches, else runs a solver."""

    budget: int | str  # as the user gave it
    reserve_nbytes: int = 0  # bytes of the budget reserved for the caller
    platform: str = ""  # the source of the graph's times, for `Plan.platform`
    on_progress: Progress = silent  # called when a stage begins or a better plan is found
    # whether `on_progress` rewrites one line: it is called each second, and with "" before a warning
    live: bool = False
    zoo: Zoo | None = None  # saved plans; None to run a solver for each graph and save nothing

    @abstractmethod
    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of `graph` may take."""

    @abstractmethod
    def solve(self, graph: Graph, budget_nbytes: int, began_s: float) -> Plan:
        """Run a solver; `began_s` is the time at which planning began."""

    @abstractmethod
    def saved_as(self, graph: Graph) -> Method:
        """The key of saved plans, in addition to graph, budget and source of times; with the time limit."""

    def serves(self, graph: Graph, plan: Plan) -> bool:
        """Whether a saved plan of this graph and budget is still valid."""
        return True

    def proven(self, graph: Graph, plan: Plan, began_s: float) -> Plan:
        """The plan with a higher bound, for planners that raise it; `began_s` is as for `solve`."""
        return plan

    def finished(self, graph: Graph, plan: Plan, budget_nbytes: int) -> Plan:
        """The plan of a graph to return; a subclass may add notes or record it."""
        return plan

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes."""
        return nbytes + self.reserve_nbytes

    def with_margin(self, nbytes: int) -> Self:
        """The same planner with a margin of n bytes."""
        return attrs.evolve(self, reserve_nbytes=self.reserve_nbytes + nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """Plan a graph; Ctrl-C ends the search with the best plan so far, and a warning.

        Raises:
            RematError: the budget is invalid, or no plan was found within it.
            KeyboardInterrupt: by Ctrl-C before there is a plan, or when it is pressed again.
        """
        began_s = time.perf_counter()
        budget_nbytes = self.budget_for(graph)
        method = self.saved_as(graph)
        plan = None if self.zoo is None else self.zoo.find(graph, budget_nbytes, method)
        if plan is not None and self.serves(graph, plan):
            solving_s = plan.solver_stats.get(SOLVING_S) or plan.solver_stats.get(PLANNING_S)
            loading_s = time.perf_counter() - began_s
            stats = {**plan.solver_stats, PLANNING_S: loading_s, SOLVING_S: solving_s, SAVED: True}
            self.on_progress(f"planned {graph.name}: found on disk in {format_seconds(loading_s)}")
            plan = self._proven_and_kept(graph, with_bound(graph, plan), budget_nbytes, began_s)
            return self.finished(graph, attrs.evolve(plan, solver_stats=stats), budget_nbytes)
        self.on_progress(_first_stage(graph, budget_nbytes))
        plan = self.finished(graph, self.solve(graph, budget_nbytes, began_s), budget_nbytes)
        how = "carried over from another size" if carried(plan) else "searched for"
        took = format_seconds(float(plan.solver_stats[PLANNING_S]))
        self.on_progress(f"planned {graph.name}: {how} in {took}, overhead {plan.overhead:.1%}")
        warn_if_interrupted(plan, self.on_progress if self.live else silent)
        if interrupted(plan):
            return plan
        if self.zoo is not None and not carried(plan):
            self.zoo.keep(graph, budget_nbytes, method, plan)
        return self._proven_and_kept(graph, plan, budget_nbytes, began_s)

    def _proven_and_kept(self, graph: Graph, plan: Plan, budget_nbytes: int, began_s: float) -> Plan:
        """The plan with a higher bound, saved again if it was saved with a lower one of this graph."""
        proven = self.proven(graph, plan, began_s)
        if self.zoo is not None and not carried(plan) and 0 < plan.lower_bound_s < proven.lower_bound_s:
            self.zoo.keep(graph, budget_nbytes, self.saved_as(graph), proven)
        return proven

    def search(self, graph: Graph, budget_nbytes: int, limit_s: float | None, passes: int = 1) -> PlanSearch:
        """A search for a plan of `graph` that begins now; a step has `passes` forwards and backwards."""
        return PlanSearch(
            stage=_first_stage(graph, budget_nbytes),
            base_s=graph.time_s * passes,
            show=self.on_progress,
            live=self.live,
            deadline=Deadline(limit_s),
        )


def _first_stage(graph: Graph, budget_nbytes: int) -> str:
    return f"planning {graph.name}: {len(graph.ops)} ops in {format_nbytes(budget_nbytes)}"


@attrs.define(kw_only=True)
class RecomputePlanner(StepPlanner):
    """The planner of one forward and backward; the executor calls it for each new graph that it captures.

    Attributes:
        method: the solver.
        grads: the state of ``.grad`` that the planned calls find.
        device_nbytes: memory of the device; None if unknown.
        device: name of the device, for messages.
        known: the plans so far, which are carried over to other sizes.
        carries_saved: whether saved plans of the step are carried over too: for callers that ask `revised`.
        granted_nbytes: the budget of the first graph. A percentage is of each graph, but a smaller graph (the
            last batch of an epoch, for example) gets no less than this.
    """

    method: Method = attrs.field(factory=Method)
    grads: Grads = Grads.NEW
    device_nbytes: int | None = None
    device: str = ""
    granted_nbytes: int = 0
    known: KnownPlans = attrs.field(factory=KnownPlans)
    carries_saved: bool = False

    def __attrs_post_init__(self) -> None:
        reserve: object = self.reserve_nbytes
        if not isinstance(reserve, int) or isinstance(reserve, bool) or not 0 <= reserve < 2**63:
            problem = "is not a number of bytes"
            raise BadBudget(budget=shown(reserve), problem=problem, name="reserve_nbytes", sizes=False)

    def for_grads(self, grads: Grads) -> Self:
        """The same planner for a state of ``.grad``."""
        return attrs.evolve(self, grads=grads)

    def planning_s(self, plan: Plan) -> float:
        """The seconds that the solver took for a plan, when it was made."""
        stats = plan.solver_stats
        return float(stats.get(SOLVING_S) or stats.get(SEARCHED_S) or stats.get(PLANNING_S) or 0.0)

    def check(self) -> None:
        """Check the budget and the solver before there is a graph.

        Raises:
            BadBudget: the budget is invalid.
            BudgetAboveDevice: the budget exceeds the memory of the device.
            UnknownSolver: no solver has this name.
            BadParameter: the solver does not accept these parameters.
        """
        get_solver(self.method.solver, **self.method.parameters)
        nbytes = Budget.parse(self.budget).nbytes
        if nbytes is not None:
            self._without_reserve(nbytes)

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of `graph` may take.

        Raises:
            BadBudget: the budget is invalid, or the reserve is all of it.
            BudgetAboveDevice: the budget exceeds the memory of the device.
        """
        return self._without_reserve(Budget.parse(self.budget).resolve(graph))

    def _without_reserve(self, nbytes: int) -> int:
        """The budget without the reserve, after the checks of `budget_for`."""
        nbytes = max(nbytes, self.granted_nbytes)
        if self.device_nbytes is not None and nbytes > self.device_nbytes:
            has = f"{self.device}, which has {format_nbytes(self.device_nbytes)}"
            raise BudgetAboveDevice(budget=str(self.budget), device=has, nbytes=nbytes)
        if nbytes <= self.reserve_nbytes:
            problem = f"reserve_nbytes {self.reserve_nbytes} leaves nothing of the budget of {nbytes} bytes"
            raise BadBudget(budget=str(self.budget), problem=problem)
        return nbytes - self.reserve_nbytes

    def saved_as(self, graph: Graph) -> Method:
        """The method and the state of ``.grad``: all that a plan of this planner depends on."""
        present = {} if self.grads is Grads.NEW else {"grads": self.grads}
        parameters = {**self.method.parameters, **present}
        return attrs.evolve(self.method, time_limit_s=self.limit_s(graph), parameters=parameters)

    def limit_s(self, graph: Graph) -> float:
        """The limit by the clock for planning a graph, in seconds."""
        return self.method.limit_s(len(graph.ops))

    def finished(self, graph: Graph, plan: Plan, budget_nbytes: int) -> Plan:
        """The plan; its budget is granted to later graphs too, and it is carried over to other sizes."""
        if not interrupted(plan):
            self.known.add((structure(graph), self.grads), plan)
        self.granted_nbytes = self.granted_nbytes or budget_nbytes + self.reserve_nbytes
        return plan

    def proven(self, graph: Graph, plan: Plan, began_s: float) -> Plan:
        """The plan with the bound that `Method.prove_s` more seconds raise; Ctrl-C ends them."""
        left_s = self.method.proving_s(time.perf_counter() - began_s)
        if left_s <= 0:
            return plan
        search = self.search(graph, plan.budget_nbytes, left_s)
        search.begin("raising the lower bound")
        with stopped_by_interrupts(search.deadline):
            return raised_bound(graph, plan, search.deadline)

    def solve(self, graph: Graph, budget_nbytes: int, began_s: float, *, carry: bool = True) -> Plan:
        """Run the solver, or carry over a plan of another size, unless `carry` is false.

        Raises:
            InfeasibleBudget: no schedule fits; the error has a budget that works.
            NotFound: this solver found no schedule, but one exists.
            OverBudget: the schedule of the solver exceeds its budget, by the referee.
        """
        if noremat_peak_nbytes(graph) > budget_nbytes:
            compile_first(self.on_progress)
        search = self.search(graph, budget_nbytes, self.limit_s(graph))
        with stopped_by_interrupts(search.deadline):
            solution, schedule = self._found(graph, budget_nbytes, search, carry)
        stopped = {INTERRUPTED: True} if search.deadline.stopped else {}
        plan = Plan.from_schedule(
            graph,
            schedule,
            budget_nbytes=budget_nbytes,
            lower_bound_s=solution.lower_bound_s,
            solver=self.method.solver,
            solver_stats={**solution.stats, PLANNING_S: time.perf_counter() - began_s, **stopped},
            versions=versions(),
            platform=self.platform,
            deadline_hit=search.deadline.hit,
            grads=self.grads,
        )
        return plan

    def _found(
        self, graph: Graph, budget_nbytes: int, search: PlanSearch, carry: bool
    ) -> tuple[Solution, Schedule]:
        """The result of the solver, or a plan of another size carried over, and the schedule to use."""
        deadline = search.deadline
        part = deadline.share(SOLVE_SHARE)
        part.on_progress = deadline.on_progress
        solve = solve_twice if self.grads is Grads.NEW else solve_present
        problem = Problem(graph, budget_nbytes)
        kind = structure(graph), self.grads
        solution = self._carried(kind, solve, problem, part) if carry else None
        solution = solution or solve(get_solver(self.method.solver, **self.method.parameters), problem, part)
        schedule = (
            solution.schedule
            or self._named(graph, budget_nbytes)
            or self._smallest(graph, budget_nbytes, search, solution)
        )
        return solution, schedule

    def _carried(
        self, kind: Kind, solve: Callable[..., Solution], problem: Problem, deadline: Deadline
    ) -> Solution | None:
        """The plan of the nearest size, repaired; None if there is none, or it is too far from its bound."""
        graph = problem.graph
        if self.method.solver != "auto":
            return None
        if self.zoo is not None and self.carries_saved and kind not in self.known.plans:
            for plan in reversed(self.zoo.of_step(graph, self.saved_as(graph))):
                self.known.add(kind, plan)
        needed_nbytes = noremat_peak_nbytes(graph)
        found = self.known.nearest(kind, needed_nbytes, problem.budget_nbytes)
        if found is None:
            return None
        nearest, searched = found
        far = searched.gap + FAR
        solver = Carried(schedule=nearest.schedule, gap=min(NEAR, searched.gap), far=far)
        solution = solve(solver, problem, deadline)
        if solution.overhead is None:
            return None
        gap = solution.overhead - solution.lower_bound_overhead
        if gap > far and not deadline.stopped:
            return None
        saving_s = max(0.0, gap - max(NEAR, searched.gap)) * graph.time_s
        searched_s = max(map(self.planning_s, self.known.plans[kind]))
        stats = {SAVING_S: saving_s, SEARCHED_S: searched_s}
        return attrs.evolve(solution, stats={**solution.stats, **stats})

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now: steps by carried plans have lost its time.

        The caller asks before each step by `plan`.
        """
        if not self.known.pays_off(plan):
            return None
        began_s = time.perf_counter()
        self.on_progress(f"searching for a faster plan of {graph.name}: {len(graph.ops)} ops")
        try:
            found = self.solve(graph, plan.budget_nbytes, began_s, carry=False)
        except RematError:  # the search misses a budget that the repair has met
            return None
        warn_if_interrupted(found, self.on_progress if self.live else silent)
        if found.time_s >= plan.time_s:
            return None
        if not interrupted(found):
            self.known.add((structure(graph), self.grads), found)
            if self.zoo is not None:
                self.zoo.keep(graph, plan.budget_nbytes, self.saved_as(graph), found)
        return found

    def _named(self, graph: Graph, budget_nbytes: int) -> Schedule | None:
        """The schedule of the smallest budget that an error has named, if it fits this one."""
        if self.zoo is None or self.method.solver != "auto":
            return None
        plan = self.zoo.find(graph, *smallest_as(self.grads))
        return None if plan is None or plan.peak_nbytes > budget_nbytes else plan.schedule

    def _smallest(self, graph: Graph, budget_nbytes: int, search: PlanSearch, solution: Solution) -> Schedule:
        """The schedule with the smallest peak, if the solver found none; only the portfolio may use it.

        If it exceeds the budget, the error names its peak. It is saved, because a budget that was named must
        work even if there is less time to search then.
        """
        if search.deadline.stopped:
            raise KeyboardInterrupt
        proven = solution.status is Status.INFEASIBLE
        verdict = f"no schedule {'can fit' if proven else 'was found for'} {format_nbytes(budget_nbytes)}"
        search.begin(f"{verdict}: searching for the smallest budget that works")
        find = min_budget if self.grads is Grads.NEW else min_present_budget
        smallest = find(graph, search.deadline)
        if smallest.nbytes > budget_nbytes:
            least_nbytes = min(smallest.nbytes, solution.smallest_nbytes or smallest.nbytes)
            if self.zoo is not None and not search.deadline.stopped:
                self.zoo.keep_smallest(graph, smallest.schedule, smallest.nbytes, self.method, self.grads)
            raise attrs.evolve(smallest, nbytes=least_nbytes).as_error(budget_nbytes, graph)
        if self.method.solver == "auto":
            return smallest.schedule
        # One method may fail where another does not, so the budget is not infeasible.
        raise NotFound(
            solver=self.method.solver,
            budget=format_nbytes(budget_nbytes),
            smallest=format_nbytes(smallest.nbytes),
        )
