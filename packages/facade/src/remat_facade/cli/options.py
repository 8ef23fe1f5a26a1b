"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


def seconds(given: float | None) -> float | None:
    """Check a time limit, which means the same in each command and in a config."""
    from remat_facade.config.fields import LONGEST_S

    if given is not None and not 0 < given <= LONGEST_S:
        raise typer.BadParameter(f"wants seconds above 0, up to {LONGEST_S:.0e}, got {given:g}")
    return given


BudgetOption = Annotated[
    str, typer.Option(help='Bytes, "2GiB", "800MB", or a share of the unplanned peak: "40%".')
]
BudgetOrAutoOption = Annotated[
    str,
    typer.Option(
        help='Bytes, "2GiB", "800MB", a share of the unplanned peak ("40%"), or "auto": what is left.'
    ),
]
SolverOption = Annotated[
    str | None, typer.Option(help="Who plans; `remat solvers` lists them. [default: auto]")
]
ConfigOption = Annotated[
    str | None, typer.Option(metavar="FILE|TYPE", help="Instead of a solver: `remat config`.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seeds the solver's random choices.")]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Return the best plan found by then.", callback=seconds),
]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there.")]
GraphArgument = Annotated[
    Path, typer.Argument(metavar="GRAPH.json", help="A saved graph, or one of the corpus.")
]
