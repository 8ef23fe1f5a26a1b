"""The command `remat plan`: plan a model, and report whether it fits."""

from typing import TYPE_CHECKING, Annotated

import typer

from remat_facade.cli import options
from remat_facade.cli.terminal import complain, progress

if TYPE_CHECKING:
    from torch import nn

    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.target import Target
    from remat_facade.errors import NothingLeft
    from remat_facade.planning.memory_fit import Fit
    from remat_facade.planning.method import Method
    from remat_graph import Graph, Plan, Platform
    from remat_solvers import InfeasibleBudget

OWN_LOSS = (
    "with --input, a model that has no loss gets one here: for limit_memory(plan=FILE), plan MODULE:FACTORY, "
    "whose model and sample are yours"
)
"""The line below a saved plan of a model that is named."""

DOES_NOT_FIT = 1
"""The exit code if training does not fit."""


def plan(
    target: options.TargetArgument,
    budget: options.BudgetOrAutoOption,
    input: options.InputOption = None,
    batch: options.BatchOption = None,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
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
    method = choose_method(
        "auto", config, solver, seed, time_limit, ways, outputs=outputs, gradients=gradients
    )
    check_method(method, optimizer)
    named = Target.parse(target, input, batch)
    with CommandOutput(as_json=json) as output:
        graph, made, fit = _planned(named, budget, method, optimizer, device_nbytes, times, zoo, output)
        deliver(output, made, plan_out)
        output.facts |= {"fit": fit, "fits": fit.fits}
        output.show(fit_table(fit))
        output.save(graph_out, lambda path: save_graph(graph, path))
        if plan_out is not None and named.shape is not None:
            output.say(OWN_LOSS)
    if interrupted(made):
        raise EndedEarly
    if fit.fits is False:
        complain(f"training {fit.summary()}")
        raise typer.Exit(DOES_NOT_FIT)


def _planned(
    target: "Target",
    budget: str,
    method: "Method",
    optimizer: str,
    device_nbytes: int | None,
    platform: "Platform | None",
    zoo: bool,
    output: "CommandOutput",
) -> "tuple[Graph, Plan, Fit]":
    """Load and plan a target, as `plan_model` does; ends the command if ``--budget auto`` does not fit."""
    with progress(f"loading {target.name}") as update:
        from remat_facade.entrypoints.inputs import as_call
        from remat_facade.entrypoints.options import CostOptions, PlanOptions
        from remat_facade.entrypoints.prepare import plan_model
        from remat_facade.errors import NothingLeft
        from remat_solvers import InfeasibleBudget

        model, sample, sample_kwargs = target.load(meta=platform is not None)
        try:
            return plan_model(
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
        return attrs.evolve(error, advice="raise --device-memory, or name an --optimizer with smaller states")
    least = size_for(least_device_nbytes(model, optimizer, error.smallest_nbytes))
    device = f"give --device-memory {least}" if given else f"use a device with {least}"
    return attrs.evolve(error, smallest_percent=None, advice=f"{device} or more, or use a smaller batch")
