"""Solve a problem by the name of a solver."""

from remat_graph import Graph
from remat_solvers.protocol import Deadline, Problem, Solution
from remat_solvers.registry import get_solver


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
        deadline: limit by the clock; each solver also has its own work limit.
        **parameters: of the solver.

    Raises:
        UnknownSolver: no such solver.
        BadParameter: the solver does not accept a parameter.
        InfeasibleBudget: no schedule was found; names the smallest budget that works.
    """
    from remat_solvers.queries import infeasible
    from remat_solvers.switching import solve_twice

    solution = solve_twice(get_solver(solver, **parameters), Problem(graph, budget_nbytes), deadline)
    if solution.feasible:
        return solution
    raise infeasible(graph, budget_nbytes, deadline)
