"""The command `remat demo`: train a model with and without a budget, and compare."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from remat_facade.cli import options
from remat_facade.cli.terminal import complain, progress


def demo(
    model: Annotated[
        Literal["gpt2", "resnet"], typer.Option(help="gpt2 (on Python's source text) or resnet (on digits).")
    ] = "gpt2",
    budget: options.BudgetOption = "40%",
    steps: Annotated[int, typer.Option(min=4, help="Training steps.")] = 12,
    outputs: options.OutputsOption = None,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder for the picture, the report, the plan and the graph."),
    ] = Path("remat-demo"),
    json: options.JsonOption = False,
) -> None:
    """Train a real model with and without a budget, and compare."""
    from remat_facade.cli.checks import check_budget
    from remat_facade.cli.output import CommandOutput
    from remat_graph.serialization.outputs import check_paths

    check_budget(budget)
    if out.is_file():
        raise typer.BadParameter(f"--out {out} is a file: name a folder")
    check_paths({"--out": out / "plan.json"})
    with CommandOutput(as_json=json) as output:
        with progress("importing torch") as update:
            from remat_facade.demo.run import run_demo
            from remat_facade.demo.tasks import get_task

            result = run_demo(
                get_task(model), budget, steps=steps, out=out, outputs=outputs or "kept", on_progress=update
            )
        output.facts |= result.facts
        output.show(*result.tables)
        for path in result.written:
            output.wrote(path)
    for problem in result.problems:
        complain(problem)
    if result.problems:
        raise typer.Exit(1)
