"""Diagnose the planning of a step: what binds its memory, what its plan costs, and where planning time goes.

The floor is a certificate: when its op first runs, these values are live in every schedule. The peaks are the
referee's. The time of planning is divided by the solver's own progress reports, one at the end of each part.
"""

import time
from collections.abc import Callable

import attrs

from remat_facade.planning.method import Method
from remat_facade.planning.planner import SOLVE_SHARE, Progress
from remat_facade.planning.versions import versions
from remat_facade.report.held import Held, held_at_peak
from remat_graph import Grads, Graph, Plan, Schedule, resolve_budget
from remat_graph.training import with_dropped
from remat_solvers import (
    Deadline,
    MinBudget,
    Problem,
    compile_first,
    get_solver,
    min_budget,
    min_present_budget,
    solve_present,
    solve_twice,
)
from remat_solvers import Progress as SolverProgress
from remat_solvers.bounds import Floor
from remat_solvers.bounds.decisions import lowest_floor
from remat_solvers.present_gradients import freed_gradients

REST = "remainder"
"""Name of the time after the last report."""


@attrs.frozen(kw_only=True)
class TimePart:
    """A part of planning.

    Attributes:
        name: of the part.
        seconds: how long it took.
        before_s: seconds of a step with the best plan when the part began; None if there was no plan.
        after_s: the same when the part ended.
        bound_before_s: lower bound on the seconds of a step when the part began; None before there was one.
        bound_after_s: the same when the part ended.
    """

    name: str
    seconds: float
    before_s: float | None = None
    after_s: float | None = None
    bound_before_s: float | None = None
    bound_after_s: float | None = None

    @property
    def gained(self) -> bool:
        """Whether the plan or the bound is better than before."""
        return self.gain_s > 0

    @property
    def gain_s(self) -> float:
        """By how much the plan or the bound is better than before; infinite for the first of either."""
        pairs = (self.after_s, self.before_s), (self.bound_before_s, self.bound_after_s)
        return max(_difference(*pair) for pair in pairs)


def _difference(lower_s: float | None, higher_s: float | None) -> float:
    """How far apart two times are; infinite if only one is known, 0 if none is."""
    if lower_s is None or higher_s is None:
        return 0.0 if lower_s is higher_s else float("inf")
    return higher_s - lower_s


@attrs.define
class Stopwatch:
    """Divides time into parts, in order; parts of one name that follow each other are one.

    Attributes:
        clock: returns seconds.
        parts: those that have ended.
    """

    clock: Callable[[], float] = time.perf_counter
    parts: list[TimePart] = attrs.field(factory=list)
    _since: float = attrs.field(init=False)

    @_since.default
    def _now(self) -> float:
        return self.clock()

    def skip(self) -> None:
        """Count the time until now to no part."""
        self._since = self.clock()

    def end(self, name: str, time_s: float | None = None, bound_s: float | None = None) -> None:
        """End a part.

        Args:
            name: of the part.
            time_s: seconds of a step with the best plan so far; None for what it was before.
            bound_s: lower bound of these seconds so far; None for what it was before.
        """
        now = self.clock()
        last = self.parts[-1] if self.parts else TimePart(name="", seconds=0.0)
        known = [s for s in (last.after_s, time_s) if s is not None]
        bounds = [s for s in (last.bound_after_s, bound_s) if s is not None]
        part = TimePart(
            name=name,
            seconds=now - self._since,
            before_s=last.after_s,
            after_s=min(known, default=None),
            bound_before_s=last.bound_after_s,
            bound_after_s=max(bounds, default=None),
        )
        self._since = now
        if last.name == name:
            self.parts.pop()
            seconds = last.seconds + part.seconds
            part = attrs.evolve(
                part, seconds=seconds, before_s=last.before_s, bound_before_s=last.bound_before_s
            )
        self.parts.append(part)

    def solver_reports(self, progress: SolverProgress) -> None:
        """End a part of a solver."""
        self.end(progress.solver, progress.time_s, progress.lower_bound_s)


@attrs.frozen(kw_only=True, eq=False)
class Diagnosis:
    """What `diagnose` finds.

    Attributes:
        graph: the step.
        asked_nbytes: the budget that was given.
        plan: for that budget, or for the smallest that was found if it is larger.
        searched: whether the solver found the plan; otherwise it is that of the smallest budget.
        smallest: the smallest budget.
        bounding: the graph without switches to which the floor belongs.
        floor: the certificate.
        unplanned: what the unplanned step holds at its peak.
        planned: what the plan holds at its peak.
        floors_with: floors with another option, by the option; those that differ.
        parts: where the time went.
        measured: distinct kinds of ops that were measured now, and all of them; None without a model.
    """

    graph: Graph
    asked_nbytes: int
    plan: Plan
    searched: bool
    smallest: MinBudget
    bounding: Graph
    floor: Floor
    unplanned: Held
    planned: Held
    floors_with: dict[str, int]
    parts: tuple[TimePart, ...]
    measured: tuple[int, int] | None = None

    @property
    def at_floor(self) -> Held:
        """What every schedule holds when the op of the floor runs."""
        floor = self.floor
        held = {v: nbytes for v, nbytes in floor.held.items() if nbytes}
        return Held(place=floor.place, values=held, workspace_nbytes=floor.workspace_nbytes)

    @property
    def kinds(self) -> int:
        """Number of distinct kinds of ops: kernels and shapes."""
        return len({op.key or op.target for op in self.graph.ops})


def diagnose(
    graph: Graph,
    budget: int | str,
    method: Method,
    *,
    watch: Stopwatch | None = None,
    measured: tuple[int, int] | None = None,
    on_progress: Progress = lambda stage: None,
) -> Diagnosis:
    """Plan a graph and keep account of the time.

    Args:
        graph: the step.
        budget: as users give it.
        method: solver, time limit, state of ``.grad``.
        watch: has the parts before, such as capture.
        measured: see `Diagnosis`.
        on_progress: called when a stage begins.

    Raises:
        BadBudget: the budget is invalid.
        UnknownSolver: no solver has this name.
    """
    asked_nbytes = resolve_budget(budget, graph)
    solver = get_solver(method.solver, **method.parameters)
    present = method.grads is Grads.PRESENT
    limit_s = method.limit_s(len(graph.ops))
    watch = watch or Stopwatch()
    compile_first(on_progress)
    on_progress(f"searching for the smallest budget of {graph.name}")
    find = min_present_budget if present else min_budget
    smallest = find(graph, Deadline((1 - SOLVE_SHARE) * limit_s))
    budget_nbytes = max(asked_nbytes, smallest.nbytes)

    on_progress(f"planning {graph.name}: {len(graph.ops)} ops")
    deadline = Deadline(SOLVE_SHARE * limit_s, watch.solver_reports)
    watch.skip()
    solve = solve_present if present else solve_twice
    solution = solve(solver, Problem(graph, budget_nbytes), deadline)
    watch.end(REST, solution.time_s, solution.lower_bound_s)
    plan = Plan.from_schedule(
        graph,
        solution.schedule or smallest.schedule,
        budget_nbytes=budget_nbytes,
        lower_bound_s=solution.lower_bound_s,
        solver=method.solver,
        solver_stats=solution.stats,
        versions=versions(),
        deadline_hit=deadline.hit,
        grads=method.grads,
    )
    floor, bounding = lowest_floor(freed_gradients(graph) if present else graph)
    return Diagnosis(
        graph=graph,
        asked_nbytes=asked_nbytes,
        plan=plan,
        searched=solution.schedule is not None,
        smallest=smallest,
        bounding=bounding,
        floor=floor,
        unplanned=held_at_peak(graph, Schedule.unplanned(graph)),
        planned=held_at_peak(graph, plan.schedule, plan.grads),
        floors_with=_floors_with(graph, floor, present=present),
        parts=tuple(watch.parts),
        measured=measured,
    )


def _floors_with(graph: Graph, floor: Floor, *, present: bool) -> dict[str, int]:
    """The floors of the same step if the training loop holds less."""
    others = {}
    if not present:
        others['gradients="present"'] = freed_gradients(graph)
        differentiated = {graph.values[tangent].of for tangent in graph.tangents}
        kept = [v for v in graph.outputs if v not in differentiated and graph.allocated_nbytes(v)]
        if kept:
            others['outputs="dropped"'] = with_dropped(graph, kept)
    found = {option: lowest_floor(other)[0].nbytes for option, other in others.items()}
    return {option: nbytes for option, nbytes in found.items() if nbytes != floor.nbytes}
