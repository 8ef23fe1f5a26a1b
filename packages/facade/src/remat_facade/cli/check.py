"""The command `remat check`: a planned step against the original one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat_facade.cli import options
from remat_facade.cli.terminal import complain, progress

if TYPE_CHECKING:
    from remat_facade.cli.target import Target
    from remat_facade.planning.method import Method
    from remat_facade.planning.planner import Progress
    from remat_facade.report.step_check import StepCheck


def check(
    target: options.TargetArgument,
    budget: options.BudgetOption = "40%",
    input: options.InputOption = None,
    batch: options.BatchOption = None,
    dtype: options.DtypeOption = None,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run this saved plan, instead of planning.",
            callback=options.saved_plan,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Timed steps of each side.")] = 5,
    json: options.JsonOption = False,
) -> None:
    """Run a step with and without a plan, and compare."""
    import attrs

    from remat_facade.cli.checks import check_budget, check_method
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.target import Target
    from remat_facade.planning.method import choose_method
    from remat_graph import load_plan
    from remat_graph.serialization.pipes import is_pipe
    from remat_solvers.facts import plan_facts

    check_budget(budget)
    method = choose_method(
        "auto", config, solver, seed, time_limit, ways, outputs=outputs, gradients=gradients
    )
    if plan is not None and not is_pipe(plan):  # a pipe can be read once
        load_plan(plan)
    named = Target.parse(target, input, batch, dtype)
    check_method(method)
    with CommandOutput(as_json=json) as output:
        with progress(f"loading {target}") as update:
            chosen: dict[str, Any] = {
                "config": config,
                "solver": solver,
                "seed": seed,
                "time_limit_s": time_limit,
            }
            chosen |= {"ways": ways, "outputs": outputs, "gradients": gradients, "plan": plan}
            found = _checked(named, budget, method, chosen, steps, update)
        facts = attrs.asdict(found, recurse=False) | {"plan": plan_facts(found.plan)}
        output.facts |= facts | {"holds": not found.problems, "problems": found.problems}
        output.show(found.table)
    for problem in found.problems:
        complain(problem)
    if found.problems:
        raise typer.Exit(1)


def _checked(
    target: "Target", budget: str, method: "Method", chosen: dict[str, Any], steps: int, update: "Progress"
) -> "StepCheck":
    """Plan a copy of the model, with options of `Hiremate`, and compare."""
    import copy

    from remat_facade.cli.target import guarded
    from remat_facade.entrypoints.inputs import as_call
    from remat_facade.entrypoints.rockmate import Hiremate
    from remat_facade.report.step_check import check_step

    model, sample, sample_kwargs = target.load()
    args, kwargs = as_call(sample, sample_kwargs)
    same = guarded(target.name, "copying the model", lambda: copy.deepcopy(model))
    planned = Hiremate(same, args, budget, sample_kwargs=kwargs, on_progress=update, **chosen)
    return check_step(
        model,
        planned,
        args,
        kwargs,
        dropped=method.outputs == "dropped",
        present=method.gradients == "present",
        steps=steps,
        on_progress=update,
    )
