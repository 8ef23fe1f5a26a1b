"""Options and arguments that several commands share."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from remat_facade.cli import completion


def seconds(given: float | None) -> float | None:
    """Check a time limit by the rule of configs."""
    from remat_facade.config.fields import LONGEST_S

    if given is not None and not 0 < given <= LONGEST_S:
        raise typer.BadParameter(f"expected seconds above 0, up to {LONGEST_S:.0e}, got {given:g}")
    return given


def ratio(given: str) -> float:
    """A number of at least 0, such as 0.3, or a percentage: 30%."""
    number, percent, after = str(given).strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if after or not value >= 0:
        raise typer.BadParameter(
            f"expected a ratio such as 0.3, or a percentage such as 30%, got {given!r:.40}"
        )
    return value


def saved_graph(given: Path | None) -> Path | None:
    """Refuse a model where a command reads a saved graph."""
    return _saved(given, "graph")


def saved_plan(given: Path | None) -> Path | None:
    """Refuse a model where a command reads a saved plan."""
    return _saved(given, "plan")


def picture(given: Path | None) -> Path | None:
    """Refuse the name of a file that is no picture, before long work."""
    from remat_facade.report.picture_file import format_of

    if given is not None:
        format_of(given)
    return given


def _picture_option(about: str) -> Any:
    """The option of a picture's file."""
    return typer.Option(metavar="FILE", help=about, callback=picture)


def _saved(given: Path | None, word: str) -> Path | None:
    from remat_graph.serialization.inputs import check_saved

    if given is not None:
        check_saved(given, word)
    return given


BudgetOption = Annotated[
    str,
    typer.Option(
        help='Bytes, "2GiB", "800MB", or "40%": gradients and 40 % of what else the unplanned step holds.'
    ),
]
StepSizeOption = Annotated[str | None, typer.Option(metavar="SIZE", help='Bytes of a step: "2GiB", "800MB".')]
WholeDeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Instead of a budget: memory of a device, which also holds parameters, gradients and optimizer "
        "states.",
    ),
]
BudgetOrAutoOption = Annotated[
    str,
    typer.Option(
        help='Bytes, "2GiB", "800MB", "40%": gradients and 40 % of what else the unplanned step holds; or '
        '"auto": the free memory less gradients and optimizer states.'
    ),
]
SolversOption = Annotated[
    str,
    typer.Option(
        "--solvers",
        "--solver",
        metavar="A,B,...",
        help="Methods to compare.",
        autocompletion=completion.several_solvers,
    ),
]
SolverOption = Annotated[
    str | None,
    typer.Option(
        help="The planning method; `remat solvers` lists all. [default: auto]",
        autocompletion=completion.solver,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|TYPE", help="A config file or type, instead of a solver; see `remat config`."),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the solver's random choices.")]
TimeLimitOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Stop then, with the best result so far.", callback=seconds),
]
ProveOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Then raise the lower bound for so long, within --time-limit if given, to say how near the "
        "plan is to the best.",
        callback=seconds,
    ),
]
SearchLimitOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="For each method: stop then, with the largest batch so far. A size is measured once, by the "
        "first method that tries it.",
        callback=seconds,
    ),
]
WaysOption = Annotated[
    Literal["exact", "rounding", "none"] | None,
    typer.Option(
        help="Other ways to run ops that a plan may choose: exact ones, also those that round differently, "
        "or none. [default: the config's, exact]"
    ),
]
AblationOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A,B,...",
        help="Also compare each method without these families of ways to run ops, such as masks, or "
        '"masks,pools" together; "all" for no ways. May be repeated.',
    ),
]
OutputsOption = Annotated[
    Literal["kept", "dropped"] | None,
    typer.Option(
        help="Whether your loop keeps the outputs that are not differentiated until the backward ends, or "
        "drops them before. [default: kept, or the config's]"
    ),
]
GradientsOption = Annotated[
    Literal["new", "present"] | None,
    typer.Option(
        help="Plan for steps that find no .grad, or for those that find one for every parameter "
        "(accumulation, zero_grad(set_to_none=False)). [default: new, or the config's]"
    ),
]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it to this file.")]
PlanOutOption = Annotated[
    Path | None,
    typer.Option(
        "--plan-out",
        "--out",
        metavar="FILE",
        help="Save the plan, for limit_memory(model, budget, plan=FILE) and `remat show`.",
    ),
]
GraphOutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Save the graph, for `remat solve`, `sweep` and `show --graph`."),
]
OrderOutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save the order of the ops, repeats included.")
]
GraphArgument = Annotated[
    Path,
    typer.Argument(metavar="GRAPH.json", help="A graph, saved or of the corpus.", callback=saved_graph),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A function that returns (model, sample): train.py:make. With --input the name of a model: "
        "torchvision.models.resnet50.",
    ),
]
StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH.json|MODULE:FACTORY",
        help="A saved graph, or a function that returns (model, sample). With --input the name of a model.",
    ),
]
BatchTargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A function of a batch size that returns (model, sample). With --input the name of a model.",
    ),
]
InputOption = Annotated[
    str | None,
    typer.Option(
        metavar="AxBxC",
        help="Shape of one sample, such as 3x224x224, or length of a sequence. The model is then built by "
        "its name, with random weights, and gets random inputs.",
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Batch size, with --input or for a FACTORY that takes one. [default: 1, or the FACTORY's]",
    ),
]
DtypeOption = Annotated[
    Literal["float32", "float64", "float16", "bfloat16"] | None,
    typer.Option(help="Convert the model and its inputs to this type. [default: as they are]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TypeArgument = Annotated[
    str,
    typer.Argument(
        metavar="TYPE", help="auto, noremat, rotor, checkmate, monet, rockmate, hilp, hiremate or offmate."
    ),
]
OptimizerOption = Annotated[
    str, typer.Option(metavar="NAME", help="The optimizer whose states count, such as sgd.")
]
DeviceMemoryOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of the training device. [default: this device's]")
]
PlatformOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Cost platform or its FILE.json. [default: measure here]",
        autocompletion=completion.platforms,
    ),
]
MaxOverheadOption = Annotated[
    float, typer.Option(metavar="RATIO", parser=ratio, help="Most extra time: 0.3 or 30%.")
]
MemoryPictureOption = Annotated[
    Path | None, _picture_option("Draw memory over time, as PNG, SVG or PDF by the name's ending.")
]
MatrixOption = Annotated[
    Path | None, _picture_option("Draw which ops run and which values are live per stage.")
]
DataflowOption = Annotated[Path | None, _picture_option("Draw what is kept, recomputed and moved, by layer.")]
CurvesOption = Annotated[
    Path | None, _picture_option("Draw a curve for each method, as PNG, SVG or PDF by the name's ending.")
]
