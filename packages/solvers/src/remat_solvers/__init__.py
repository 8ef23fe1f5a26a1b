"""Solvers that plan a training step inside a memory budget; one referee judges all results."""

from importlib import import_module
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
from remat_solvers.registry import (
    about_solver,
    check_solver_name,
    get_solver,
    solver_names,
    solver_parameters,
)
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
    from remat_solvers.switching import (
        are_loops_compiled,
        compile_first,
        compile_loops,
        solve_switches,
        solve_twice,
    )


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
    "check_solver_name",
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
    "solve_twice",
    "solver_names",
    "solver_parameters",
]


_MODULES = {
    "Carried": "carrying",
    "min_present_budget": "present_gradients",
    "solve_present": "present_gradients",
    "are_loops_compiled": "switching",
    "compile_first": "switching",
    "compile_loops": "switching",
    "solve_switches": "switching",
    "solve_twice": "switching",
}
_OTHERS = "queries"


def __getattr__(name: str) -> Any:
    """Load the module of a name, which needs numpy and the compiled parts, when the name is first used."""
    if name in __all__:
        module = import_module(f"{__name__}.{_MODULES.get(name, _OTHERS)}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
