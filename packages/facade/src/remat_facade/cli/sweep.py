"""The command `remat sweep`: methods against each other, over budgets."""

from pathlib import Path
from typing import Annotated, Any

import typer

from remat_facade.cli import options
from remat_facade.cli.terminal import progress


def sweep(
    target: options.StepArgument,
    solvers: options.SolversOption = "auto",
    budgets: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help='Such as "30%,50%,2GiB". [default: from the smallest]'),
    ] = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Number of budgets, without --budgets.")] = 9,
    no: options.AblationOption = None,
    input: options.InputOption = None,
    batch: options.BatchOption = None,
    dtype: options.DtypeOption = None,
    platform: options.PlatformOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    time_limit: options.TimeLimitOption = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as CSV.")] = None,
    png: options.CurvesOption = None,
    json: options.JsonOption = False,
) -> None:
    """Compare methods over budgets."""
    from remat_facade.cli.checks import load_methods, methods_of
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.saved_or_model import SavedOrModel
    from remat_facade.cli.searches import EndedEarly, swept
    from remat_graph import Budget, resolve_budget
    from remat_graph.budget import check_unit_for
    from remat_graph.serialization.outputs import check_paths

    step = SavedOrModel.parse(
        target, input=input, batch=batch, dtype=dtype, platform=platform, ways=ways, outputs=outputs
    )
    check_paths(
        {"--csv": csv, "--png": png}, {step.kind: target if step.saved else target.rpartition(":")[0]}
    )
    names = methods_of(solvers)
    asked = None if budgets is None else [text.strip() for text in budgets.split(",")]
    for text in asked or ():
        Budget.parse(text)
    with CommandOutput(as_json=json) as output:
        with progress(f"reading {target}") as update:
            from remat_facade.report import sweep_rows as report
            from remat_solvers import budgets_of

            load_methods(names)
            loaded = step.load(update)
            variants = report.ablations(loaded, no or ())
            if asked is None:
                update("searching for the smallest budget")
                sizes = budgets_of(loaded, points, seconds=time_limit)
            else:
                for text in asked:
                    check_unit_for(text, loaded)
                sizes = tuple(sorted(resolve_budget(text, loaded) for text in asked))
            found = swept(variants, names, sizes, time_limit, update)
        output.facts |= {"graph_name": loaded.name, **report.sweep_facts(found.curves, found.bounds)}
        output.show(report.sweep_table(loaded, found.curves, found.bounds))
        output.write(csv, lambda: report.sweep_csv(found.curves, found.bounds))
        output.write(png, lambda: _drawn(loaded, found.curves, found.bounds, png))
    if found.ended_early:
        raise EndedEarly("these are the plans until then, with their bounds")


def _drawn(*swept: Any) -> bytes:
    """The picture; nothing else of the command needs matplotlib."""
    from remat_facade.report.sweep import sweep_image

    return sweep_image(*swept)
