"""The command `remat plan`: plan a model, and report whether it fits."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat_facade.cli import options
from remat_facade.cli.terminal import complain, progress

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from remat_facade.cli.named_model import Call as Loaded
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.target import Target
    from remat_facade.errors import NothingLeft
    from remat_facade.planning.memory_fit import Fit
    from remat_facade.planning.method import Method
    from remat_graph import Graph, Plan, Platform
    from remat_solvers import InfeasibleBudget

OWN_LOSS = (
    "this model got a loss that it has only here: for limit_memory(plan=FILE), plan MODULE:FACTORY, whose "
    "model and sample are yours"
)
"""The line below a saved plan whose loss is not a function of an output and a target."""

SMALLER = "raise --device-memory, or name an --optimizer with smaller states"
"""What to do where nothing of the given device is left."""

DOES_NOT_FIT = 1
"""The exit code if training does not fit."""


def plan(
    target: options.TargetArgument,
    budget: options.BudgetOrAutoOption,
    input: options.InputOption = None,
    batch: options.BatchOption = None,
    dtype: options.DtypeOption = None,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    prove: options.ProveOption = None,
    optimizer: options.OptimizerOption = "adamw",
    device_memory: options.DeviceMemoryOption = None,
    platform: options.PlatformOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
    zoo: Annotated[bool, typer.Option(help="Load a saved plan if one matches, and save new plans.")] = True,
    plan_out: options.PlanOutOption = None,
    graph_out: options.GraphOutOption = None,
    json: options.JsonOption = False,
) -> None:
    """Plan your model, and report whether it fits."""
    from remat_facade.cli.checks import check_device, check_method
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.results import deliver
    from remat_facade.cli.searches import EndedEarly
    from remat_facade.cli.target import Target
    from remat_facade.entrypoints.model_budget import check_model_budget, size_of
    from remat_facade.planning.method import choose_method
    from remat_facade.report.table import fit_table
    from remat_graph import find_platform, save_graph
    from remat_graph.serialization.outputs import check_paths
    from remat_solvers.running.stopping import interrupted

    check_model_budget(budget)
    check_paths(
        {"--plan-out": plan_out, "--graph-out": graph_out},
        {"MODULE:FACTORY": target.rpartition(":")[0], "--config": config, "--platform": platform},
    )
    device_nbytes = None if device_memory is None else size_of(device_memory, "--device-memory")
    times = None if platform is None else find_platform(platform)
    check_device(budget, device_nbytes, estimated=times is not None and input is not None)
    chosen: dict[str, Any] = {"outputs": outputs, "gradients": gradients, "prove_s": prove}
    method = choose_method("auto", config, solver, seed, time_limit, ways, **chosen)
    named = Target.parse(target, input, batch, dtype)
    check_method(method, optimizer)
    with CommandOutput(as_json=json) as output:
        loaded, graph, made, fit = _plan(named, budget, method, optimizer, device_nbytes, times, zoo, output)
        deliver(output, made, plan_out)
        output.facts |= {"fit": fit, "fits": fit.fits}
        output.show(fit_table(fit))
        output.save(graph_out, lambda path: save_graph(graph, path))
        if plan_out is not None and named.shape is not None:
            output.facts["load"] = _how_to_load(loaded, budget, method, plan_out, times)
            output.say(output.facts["load"])
    if interrupted(made):
        raise EndedEarly
    if fit.fits is False:
        complain(f"training {fit.summary()}")
        raise typer.Exit(DOES_NOT_FIT)


def _plan(
    target: "Target",
    budget: str,
    method: "Method",
    optimizer: str,
    device_nbytes: int | None,
    platform: "Platform | None",
    zoo: bool,
    output: "CommandOutput",
) -> "tuple[Loaded, Graph, Plan, Fit]":
    """Load and plan a target, as `plan_model` does; ends the command if ``--budget auto`` does not fit."""
    with progress(f"loading {target.name}") as update:
        from remat_facade.entrypoints.inputs import as_call
        from remat_facade.entrypoints.options import CostOptions, PlanOptions
        from remat_facade.entrypoints.prepare import plan_model
        from remat_facade.errors import NothingLeft
        from remat_solvers import InfeasibleBudget

        loaded = model, sample, sample_kwargs = target.load(meta=platform is not None)
        try:
            return loaded, *plan_model(
                model,
                as_call(sample, sample_kwargs),
                PlanOptions(budget=budget, optimizer=optimizer, zoo=zoo),
                method,
                CostOptions(platform=platform, on_progress=update, live=True),
                device_nbytes=device_nbytes,
            )
        except (NothingLeft, InfeasibleBudget) as error:
            if budget != "auto":
                raise
            given = device_nbytes is not None
            problem = f"training does not fit: {_advised(error, model, optimizer, given=given)}"
    output.facts["fits"] = False
    complain(problem)
    raise typer.Exit(DOES_NOT_FIT)


def _how_to_load(
    loaded: "Loaded", budget: str, method: "Method", path: "Path", platform: "Platform | None"
) -> str:
    """The line below a saved plan of a model that is named, whose loss and inputs the user has not seen.

    Args:
        loaded: the model and what it is called with.
        budget: of the plan.
        method: by which it was made.
        path: of the plan.
        platform: for which a graph is that of a GPU; None for this machine.
    """
    from remat_facade.cli.named_model import WithLoss

    model, args, kwargs = loaded
    if isinstance(model, WithLoss) and model.loss is None:
        return OWN_LOSS
    usual = {"ways": "exact", "outputs": "kept", "gradients": "auto"}
    chosen = {name: getattr(method, name) for name in usual}
    options = [f"loss={model.loss}"] if isinstance(model, WithLoss) else []
    options += [f'{name}="{value}"' for name, value in chosen.items() if value not in (usual[name], "new")]
    limit = ", ".join(["limit_memory(model", f'"{budget}"', *options, f'plan="{path}")'])
    called = ", ".join(["x"] * len(args) + [f"{name}=..." for name in kwargs])
    shapes = ", ".join(f"{list(each.shape)}" for each in (*args, *kwargs.values()))
    where = " on a GPU" if platform is not None else ""
    return f"load it{where} with {limit}; then call model({called}), with tensors of shape {shapes}"


def _advised(
    error: "NothingLeft | InfeasibleBudget", model: "nn.Module", optimizer: str, *, given: bool
) -> "NothingLeft | InfeasibleBudget":
    """The error of ``--budget auto`` with advice on the device, since no budget is given that can be raised.

    Args:
        error: why training does not fit.
        model: the model.
        optimizer: its name.
        given: whether ``--device-memory`` is given.
    """
    import attrs

    from remat_facade.cli.checks import size_for
    from remat_facade.errors import NothingLeft
    from remat_facade.planning.memory_fit import least_device_nbytes

    if isinstance(error, NothingLeft):
        if not given:
            return error
        return attrs.evolve(error, advice=SMALLER)
    least = size_for(least_device_nbytes(model, optimizer, error.smallest_nbytes))
    device = f"give --device-memory {least}" if given else f"use a device with {least}"
    return attrs.evolve(error, smallest_percent=None, advice=f"{device} or more, or use a smaller batch")
