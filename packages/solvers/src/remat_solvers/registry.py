"""Solvers by name: the entry-point group ``remat.solvers``, so that any package can add one."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature

from remat_graph import Graph
from remat_solvers.errors import BadParameter, UnknownSolver
from remat_solvers.protocol import Deadline, Problem, Solution, Solver

GROUP = "remat.solvers"


@cache
def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def solver_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_registered()))


def solver_parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that a solver takes.

    Raises:
        UnknownSolver: no such name.
    """
    points = _registered()
    if name not in points:
        raise UnknownSolver(name=name, known=solver_names())
    return tuple(signature(points[name].load()).parameters)


def get_solver(name: str, **parameters: object) -> Solver:
    """Make a solver.

    Args:
        name: as registered.
        **parameters: the fields of the solver's class.

    Raises:
        UnknownSolver: no such name.
        BadParameter: the solver does not take a parameter, or not this value.
    """
    points = _registered()
    if name not in points:
        raise UnknownSolver(name=name, known=solver_names())
    factory = points[name].load()
    try:
        solver: Solver = factory(**parameters)
    except (TypeError, ValueError) as error:
        problem = str(error.args[0] if error.args else error)
        raise BadParameter(solver=name, problem=problem) from error
    return solver


def solve(
    graph: Graph,
    budget_nbytes: int,
    solver: str = "auto",
    deadline: Deadline | None = None,
    **parameters: object,
) -> Solution:
    """Find a schedule within a budget.

    Args:
        graph: the training step.
        budget_nbytes: bound on the referee's peak.
        solver: a registered name.
        deadline: limit by the clock; each solver also has its own limit of work.
        **parameters: of the solver.

    Raises:
        UnknownSolver: no such solver.
        BadParameter: it does not take such a parameter.
        InfeasibleBudget: no schedule was found; says the smallest budget that works.
    """
    solution = get_solver(solver, **parameters).solve(Problem(graph, budget_nbytes), deadline)
    if solution.feasible:
        return solution
    from remat_solvers.questions import infeasible

    raise infeasible(graph, budget_nbytes, deadline)
