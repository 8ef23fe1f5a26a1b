"""The command `remat doctor`: where planning time goes, and what binds memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from remat_facade.cli import options
from remat_facade.cli.terminal import progress, say, show
from remat_facade.planning.method import Method, choose_method
from remat_facade.planning.planner import Progress
from remat_graph import Budget, Graph, Platform, find_platform, load_graph

if TYPE_CHECKING:  # help imports nothing heavy
    from remat_facade.report.doctor import Stopwatch


def doctor(
    target: options.StepArgument,
    budget: options.BudgetOption = "40%",
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    platform: options.PlatformOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
) -> None:
    """Explain what binds memory and where planning time goes; a saved graph needs no torch."""
    Budget.parse(budget)
    saved = not target.endswith(".py") and (Path(target).is_file() or ":" not in target)
    of_model = {"--platform": platform, "--ways": ways, "--outputs": outputs}
    given = [name for name, value in of_model.items() if value is not None]
    if saved and given:
        raise typer.BadParameter(f"{given[0]} is for a model: give MODULE:FACTORY, or leave it out")
    times = None if platform is None else find_platform(platform)
    method = choose_method(
        "auto", config, solver, seed, time_limit, ways, outputs=outputs, gradients=gradients
    )
    with progress(f"reading {target}") as update:
        from remat_facade.report.doctor import Stopwatch, diagnose
        from remat_facade.report.doctor_page import advice, doctor_tables

        watch, measured = Stopwatch(), None
        if saved:
            graph = load_graph(target)
        else:
            graph, measured = _captured(target, budget, method, times, watch, update)
        found = diagnose(graph, budget, method, watch=watch, measured=measured, on_progress=update)
    for table in doctor_tables(found):
        show(table)
    for line in advice(found):
        say(f"- {line}")


def _captured(
    target: str, budget: str, method: Method, times: Platform | None, watch: "Stopwatch", update: Progress
) -> tuple[Graph, tuple[int, int]]:
    """The measured graph of a model; how many kinds of its ops were measured now, and how many it has."""
    from remat_executor import step_graph
    from remat_facade.cli.target import load_target
    from remat_facade.entrypoints.inputs import as_call, check_model
    from remat_facade.entrypoints.model_budget import check_model_budget
    from remat_facade.entrypoints.options import families_of

    check_model_budget(budget)
    model, sample, sample_kwargs = load_target(target)
    args, kwargs = as_call(sample, sample_kwargs)
    check_model(model, args, kwargs)
    known: list[tuple[int, int]] = []  # kinds whose costs were known, and all

    def stage(what: str, done: int, total: int) -> None:
        update(f"{what} {done} of {total}" if total > 1 else what)
        if what == "measure" and not known:
            watch.end("translation")
            known.append((done, total))
        elif what == "capture" and done == total:
            watch.end("capture")

    watch.skip()
    graph = step_graph(
        model,
        args,
        kwargs,
        platform=times,
        on_progress=stage,
        ways=families_of(method.ways),
        outputs=method.outputs,
    )
    watch.end("measuring")
    first, total = known[0]
    return graph, (total - first, total)
