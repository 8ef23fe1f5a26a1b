"""Plan for a device that is not here, of which only the size is known."""

import attrs
from torch import nn

from remat_facade.entrypoints.inputs import device_of
from remat_facade.entrypoints.options import CallOptions, CostOptions, PlanOptions
from remat_facade.entrypoints.prepare import captured, prepare
from remat_facade.planning.memory_fit import auto_budget
from remat_facade.planning.method import Method
from remat_graph import Graph, Plan


def plan_elsewhere(
    model: nn.Module,
    call: CallOptions,
    options: PlanOptions,
    method: Method,
    cost: CostOptions,
    *,
    device_nbytes: int,
) -> tuple[Graph, Plan]:
    """Capture, measure and plan here what will run there; options and errors as for `Rockmate`.

    Args:
        model: the module.
        call: which call of it.
        options: what the plan keeps to; the budget ``"auto"`` is what that device has left once parameters,
            buffers, gradients and states are in.
        method: the solver.
        cost: where the costs of operators come from.
        device_nbytes: what that device has; no budget may be above it, though this machine may have less.
    """
    arguments, planner = prepare(model, call, attrs.evolve(options, budget="100%"), method, cost)
    budget = options.budget
    if budget == "auto":
        free_nbytes = _free(model, device_nbytes)
        budget = auto_budget(model, options.optimizer, device_of(model), free=lambda _: free_nbytes)
    planner = attrs.evolve(planner, budget=budget, device_nbytes=device_nbytes, device="the device named")
    planner.check()
    graph = captured(model, arguments, cost)
    return graph, planner(graph)


def _free(model: nn.Module, device_nbytes: int) -> int:
    """What a device has beside the model."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    there = [*model.parameters(), *model.buffers(), *gradients]
    return max(0, device_nbytes - sum(t.numel() * t.element_size() for t in there))
