"""Check a model and its options, and plan a training step."""

from os import PathLike

import attrs
import torch
from torch import nn

from remat_executor import BadInput, PlannedModule, estimated_graph, step_graph
from remat_executor.module.gradient_states import GradientsState
from remat_facade.entrypoints.inputs import Arguments, check_forward, check_model, device_of
from remat_facade.entrypoints.model_budget import check_model_budget
from remat_facade.entrypoints.options import CostOptions, PlanOptions, families_of
from remat_facade.errors import BadModel
from remat_facade.planning.memory_fit import Fit, auto_budget, budget_on, fit_of, total_nbytes
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.planner_wrappers import FixedPlanner
from remat_graph import Grads, Graph, Plan, Platform, load_plan
from remat_graph.errors import shown
from remat_graph.serialization.fields import AnyPath

META = torch.device("meta")

ESTIMATED_DEVICE = "cuda"
"""The kind of device of all platforms, for which the step of a model on the meta device is estimated."""


def is_estimated(model: nn.Module, platform: Platform | None) -> bool:
    """Whether the step of a model is estimated from shapes: the model has no values, and times are given."""
    return platform is not None and any(parameter.is_meta for parameter in model.parameters())


def prepare(
    model: nn.Module,
    arguments: Arguments,
    options: PlanOptions,
    method: Method,
    cost: CostOptions,
    *,
    carries_saved: bool = False,
) -> RecomputePlanner:
    """Make the planner of a model; every error that needs no capture is raised here.

    Args:
        model: the module.
        arguments: positional and keyword inputs of the call to plan.
        options: what the plan must satisfy.
        method: the solver.
        cost: where the costs of operators come from.
        carries_saved: as for `RecomputePlanner`.
    """
    if isinstance(model, PlannedModule):
        raise BadModel(problem="is planned already: give the original, which is its `module`")
    estimated = is_estimated(model, cost.platform)
    device = check_model(model, (), {}, META, filled=True) if estimated else check_model(model, *arguments)
    check_model_budget(options.budget)
    auto = options.budget == "auto"
    planner = RecomputePlanner(
        budget=auto_budget(model, options.optimizer, device) if auto else options.budget,
        method=method,
        reserve_nbytes=options.reserve_nbytes,
        device_nbytes=total_nbytes(device),
        device=str(device),
        platform=cost.source(device),
        on_progress=cost.report,
        live=cost.live,
        zoo=cost.zoo(device) if options.zoo and not estimated else None,
        carries_saved=carries_saved,
    )
    planner.check()
    return planner


def plan_model(
    model: nn.Module,
    arguments: Arguments,
    options: PlanOptions,
    method: Method,
    cost: CostOptions,
    *,
    device_nbytes: int | None,
) -> tuple[Graph, Plan, Fit]:
    """Capture, measure and plan without building a module, and add up the memory of training.

    Args:
        model: the module.
        arguments: positional and keyword inputs of the call to plan.
        options: what the plan must satisfy.
        method: the solver.
        cost: where the costs of operators come from.
        device_nbytes: memory of the device that will train; it limits the budget, and the budget ``"auto"``
            is what it has left. None for the device of the model.
    """
    if device_nbytes is None:
        planner = prepare(model, arguments, options, method, cost)
    else:
        planner = prepare(model, arguments, attrs.evolve(options, budget="100%"), method, cost)
        budget = options.budget
        check_model_budget(budget)
        if budget == "auto":
            budget = budget_on(model, options.optimizer, device_nbytes)
        planner = attrs.evolve(planner, budget=budget, device_nbytes=device_nbytes, device="the given device")
        planner.check()
    check_forward(model)
    args, kwargs = arguments
    if cost.platform is not None and is_estimated(model, cost.platform):
        cost.report("tracing")
        graph = estimated_graph(
            model,
            args,
            kwargs,
            cost.platform,
            device=ESTIMATED_DEVICE,
            ways=families_of(method.ways),
            outputs=method.outputs,
        )
    else:
        graph = step_graph(
            model,
            args,
            kwargs,
            platform=cost.platform,
            cache_dir=cost.folder,
            on_progress=cost.stages,
            ways=families_of(method.ways),
            outputs=method.outputs,
        )
    plan = planner.for_grads(method.grads)(graph)
    fit = fit_of(
        model, plan.budget_nbytes, options.optimizer, device=device_of(model), device_nbytes=device_nbytes
    )
    if is_estimated(model, cost.platform):
        fit = attrs.evolve(fit, device="the given device")
    return graph, plan, fit


def fixed_planner(plan: Plan | AnyPath, planner: RecomputePlanner, gradients: GradientsState) -> FixedPlanner:
    """A planner that returns a saved plan for its graph, and uses `planner` for other graphs.

    Raises:
        BadFile: the path holds no plan.
        BadInput: the plan is for another state of `.grad` than calls find.
    """
    found = saved_plan(plan)
    if (found.grads is Grads.PRESENT) != (gradients == "present"):
        state = "present" if found.grads is Grads.PRESENT else "new"
        raise BadInput(
            problem=f'the plan is for gradients="{state}", and calls are expected to find "{gradients}"',
            advice=f'give gradients="{state}", or another plan',
        )
    return FixedPlanner(found, planner) if found is plan else FixedPlanner(found, planner, source=str(plan))


def saved_plan(plan: Plan | AnyPath) -> Plan:
    """A saved plan, or the one at a path.

    Raises:
        BadFile: the path holds no plan.
        BadInput: it is neither a plan nor a path.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | PathLike):
        raise BadInput(
            problem=f"plan is {shown(plan)}, neither a plan nor a path",
            advice="give the path of a saved plan, or leave it out to plan",
        )
    return load_plan(plan)
