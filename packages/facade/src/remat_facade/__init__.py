"""Train any PyTorch model inside a memory budget given in bytes.

Names are loaded at first use, so `import remat_facade` is quick and planning a saved graph needs no torch.
The entry points raise the errors that are listed here; each is a subclass of `RematError`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat_executor import (
        BadInput,
        Buckets,
        CaptureError,
        RankFailed,
        RanksDiffer,
        RematWarning,
        StepOverBudget,
        UnplannedUse,
        UnsupportedTorch,
    )
    from remat_executor.errors import NothingToDifferentiate
    from remat_facade.config.types import Config, generate_config
    from remat_facade.config.yaml_io import load_config, save_config
    from remat_facade.entrypoints.factory import from_config
    from remat_facade.entrypoints.limit_memory import limit_memory, planned, release
    from remat_facade.entrypoints.offmate import Offmate
    from remat_facade.entrypoints.rockmate import (
        Hiremate,
        PureCheckmate,
        PureHiremate,
        PureRockmate,
        PureRotor,
        Rockmate,
    )
    from remat_facade.errors import (
        BadConfig,
        BadModel,
        BadOption,
        BadSample,
        BudgetAboveDevice,
        MethodNotAvailable,
        NoRoom,
        NotFound,
        NothingLeft,
        PlanningInterrupted,
        PlanNotKept,
        UnknownOptimizer,
    )
    from remat_graph import (
        BadBudget,
        BadFile,
        CannotWrite,
        ForeignPlan,
        OverBudget,
        RematError,
        load_plan,
        save_plan,
    )
    from remat_offload import (
        BadWeights,
        CannotPin,
        HostPoolExhausted,
        LaneFailed,
        MachineMisuse,
        OffloadMisuse,
        RefusedOptimizer,
    )
    from remat_solvers import BadParameter, InfeasibleBudget, SolverWarning, TableTooLarge, UnknownSolver

__version__ = "0.1.0"

__all__ = [
    "BadBudget",
    "BadConfig",
    "BadFile",
    "BadInput",
    "BadModel",
    "BadOption",
    "BadParameter",
    "BadSample",
    "BadWeights",
    "Buckets",
    "BudgetAboveDevice",
    "CannotPin",
    "CannotWrite",
    "CaptureError",
    "Config",
    "ForeignPlan",
    "Hiremate",
    "HostPoolExhausted",
    "InfeasibleBudget",
    "LaneFailed",
    "MachineMisuse",
    "MethodNotAvailable",
    "NoRoom",
    "NotFound",
    "NothingLeft",
    "NothingToDifferentiate",
    "OffloadMisuse",
    "Offmate",
    "OverBudget",
    "PlanNotKept",
    "PlanningInterrupted",
    "PureCheckmate",
    "PureHiremate",
    "PureRockmate",
    "PureRotor",
    "RankFailed",
    "RanksDiffer",
    "RefusedOptimizer",
    "RematError",
    "RematWarning",
    "Rockmate",
    "SolverWarning",
    "StepOverBudget",
    "TableTooLarge",
    "UnknownOptimizer",
    "UnknownSolver",
    "UnplannedUse",
    "UnsupportedTorch",
    "from_config",
    "generate_config",
    "limit_memory",
    "load_config",
    "load_plan",
    "planned",
    "release",
    "save_config",
    "save_plan",
]

_MODULES = {
    "Buckets": "remat_executor",
    "Config": "remat_facade.config.types",
    "Offmate": "remat_facade.entrypoints.offmate",
    "from_config": "remat_facade.entrypoints.factory",
    "generate_config": "remat_facade.config.types",
    "limit_memory": "remat_facade.entrypoints.limit_memory",
    "load_config": "remat_facade.config.yaml_io",
    "planned": "remat_facade.entrypoints.limit_memory",
    "release": "remat_facade.entrypoints.limit_memory",
    "save_config": "remat_facade.config.yaml_io",
}
# Names outside of `_MODULES`, searched in this order: the modules that import torch come last.
_OTHERS = (
    "remat_facade.errors",
    "remat_graph",
    "remat_solvers.errors",
    "remat_executor.errors",
    "remat_facade.entrypoints.rockmate",
    "remat_offload.errors",
)


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name in __all__:
        for module in (_MODULES[name],) if name in _MODULES else _OTHERS:
            if hasattr(import_module(module), name):
                return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
