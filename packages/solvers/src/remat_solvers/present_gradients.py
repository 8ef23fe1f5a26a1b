"""Plan a step that finds a `.grad` for every parameter: a gradient is added to it and freed when delivered.

In a plan for the first step (`Grads.NEW`) each gradient stays to the end. Here (`Grads.PRESENT`) solvers get
a graph in which the gradients of parameters are activations that nothing reads, so these are freed where
they are made. Their schedule becomes one of the graph itself by a `Deliver` in the place of each `Free`.

A gradient is delivered after the last use of its parameter, which a hook may change then. So ops of the
backward that use the parameter, and come before its gradient in the trace, are made to run before. Solvers do
not know the rule for other uses, such as repeats of the forward: where the referee finds a schedule above the
budget for that, the solver runs again with less. Other schedules may make the gradient first and hold it, so
bounds are those of the graph without this order (`freed_gradients`).
"""

from collections.abc import Callable

import attrs

from remat_graph import Compute, Deliver, Free, Grads, Graph, Role, Schedule, Step, simulate
from remat_graph.training import ordered
from remat_solvers.bounds.decisions import decided_bound_s, lowest_floor
from remat_solvers.protocol import Deadline, Problem, Solution, Solver, Status
from remat_solvers.queries import MinBudget, min_budget
from remat_solvers.switching import smallest_peak, solve_twice

MOST_ATTEMPTS = 4


def freed_gradients(graph: Graph) -> Graph:
    """The graph for bounds: gradients of parameters are activations, which no schedule holds for longer."""
    values = list(graph.values)
    for gradient in _added(graph):
        values[gradient] = attrs.evolve(values[gradient], role=Role.ACTIVATION)
    return attrs.evolve(graph, values=tuple(values))


def freed_when_made(graph: Graph) -> Graph:
    """The graph for solvers: the same, with the uses of a parameter in the backward before its gradient.

    New values have the last indices.
    """
    users: dict[int | None, set[int]] = {}
    for i, op in enumerate(graph.ops):
        for value in op.first.inputs if op.backward else ():
            users.setdefault(value, set()).add(i)
    pairs = [
        (user, maker)
        for gradient in _added(graph)
        if (maker := graph.producer[gradient]) is not None
        for user in sorted(users.get(graph.values[gradient].of, ()))
        if user < maker
    ]
    return ordered(freed_gradients(graph), pairs)


def with_deliveries(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule of `freed_when_made(graph)` as one of the graph."""
    added = set(_added(graph))
    owner = {graph.values[gradient].of: gradient for gradient in added}
    delivered: dict[int, int] = {}  # per gradient the step after which it is delivered
    for place, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            run = graph.ops[step.op].implementations[step.implementation]
            delivered.update(dict.fromkeys(added.intersection((*run.inputs, *run.outputs)), place))
            # A use of the parameter before its gradient is made is followed by the place of that.
            delivered.update((owner[value], place) for value in run.inputs if value in owner)
    after: dict[int, list[Step]] = {}
    for gradient, place in sorted(delivered.items()):
        after.setdefault(place, []).append(Deliver(gradient))
    steps: list[Step] = []
    waiting: list[Step] = []
    boundary: int | None = None
    for place, step in enumerate(schedule.steps):
        if not isinstance(step, Free):  # what is freed directly after an op may be overwritten by it
            steps += waiting
            waiting = []
        if place == schedule.boundary:
            boundary = len(steps)
        if not (isinstance(step, Free) and (step.value in added or step.value >= len(graph.values))):
            steps.append(step)
        waiting += after.get(place, [])
    steps += waiting
    return Schedule(steps, len(steps) if boundary is None else boundary)


def solve_present(
    solver: Solver,
    problem: Problem,
    deadline: Deadline | None = None,
    *,
    solve: Callable[[Solver, Problem, Deadline | None], Solution] = solve_twice,
) -> Solution:
    """Solve a problem for steps that find a `.grad` for every parameter; its graph may have switches.

    `solve` runs the solver, for these steps and for those that find none.
    """
    graph, budget_nbytes = problem.graph, problem.budget_nbytes
    deadline = deadline or Deadline()
    view, limit_nbytes = freed_when_made(graph), budget_nbytes
    first: Solution | None = None
    for _ in range(MOST_ATTEMPTS):
        part = attrs.evolve(problem, graph=view, budget_nbytes=limit_nbytes)
        solution = solve(solver, part, deadline)
        first = first or solution
        if solution.schedule is None:
            break
        schedule = with_deliveries(graph, solution.schedule)
        peak_nbytes = simulate(graph, schedule, grads=Grads.PRESENT).peak_nbytes
        if peak_nbytes <= budget_nbytes:
            found = attrs.evolve(solution, schedule=schedule, peak_nbytes=peak_nbytes)
            return _bounded(found, first, problem, deadline)
        seen_nbytes = min(limit_nbytes, simulate(view, solution.schedule).peak_nbytes)
        limit_nbytes = max(0, seen_nbytes - (peak_nbytes - budget_nbytes))
    assert first is not None
    if first.status is Status.INFEASIBLE:
        proven = _bounded(first, first, problem, deadline)
        if proven.status is Status.INFEASIBLE:
            return proven
    # A plan that holds new gradients to the end is a plan for this state too.
    return _bounded(solve(solver, problem, deadline), first, problem, deadline)


def _bounded(solution: Solution, first: Solution, problem: Problem, deadline: Deadline) -> Solution:
    """A solution with a bound on all schedules, and the status that follows from it.

    Args:
        solution: whose schedule counts.
        first: of `freed_when_made` within the budget; its bound holds if that adds no order.
        problem: with the graph itself.
        deadline: limit by the clock.
    """
    graph = problem.graph
    time_s = float("inf") if solution.schedule is None or solution.time_s is None else solution.time_s
    lower_s = first.lower_bound_s
    if len(freed_when_made(graph).values) > len(graph.values):
        free = freed_gradients(graph)
        lower_s = decided_bound_s(free, problem.budget_nbytes, deadline, enough_s=time_s)
    lower_s = min(lower_s, time_s)
    if solution.schedule is not None:
        status = Status.OPTIMAL if time_s <= lower_s * (1 + 1e-12) else Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if lower_s == float("inf") else Status.NOT_FOUND
    return attrs.evolve(solution, status=status, lower_bound_s=lower_s)


def min_present_budget(graph: Graph, deadline: Deadline | None = None) -> MinBudget:
    """`min_budget` for steps that find a `.grad` for every parameter."""
    found = min_budget(freed_when_made(graph), deadline, bounding=freed_gradients(graph))
    schedule = with_deliveries(graph, found.schedule)
    nbytes = simulate(graph, schedule, grads=Grads.PRESENT).peak_nbytes
    floor_nbytes = lowest_floor(graph)[0].nbytes
    if floor_nbytes < nbytes:
        safe = smallest_peak(graph, floor_nbytes, deadline or Deadline())
        safe_nbytes = simulate(graph, safe, grads=Grads.PRESENT).peak_nbytes
        schedule, nbytes = min((schedule, nbytes), (safe, safe_nbytes), key=lambda one: one[1])
    return attrs.evolve(found, schedule=schedule, nbytes=nbytes)


def _added(graph: Graph) -> list[int]:
    """The gradients that are added to the `.grad` of a parameter."""
    return [
        gradient
        for gradient in graph.gradients
        if (owner := graph.values[gradient].of) is not None and graph.values[owner].role is Role.PARAM
    ]
