"""Solvers that plan a training step inside a memory budget; one referee judges all results."""

from typing import TYPE_CHECKING, Any

from remat_solvers.errors import (
    BadParameter,
    InfeasibleBudget,
    NoIdleInterval,
    SolverWarning,
    TableTooLarge,
    UnknownSolver,
)
from remat_solvers.protocol import (
    Deadline,
    Problem,
    Progress,
    Shortage,
    Solution,
    Solver,
    Status,
    judge,
    judge_schedule,
)
from remat_solvers.registry import about_solver, get_solver, solver_names, solver_parameters
from remat_solvers.solve import solve

__version__ = "0.1.0"

if TYPE_CHECKING:
    from remat_solvers.carrying import Carried
    from remat_solvers.present_gradients import min_present_budget, solve_present
    from remat_solvers.queries import (
        BudgetPoint,
        MaxBatch,
        MinBudget,
        bounds_of,
        budgets_of,
        infeasible,
        max_batch,
        min_budget,
        pareto,
    )
    from remat_solvers.switching import are_loops_compiled, compile_first, compile_loops, solve_switches


__all__ = [
    "BadParameter",
    "BudgetPoint",
    "Carried",
    "Deadline",
    "InfeasibleBudget",
    "MaxBatch",
    "MinBudget",
    "NoIdleInterval",
    "Problem",
    "Progress",
    "Shortage",
    "Solution",
    "Solver",
    "SolverWarning",
    "Status",
    "TableTooLarge",
    "UnknownSolver",
    "about_solver",
    "are_loops_compiled",
    "bounds_of",
    "budgets_of",
    "compile_first",
    "compile_loops",
    "get_solver",
    "infeasible",
    "judge",
    "judge_schedule",
    "max_batch",
    "min_budget",
    "min_present_budget",
    "pareto",
    "solve",
    "solve_present",
    "solve_switches",
    "solver_names",
    "solver_parameters",
]


def __getattr__(name: str) -> Any:
    """Load the queries, which need numpy and the compiled parts, when one is first used."""
    if name in __all__:
        from remat_solvers import carrying, present_gradients, queries, switching

        modules = (present_gradients, switching, queries, carrying)
        found = next(module for module in modules if hasattr(module, name))
        return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
