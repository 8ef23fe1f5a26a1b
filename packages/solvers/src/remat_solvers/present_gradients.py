"""Plan a step that finds a `.grad` for every parameter: a gradient is added to it and freed when delivered.

In a plan for the first step (`Grads.NEW`) each gradient stays to the end. Here (`Grads.PRESENT`) solvers get
a graph in which the gradients of parameters are activations that nothing reads, so these are freed where
they are made. Their schedule becomes one of the graph itself by a `Deliver` in the place of each `Free`.

A gradient is delivered after the last use of its parameter, which a hook may change then. So ops of the
backward that use the parameter, and come before its gradient in the trace, are made to run before. Solvers do
not know the rule for other uses, such as repeats of the forward: where the referee finds a schedule above the
budget for that, the solver runs again with less.
"""

import attrs

from remat_graph import Compute, Deliver, Free, Grads, Graph, Role, Schedule, Step, simulate
from remat_graph.training import ordered
from remat_solvers.bounds import budget_floor
from remat_solvers.bounds.decisions import bounding_graphs
from remat_solvers.protocol import Deadline, Problem, Solution, Solver, Status
from remat_solvers.queries import MinBudget, min_budget
from remat_solvers.switching import solve_switches

MOST_ATTEMPTS = 4


def freed_when_made(graph: Graph) -> Graph:
    """The graph for solvers: gradients of parameters are activations. New values have the last indices."""
    added = _added(graph)
    values = list(graph.values)
    for gradient in added:
        values[gradient] = attrs.evolve(values[gradient], role=Role.ACTIVATION)
    users: dict[int | None, set[int]] = {}
    for i, op in enumerate(graph.ops):
        for value in op.first.inputs if op.backward else ():
            users.setdefault(value, set()).add(i)
    pairs = [
        (user, maker)
        for gradient in added
        if (maker := graph.producer[gradient]) is not None
        for user in sorted(users.get(graph.values[gradient].of, ()))
        if user < maker
    ]
    return ordered(attrs.evolve(graph, values=tuple(values)), pairs)


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


def solve_present(solver: Solver, problem: Problem, deadline: Deadline | None = None) -> Solution:
    """Solve a problem for steps that find a `.grad` for every parameter; its graph may have switches."""
    graph, budget_nbytes = problem.graph, problem.budget_nbytes
    deadline = deadline or Deadline()
    view, limit_nbytes = freed_when_made(graph), budget_nbytes
    lower_s = 0.0
    for attempt in range(MOST_ATTEMPTS):
        part = attrs.evolve(problem, graph=view, budget_nbytes=limit_nbytes)
        solution = solve_switches(solver, part, deadline)
        lower_s = lower_s if attempt else solution.lower_bound_s
        if solution.schedule is None:
            break
        schedule = with_deliveries(graph, solution.schedule)
        peak_nbytes = simulate(graph, schedule, grads=Grads.PRESENT).peak_nbytes
        if peak_nbytes <= budget_nbytes:
            status = Status.FEASIBLE if attempt else solution.status
            return attrs.evolve(
                solution, schedule=schedule, status=status, lower_bound_s=lower_s, peak_nbytes=peak_nbytes
            )
        seen_nbytes = min(limit_nbytes, simulate(view, solution.schedule).peak_nbytes)
        limit_nbytes = max(0, seen_nbytes - (peak_nbytes - budget_nbytes))
    if solution.status is Status.INFEASIBLE and limit_nbytes == budget_nbytes:
        return solution
    # A plan that holds new gradients to the end is a plan for this state too.
    safe = solve_switches(solver, problem, deadline)
    status = Status.NOT_FOUND if safe.schedule is None else Status.FEASIBLE
    return attrs.evolve(safe, status=status, lower_bound_s=lower_s)


def min_present_budget(graph: Graph, deadline: Deadline | None = None) -> MinBudget:
    """`min_budget` for steps that find a `.grad` for every parameter."""
    found = min_budget(freed_when_made(graph), deadline)
    schedule = with_deliveries(graph, found.schedule)
    nbytes = simulate(graph, schedule, grads=Grads.PRESENT).peak_nbytes
    if min(budget_floor(each).nbytes for each in bounding_graphs(graph)) < nbytes:
        safe = min_budget(graph, deadline).schedule
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
