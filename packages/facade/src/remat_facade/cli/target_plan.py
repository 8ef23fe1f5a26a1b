"""Plan the model that ``MODULE:FACTORY`` returns."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat_facade.planning.memory_fit import Fit
    from remat_facade.planning.method import Method
    from remat_facade.planning.planner import Progress
    from remat_graph import Graph, Plan, Platform


def plan_and_fit(
    loaded: tuple[Any, Any, Any],
    budget: str,
    method: "Method",
    optimizer: str,
    *,
    device_nbytes: int | None,
    platform: "Platform | None",
    zoo: bool,
    tell: "Progress",
) -> tuple["Graph", "Plan", "Fit"]:
    """Plan a model for this device, or for another one, and add up what training holds.

    Args:
        loaded: model, sample, and keyword inputs or None.
        budget: of its step.
        method: the solver.
        optimizer: whose states count, by name.
        device_nbytes: the size of the other device; None for this one.
        platform: gives the costs; None to measure them.
        zoo: whether saved plans are used and kept.
        tell: is called with a few words when something begins.

    Returns:
        The graph, its plan and what training holds.
    """
    from remat_facade.entrypoints.inputs import device_of
    from remat_facade.entrypoints.options import CallOptions, CostOptions, PlanOptions
    from remat_facade.entrypoints.other_device import plan_elsewhere
    from remat_facade.entrypoints.prepare import plan_model
    from remat_facade.planning.memory_fit import fit_of

    model, sample, sample_kwargs = loaded
    plan_it = plan_model if device_nbytes is None else partial(plan_elsewhere, device_nbytes=device_nbytes)
    graph, made = plan_it(
        model,
        CallOptions(sample=sample, sample_kwargs=sample_kwargs),
        PlanOptions(budget=budget, optimizer=optimizer, zoo=zoo),
        method,
        CostOptions(platform=platform, on_progress=tell),
    )
    nbytes = made.budget_nbytes
    return graph, made, fit_of(model, nbytes, optimizer, device=device_of(model), device_nbytes=device_nbytes)
