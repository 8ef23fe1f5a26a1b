"""Solvers that plan a training step inside a memory budget, one a file, all judged by one referee."""

from remat_solvers.errors import BadParameter, InfeasibleBudget, UnknownSolver
from remat_solvers.protocol import Deadline, Problem, Progress, Solution, Solver, Status, judge
from remat_solvers.registry import get_solver, solve, solver_names

__version__ = "0.1.0"

__all__ = [
    "BadParameter",
    "Deadline",
    "InfeasibleBudget",
    "Problem",
    "Progress",
    "Solution",
    "Solver",
    "Status",
    "UnknownSolver",
    "get_solver",
    "judge",
    "solve",
    "solver_names",
]
