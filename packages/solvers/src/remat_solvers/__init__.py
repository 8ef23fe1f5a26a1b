"""Solvers that plan a training step inside a memory budget; one referee judges all results."""

from typing import TYPE_CHECKING, Any

from remat_solvers.errors import BadParameter, InfeasibleBudget, SolverWarning, UnknownSolver
from remat_solvers.protocol import (
    Deadline,
    Problem,
    Progress,
    Solution,
    Solver,
    Status,
    judge,
    judge_schedule,
)
from remat_solvers.registry import get_solver, solver_names, solver_parameters
from remat_solvers.solve import solve

__version__ = "0.1.0"

if TYPE_CHECKING:
    from remat_solvers.queries import MinBudget, min_budget


def __getattr__(name: str) -> Any:
    """Load what needs the compiled parts when it is first asked for."""
    if name in ("MinBudget", "min_budget"):
        from remat_solvers import queries

        return getattr(queries, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BadParameter",
    "Deadline",
    "InfeasibleBudget",
    "MinBudget",
    "Problem",
    "Progress",
    "Solution",
    "Solver",
    "SolverWarning",
    "Status",
    "UnknownSolver",
    "get_solver",
    "judge",
    "judge_schedule",
    "min_budget",
    "solve",
    "solver_names",
    "solver_parameters",
]
