"""Plan for a device that is not here, of which only the size is known."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from remat_executor import plan_graph
from remat_facade.entrypoints.inputs import device_of
from remat_facade.entrypoints.options import stages
from remat_facade.entrypoints.prepare import prepare
from remat_facade.planning.memory_fit import auto_budget
from remat_facade.planning.method import Method
from remat_facade.planning.planner import Progress
from remat_graph import Graph
from remat_graph.plan import Plan
from remat_graph.platforms.base import Platform


def plan_elsewhere(
    model: nn.Module,
    sample: Any,
    budget: int | str,
    *,
    device_nbytes: int,
    sample_kwargs: Mapping[str, Any] | None,
    method: Method,
    platform: Platform | None,
    on_progress: Progress,
    optimizer: str,
    zoo: bool,
) -> tuple[Graph, Plan]:
    """Capture, measure and plan here what will run there; arguments and errors as for `Rockmate`.

    Args:
        model: as for `Rockmate`, and so are the others.
        sample: see there.
        budget: ``"auto"`` is what that device has left once parameters, buffers, gradients and states are in.
        device_nbytes: what that device has; no budget may be above it, though this machine may have less.
        sample_kwargs: see there.
        method: who plans.
        platform: see there.
        on_progress: see there.
        optimizer: see there.
        zoo: see there.
    """
    args, kwargs, planner = prepare(
        model, sample, "100%", sample_kwargs, 0, method, platform, on_progress, optimizer=optimizer, zoo=zoo
    )
    if budget == "auto":
        free_nbytes = _free(model, device_nbytes)
        budget = auto_budget(model, optimizer, device_of(model), free=lambda _: free_nbytes)
    planner = attrs.evolve(planner, budget=budget, device_nbytes=device_nbytes, device="the device named")
    planner.check()
    graph = plan_graph(model, args, kwargs, platform=platform, on_progress=stages(on_progress))
    return graph, planner(graph)


def _free(model: nn.Module, device_nbytes: int) -> int:
    """What a device has beside the model."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    there = [*model.parameters(), *model.buffers(), *gradients]
    return max(0, device_nbytes - sum(t.numel() * t.element_size() for t in there))
