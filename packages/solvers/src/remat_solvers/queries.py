"""Users' queries: the smallest budget, the curve of overhead against budget, the largest batch."""

from collections.abc import Callable, Iterable

import attrs

from remat_graph import Graph, Schedule, noremat_peak_nbytes, percent_of, simulate, structure
from remat_solvers.bounds import budget_floor
from remat_solvers.bounds.decisions import bounding_graphs, lowest_floor
from remat_solvers.bounds.last_run import raised_floor_nbytes
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.carrying import Carried
from remat_solvers.errors import InfeasibleBudget
from remat_solvers.protocol import Deadline, Problem, Solution, Solver
from remat_solvers.registry import get_solver, solver_parameters
from remat_solvers.switching import smallest_peak, solve_switches

RAISING_SHARE = 0.3  # of the time that is left after a schedule was found, to raise the floor


@attrs.frozen(kw_only=True, eq=False)
class MinBudget:
    """The smallest budget for which a schedule was found, and the floor below which none exists.

    The floors hold for schedules without transfers, in which gradients stay to the end.

    Attributes:
        nbytes: the schedule's peak.
        schedule: a schedule with this peak.
        floor_nbytes: no schedule needs less, because of one op.
        floor_op: name of the op that binds at the floor.
        floor_place: the same for people, with the layer.
        floor_reason: in words.
        floor_op_nbytes: bytes of that op alone.
        proven_nbytes: no schedule needs less: the floor, or more because of what remains to be done when
            large ops have run for the last time (`bounds.last_run`).
        cut_short: whether the deadline ended the search, so that a smaller budget may work too.
    """

    nbytes: int
    schedule: Schedule
    floor_nbytes: int
    floor_op: str
    floor_place: str
    floor_reason: str
    floor_op_nbytes: int
    proven_nbytes: int
    cut_short: bool = False

    def as_error(self, budget_nbytes: int, graph: Graph) -> InfeasibleBudget:
        """The error for a budget of the graph that no schedule fits."""
        return InfeasibleBudget(
            budget_nbytes=budget_nbytes,
            smallest_nbytes=self.nbytes,
            floor_nbytes=self.floor_nbytes,
            floor_op=self.floor_op,
            floor_place=self.floor_place,
            floor_op_nbytes=self.floor_op_nbytes,
            proven_nbytes=self.proven_nbytes,
            cut_short=self.cut_short,
            smallest_percent=percent_of(self.nbytes, graph),
        )


def min_budget(graph: Graph, deadline: Deadline | None = None, *, bounding: Graph | None = None) -> MinBudget:
    """Find the smallest budget for which a schedule is found, and certify a floor below it.

    Args:
        graph: the training step.
        deadline: limit by the clock; without one about 6 s at 600 ops, a third of them to raise the floor.
        bounding: a graph whose schedules need no more than those of the graph, which gives the floor; by
            default the graph itself.
    """
    deadline = Deadline() if deadline is None else deadline.within(None)
    bounding = bounding or graph
    floor = lowest_floor(bounding)[0]
    best = smallest_peak(graph, floor.nbytes, deadline)
    nbytes, cut_short = simulate(graph, best).peak_nbytes, deadline.hit
    part = deadline.share(RAISING_SHARE)
    return MinBudget(
        nbytes=nbytes,
        schedule=best,
        floor_nbytes=floor.nbytes,
        floor_op=floor.op,
        floor_place=floor.place,
        floor_reason=floor.reason,
        floor_op_nbytes=floor.op_nbytes,
        proven_nbytes=raised_floor_nbytes(bounding, floor.nbytes, nbytes, part),
        cut_short=cut_short,
    )


def infeasible(graph: Graph, budget_nbytes: int, deadline: Deadline | None = None) -> InfeasibleBudget:
    """The error for a budget that no schedule fits, with the smallest budget that works."""
    return min_budget(graph, deadline).as_error(budget_nbytes, graph)


@attrs.frozen(kw_only=True, eq=False)
class BudgetPoint:
    """One budget of a curve.

    Attributes:
        budget_nbytes: the budget.
        solution: the solver's result.
        wall_s: seconds that the solver took.
    """

    budget_nbytes: int
    solution: Solution
    wall_s: float


def budgets_of(graph: Graph, points: int = 9, *, seconds: float | None = None) -> tuple[int, ...]:
    """Evenly spaced budgets from the smallest for which a schedule is found to the unplanned peak.

    Args:
        graph: the training step.
        points: number of budgets.
        seconds: limit by the clock for the search for the smallest.
    """
    smallest = smallest_peak(graph, lowest_floor(graph)[0].nbytes, Deadline(seconds))
    low, high = simulate(graph, smallest).peak_nbytes, noremat_peak_nbytes(graph)
    steps = max(1, points - 1)
    return tuple(dict.fromkeys(low + (high - low) * i // steps for i in range(points)))


def bounds_of(graph: Graph, budgets: Iterable[int], *, seconds: float | None = None) -> tuple[float, ...]:
    """Per budget a lower bound on the overhead of any schedule, as a ratio; infinite if none can exist.

    Args:
        graph: the training step.
        budgets: in bytes.
        seconds: limit by the clock for one budget; the bound proven by then counts.
    """
    budgets = tuple(budgets)
    each = [_bounds_of(one, budgets, graph.time_s, seconds) for one in bounding_graphs(graph)]
    return tuple(min(overheads) for overheads in zip(*each, strict=True))


def _bounds_of(
    graph: Graph, budgets: tuple[int, ...], base_s: float, seconds: float | None
) -> tuple[float, ...]:
    """The bounds for a graph without switches, as ratios of `base_s`."""
    floor, bound = budget_floor(graph), CutBound(graph)
    return tuple(
        float("inf")
        if budget < floor.nbytes
        else (graph.time_s - base_s + bound.extra_s(budget, Deadline(seconds))) / base_s
        if base_s > 0
        else 0.0
        for budget in budgets
    )


def pareto(
    graph: Graph,
    budgets: Iterable[int] | None = None,
    *,
    solver: str = "auto",
    seconds: float | None = None,
    on_point: Callable[[BudgetPoint], None] = lambda _: None,
    **parameters: object,
) -> tuple[BudgetPoint, ...]:
    """The curve of overhead against budget.

    Args:
        graph: the training step.
        budgets: in bytes; None for nine from the smallest to the unplanned peak, the smallest found within
            one budget's limit.
        solver: name of the solver. One with a parameter ``starts`` begins each budget with the plan of the
            next smaller one, which fits.
        seconds: limit by the clock for one budget.
        on_point: called with each point when it is known.
        **parameters: of the solver.
    """
    points: list[BudgetPoint] = []
    known: Solution | None = None
    takes_starts = "starts" in solver_parameters(solver)
    for budget in sorted(budgets if budgets is not None else budgets_of(graph, seconds=seconds)):
        # A start of one combination of switches may be no valid order of another.
        warm = {"starts": (known.order,)} if takes_starts and known and not graph.switches else {}
        deadline = Deadline(seconds)
        chosen = get_solver(solver, **{**parameters, **warm})
        start = known.schedule if known else None
        solution = solve_switches(chosen, Problem(graph, budget), deadline, start=start)
        points.append(BudgetPoint(budget_nbytes=budget, solution=solution, wall_s=deadline.elapsed_s))
        on_point(points[-1])
        known = solution if solution.feasible else known
    return tuple(points)


@attrs.frozen(kw_only=True, eq=False)
class MaxBatch:
    """The largest batch that trains inside a budget with acceptable overhead.

    Attributes:
        batch: its size; 0 if not even one sample fits.
        solution: the plan for it, or None.
        refused: the smallest size that was tried and refused, or None.
    """

    batch: int
    solution: Solution | None
    refused: int | None


def max_batch(
    graph_of: Callable[[int], Graph],
    budget_nbytes: int,
    *,
    max_overhead: float = 1.0,
    first: int = 1,
    most: int = 1 << 20,
    solver: str = "auto",
    seconds: float | None = None,
    solve: Callable[[Solver, Problem, Deadline | None], Solution] = solve_switches,
    on_fit: Callable[[MaxBatch], None] = lambda _: None,
    **parameters: object,
) -> MaxBatch:
    """Find the largest batch by doubling and bisection over plans, as Checkmate's experiment does.

    With `auto`, the plan of the nearest size that fits is carried over to the next one where the step has the
    same structure, and the solver runs where that does not fit, and at the end for the largest.

    Args:
        graph_of: the training step for a batch size.
        budget_nbytes: bound on the peak.
        max_overhead: acceptable extra time, as a ratio of the unplanned step's time.
        first: the smallest sensible size, such as 2 for a batch norm.
        most: the largest size to try.
        solver: name of the solver.
        seconds: limit by the clock for one size.
        solve: runs the solver; `solve_present` plans for steps that find a ``.grad`` for every parameter.
        on_fit: called with the largest batch so far whenever a larger one fits.
        **parameters: of the solver.
    """
    fitting: list[tuple[Graph, Solution]] = []  # sizes that fit, the largest last

    def run(chosen: Solver, graph: Graph) -> Solution | None:
        made = solve(chosen, Problem(graph, budget_nbytes), Deadline(seconds))
        good = made.overhead is not None and made.overhead <= max_overhead + 1e-12
        return made if good else None

    def carried(graph: Graph) -> Solution | None:
        if solver != "auto" or not fitting or structure(graph) != structure(fitting[-1][0]):
            return None
        known = fitting[-1][1].schedule
        return None if known is None else run(Carried(schedule=known), graph)

    def fits(batch: int) -> bool:
        graph = graph_of(batch)
        made = carried(graph) or run(get_solver(solver, **parameters), graph)
        if made is None:
            return False
        fitting.append((graph, made))
        on_fit(MaxBatch(batch=batch, solution=made, refused=refused))
        return True

    best, batch = 0, first
    refused: int | None = None
    while refused is None and best < most:
        if fits(batch):
            best, batch = batch, min(2 * batch, most)
        else:
            refused = batch
    while refused is not None and refused - best > 1 and best:
        middle = (best + refused) // 2
        if fits(middle):
            best = middle
        else:
            refused = middle
    if not fitting:
        return MaxBatch(batch=0, solution=None, refused=refused)
    graph, found = fitting[-1]
    if found.stats.get("method") == Carried.name:
        problem = Problem(graph, budget_nbytes)
        searched = solve(get_solver(solver, **parameters), problem, Deadline(seconds))
        known_s = found.time_s or 0.0
        if searched.time_s is not None and searched.time_s <= known_s:
            found = searched
        else:  # a plan that was carried over proves no bound, and that of the search holds for it too
            found = attrs.evolve(found, lower_bound_s=min(searched.lower_bound_s, known_s))
    return MaxBatch(batch=best, solution=found, refused=refused)
