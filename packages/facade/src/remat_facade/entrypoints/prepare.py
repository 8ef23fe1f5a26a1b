"""Check what a user gives, and plan it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from remat_executor import PlannedModule, plan_graph
from remat_facade.entrypoints.inputs import as_call, check_model
from remat_facade.entrypoints.options import AnyPath, folder, stages, zoo_of
from remat_facade.errors import BadModel
from remat_facade.planning.memory_fit import Optimizer, auto_budget, total_nbytes
from remat_facade.planning.method import Method
from remat_facade.planning.planner import Planner, Progress, SavedPlan, silent
from remat_graph import Graph
from remat_graph.plan import Plan
from remat_graph.platforms.base import Platform
from remat_graph.serialization.plans import load_plan


def plan_model(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    reserve_nbytes: int = 0,
    method: Method | None = None,
    platform: Platform | None = None,
    cache_dir: AnyPath | None = None,
    on_progress: Progress | None = None,
    optimizer: Optimizer = "adamw",
    zoo: bool = True,
) -> tuple[Graph, Plan]:
    """Capture, measure and plan without building a module; arguments and errors as for `Rockmate`."""
    args, kwargs, planner = prepare(
        model,
        sample,
        budget,
        sample_kwargs,
        reserve_nbytes,
        method or Method(),
        platform,
        on_progress,
        optimizer=optimizer,
        cache_dir=cache_dir,
        zoo=zoo,
    )
    graph = plan_graph(
        model, args, kwargs, platform=platform, cache_dir=folder(cache_dir), on_progress=stages(on_progress)
    )
    return graph, planner(graph)


def prepare(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    sample_kwargs: Mapping[str, Any] | None,
    reserve_nbytes: int,
    method: Method,
    platform: Platform | None,
    on_progress: Progress | None,
    *,
    optimizer: Optimizer = "adamw",
    cache_dir: AnyPath | None = None,
    zoo: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any], Planner]:
    """Check everything that can be checked before any work; the call's arguments and the planner."""
    if isinstance(model, PlannedModule):
        raise BadModel(problem="is planned already: give the original, which is its `module`")
    args, kwargs = as_call(sample, sample_kwargs)
    device = check_model(model, args, kwargs)
    if budget == "auto":
        budget = auto_budget(model, optimizer, device)
    planner = Planner(
        budget=budget,
        method=method,
        reserve_nbytes=reserve_nbytes,
        device_nbytes=total_nbytes(device),
        device=str(device),
        platform=platform.name if platform is not None else f"{device.type}, measured",
        on_progress=on_progress or silent,
        zoo=zoo_of(folder(cache_dir), device, platform) if zoo else None,
    )
    planner.check()
    return args, kwargs, planner


def saved_plan(plan: Plan | AnyPath, planner: Planner) -> SavedPlan:
    """A planner that uses a saved plan, or the plan of a path, and plans what that is not for by another.

    Raises:
        BadFile: the path holds no plan.
    """
    if isinstance(plan, Plan):
        return SavedPlan(plan, planner)
    return SavedPlan(load_plan(plan), planner, source=str(plan))
