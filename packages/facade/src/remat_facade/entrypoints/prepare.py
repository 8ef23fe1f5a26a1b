"""Check what a user gives, and plan it."""

from torch import nn

from remat_executor import PlannedModule, step_graph
from remat_facade.entrypoints.inputs import Arguments, check_model
from remat_facade.entrypoints.options import AnyPath, CallOptions, CostOptions, PlanOptions
from remat_facade.errors import BadModel
from remat_facade.planning.memory_fit import auto_budget, total_nbytes
from remat_facade.planning.method import Method
from remat_facade.planning.planner import Planner
from remat_facade.planning.planner_wrappers import FixedPlanner
from remat_graph import Graph, Plan, load_plan


def plan_model(
    model: nn.Module, call: CallOptions, options: PlanOptions, method: Method, cost: CostOptions
) -> tuple[Graph, Plan]:
    """Capture, measure and plan without building a module; options and errors as for `Rockmate`.

    Args:
        model: the module.
        call: which call of it.
        options: what the plan keeps to.
        method: the solver.
        cost: where the costs of operators come from.
    """
    arguments, planner = prepare(model, call, options, method, cost)
    graph = captured(model, arguments, cost)
    return graph, planner(graph)


def prepare(
    model: nn.Module, call: CallOptions, options: PlanOptions, method: Method, cost: CostOptions
) -> tuple[Arguments, Planner]:
    """Check everything that can be checked before any work.

    Returns:
        The call's positional and keyword arguments, and the planner.
    """
    if isinstance(model, PlannedModule):
        raise BadModel(problem="is planned already: give the original, which is its `module`")
    args, kwargs = call.arguments()
    device = check_model(model, args, kwargs)
    auto = options.budget == "auto"
    planner = Planner(
        budget=auto_budget(model, options.optimizer, device) if auto else options.budget,
        method=method,
        reserve_nbytes=options.reserve_nbytes,
        device_nbytes=total_nbytes(device),
        device=str(device),
        platform=cost.source(device),
        on_progress=cost.report,
        zoo=cost.zoo(device) if options.zoo else None,
    )
    planner.check()
    return (args, kwargs), planner


def captured(model: nn.Module, arguments: Arguments, cost: CostOptions) -> Graph:
    """The graph of a model's training step, with its costs.

    Args:
        model: the module.
        arguments: positional and keyword inputs of the call.
        cost: where the costs come from.
    """
    args, kwargs = arguments
    return step_graph(
        model, args, kwargs, platform=cost.platform, cache_dir=cost.folder, on_progress=cost.stages
    )


def fixed_planner(plan: Plan | AnyPath, planner: Planner) -> FixedPlanner:
    """A planner that uses a saved plan, or the plan of a path, and plans what that is not for by another.

    Raises:
        BadFile: the path holds no plan.
    """
    if isinstance(plan, Plan):
        return FixedPlanner(plan, planner)
    return FixedPlanner(load_plan(plan), planner, source=str(plan))
