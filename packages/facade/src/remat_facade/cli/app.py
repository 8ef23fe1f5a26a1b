"""The command `remat`.

Heavy libraries are imported by the command that needs them: help is quick and `remat solve` needs no torch. A
user's mistake ends in one line on stderr and exit code 2, Ctrl-C in one line and 130.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat_facade.cli.options import (
    BudgetOption,
    BudgetOrAutoOption,
    ConfigOption,
    GraphArgument,
    OutOption,
    SeedOption,
    SolverOption,
    TimeLimitOption,
)
from remat_facade.cli.results import deliver, draw
from remat_facade.cli.target_plan import plan_and_fit
from remat_facade.cli.terminal import complain, give_up_output, progress, say, show
from remat_facade.files import check_places, save_to, write_whole
from remat_graph import RematError
from remat_graph.errors import shown, text_of

if TYPE_CHECKING:
    from remat_graph import Graph

app = typer.Typer(
    name="remat",
    help="Train any PyTorch model inside a memory budget given in bytes.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

DOES_NOT_FIT, USER_ERROR, INTERRUPTED = 1, 2, 130
"""Exit codes of a command that found no room, of one that could not start, and of one that Ctrl-C ended."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="gpt2 (text of Python's library) or resnet (digits).")] = "gpt2",
    budget: BudgetOption = "40%",
    steps: Annotated[int, typer.Option(min=4, help="Training steps.")] = 12,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where picture and report go.")] = Path(
        "remat-demo"
    ),
) -> None:
    """Train a real model with and without a budget, side by side."""
    from remat_facade.demo.run import run_demo
    from remat_facade.demo.tasks import get_task
    from remat_facade.planning.planner import Planner

    check_places({"--out": out / "plan.json"})
    Planner(budget=budget).check()
    with progress("importing torch") as tell:
        result = run_demo(get_task(model), budget, steps=steps, out=out, on_progress=tell)
    for table in result.tables:
        show(table)
    for path in result.written:
        say(f"wrote {path}")
    for problem in result.problems:
        complain(problem)
    if result.problems:
        raise typer.Exit(1)


@app.command()
def plan(
    target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="Returns (model, sample).")],
    budget: BudgetOrAutoOption,
    solver: SolverOption = None,
    config: ConfigOption = None,
    seed: SeedOption = 0,
    time_limit: TimeLimitOption = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Whose states count for whether training fits, such as sgd.")
    ] = "adamw",
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Whether it fits there, such as 80GiB; else here.")
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Whose times, such as h200-spec or a FILE.json; else measured here."
        ),
    ] = None,
    zoo: Annotated[
        bool, typer.Option(help="Use the plan of an earlier run, if there is one, and keep this one.")
    ] = True,
    out: OutOption = None,
    graph_out: OutOption = None,
) -> None:
    """Capture, measure and plan a model of yours, and add up whether training it fits."""
    from remat_facade.cli.target import load_target
    from remat_facade.planning.method import choose_method
    from remat_facade.report.table import fit_table
    from remat_graph import find_platform, parse_nbytes

    check_places(
        {"--out": out, "--graph-out": graph_out},
        {"MODULE:FACTORY": target.rpartition(":")[0], "--config": config, "--platform": platform},
    )
    device_nbytes = None if device_memory is None else parse_nbytes(device_memory)
    times = None if platform is None else find_platform(platform)
    with progress(f"loading {target}") as tell:
        loaded = load_target(target)
        from remat_facade.planning.memory_fit import states_nbytes

        states_nbytes((), optimizer)  # a name that means nothing is found before the work
        method = choose_method("auto", config, solver, seed, time_limit)
        graph, made, fit = plan_and_fit(
            loaded, budget, method, optimizer, device_nbytes=device_nbytes, platform=times, zoo=zoo, tell=tell
        )
    deliver(made, out)
    show(fit_table(fit))
    if graph_out is not None:
        from remat_graph import save_graph

        say(f"wrote {save_to(graph_out, lambda path: save_graph(graph, path))}")
    if fit.fits is False:
        complain(f"training {fit.summary()}")
        raise typer.Exit(DOES_NOT_FIT)


@app.command()
def solve(
    graph: GraphArgument,
    budget: BudgetOption,
    solver: SolverOption = None,
    config: ConfigOption = None,
    seed: SeedOption = 0,
    time_limit: TimeLimitOption = None,
    order_out: OutOption = None,
    plan_out: OutOption = None,
) -> None:
    """Plan a saved graph; needs no torch."""
    from remat_facade.planning.method import choose_method
    from remat_facade.planning.planner import Planner
    from remat_graph import load_graph

    check_places(
        {"--plan-out": plan_out, "--order-out": order_out}, {"GRAPH.json": graph, "--config": config}
    )
    with progress(f"reading {graph}") as tell:
        loaded = load_graph(graph)
        planner = Planner(
            budget=budget, method=choose_method("auto", config, solver, seed, time_limit), on_progress=tell
        )
        made = planner(loaded)
    deliver(made, plan_out, order_out)


@app.command("min-budget")
def smallest_budget(
    graph: GraphArgument,
    time_limit: TimeLimitOption = None,
) -> None:
    """The smallest budget that works; needs no torch."""
    from remat_facade.report.table import smallest_table
    from remat_graph import load_graph
    from remat_solvers import Deadline, min_budget

    with progress(f"reading {graph}") as tell:
        loaded = load_graph(graph)
        tell(f"looking for the smallest budget of {loaded.name}")
        found = min_budget(loaded, Deadline(time_limit))
    show(smallest_table(loaded, found))


@app.command()
def sweep(
    graph: GraphArgument,
    solvers: Annotated[str, typer.Option(metavar="A,B,...", help="Who plans, one line each.")] = "auto",
    budgets: Annotated[
        str | None, typer.Option(metavar="A,B,...", help='Such as "30%,50%,2GiB"; else from the smallest up.')
    ] = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="How many budgets, without --budgets.")] = 9,
    time_limit: TimeLimitOption = None,
    csv: OutOption = None,
    png: OutOption = None,
) -> None:
    """Extra time against budget, method by method; needs no torch."""
    from remat_facade.report import sweep as report
    from remat_graph import load_graph, resolve_budget
    from remat_solvers import get_solver
    from remat_solvers.queries import bounds_of, budgets_of, pareto

    check_places({"--csv": csv, "--png": png}, {"GRAPH.json": graph})
    names = list(dict.fromkeys(text.strip() for text in solvers.split(",")))
    for name in names:
        get_solver(name)  # one that there is not is found before the work
    with progress(f"reading {graph}") as tell:
        loaded = load_graph(graph)
        if budgets is None:
            tell("looking for the smallest budget")
            sizes = budgets_of(loaded, points, seconds=time_limit)
        else:
            sizes = tuple(sorted(resolve_budget(text.strip(), loaded) for text in budgets.split(",")))
        curves = {}
        for name in names:
            tell(f"{name}: {len(sizes)} budgets of {loaded.name}")
            curves[name] = pareto(loaded, sizes, solver=name, seconds=time_limit)
        tell("bounding what any schedule costs")
        bounds = bounds_of(loaded, sizes, seconds=time_limit)
    show(report.sweep_table(loaded, curves, bounds))
    if csv is not None:
        say(f"wrote {write_whole(csv, report.sweep_csv(curves, bounds))}")
    if png is not None:
        from remat_facade.report import picture

        say(f"wrote {write_whole(png, picture.png(report.draw_sweep(loaded, curves, bounds)))}")


@app.command("max-batch")
def largest_batch(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FACTORY", help="Called with a batch size, returns (model, sample)."),
    ],
    budget: BudgetOption,
    max_overhead: Annotated[
        float, typer.Option(min=0.0, help="Extra time that is bearable: 0.3 is 30 %.")
    ] = 1.0,
    first: Annotated[int, typer.Option(min=1, help="The smallest size that the model runs with.")] = 1,
    solver: SolverOption = None,
    time_limit: TimeLimitOption = None,
) -> None:
    """The largest batch that trains inside a budget."""
    from remat_executor import step_graph
    from remat_facade.cli.target import load_target
    from remat_facade.entrypoints.inputs import as_call, check_model
    from remat_facade.report.table import batch_table
    from remat_graph import parse_nbytes
    from remat_solvers.queries import max_batch

    nbytes = parse_nbytes(budget)
    with progress(f"loading {target}") as tell:

        def graph_of(batch: int) -> "Graph":
            tell(f"batch {batch}: capturing and measuring")
            model, sample, sample_kwargs = load_target(target, batch)
            args, kwargs = as_call(sample, sample_kwargs)
            check_model(model, args, kwargs)
            graph = step_graph(model, args, kwargs)
            tell(f"batch {batch}: planning {len(graph.ops)} ops")
            return graph

        found = max_batch(
            graph_of,
            nbytes,
            max_overhead=max_overhead,
            first=first,
            solver=solver or "auto",
            seconds=time_limit,
        )
    show(batch_table(target, nbytes, found))
    if not found.batch:
        complain(f"not even a batch of {first} fits: raise the budget or the overhead that is bearable")
        raise typer.Exit(DOES_NOT_FIT)


@app.command("config")
def show_config(
    type: Annotated[str, typer.Argument(metavar="TYPE", help="auto, noremat, rotor, ...")],
    out: OutOption = None,
) -> None:
    """Write a config with every field explained."""
    from remat_facade.config.types import generate_config
    from remat_facade.config.yaml_io import config_text, save_config

    made = generate_config(type)
    if out is None:
        say(config_text(made).rstrip("\n"))
    else:
        say(f"wrote {save_config(made, out)}")


@app.command("show")
def show_plan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A saved plan.")],
    graph: Annotated[Path | None, typer.Option(metavar="FILE", help="The graph that it is of.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory over time.")] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw what runs in which stage, and what is kept between them."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write both pictures and the tables as one page.")
    ] = None,
) -> None:
    """Show a plan; given its graph, what runs again, and pictures of it."""
    from remat_facade.report.table import plan_table, repeats_table
    from remat_graph import load_graph, load_plan

    places = {"--png": png, "--matrix": matrix, "--html": html}
    check_places(places, {"PLAN": plan, "--graph": graph})
    if graph is None and any(places.values()):
        raise typer.BadParameter("a picture needs the graph that the plan is of: add --graph FILE")
    loaded = load_graph(graph) if graph is not None else None
    made = load_plan(plan, loaded)
    show(plan_table(made))
    if loaded is None:
        return
    if made.recomputed_s or len(made.schedule.order) > len(loaded.ops):
        show(repeats_table(loaded, made))
    draw(loaded, made, png, matrix, html)


@app.command()
def solvers() -> None:
    """List the solvers."""
    from remat_facade.report.table import Table
    from remat_solvers import get_solver, solver_names

    rows = []
    for name in solver_names():
        try:
            about = (type(get_solver(name)).__doc__ or "").strip()
        except ImportError as error:  # a package of someone else's may be broken; the others still work
            about = f"cannot be loaded: {text_of(error)}"
        rows.append((name, about.partition("\n")[0]))
    show(Table(title="solvers", columns=("name", "what it does"), rows=tuple(rows), prose=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
        code = _run(words or ["--help"])
    if code == INTERRUPTED:
        complain("interrupted; files of earlier runs are as they were")
    return code


def _run(words: list[str]) -> int:
    usage_error: type[Any] = typer.BadParameter.__mro__[1]  # its module has changed, its place here has not
    try:
        # Not `app(...)`: that writes on the errors it sees, and ours are frozen.
        code = typer.main.get_command(app).main(words, prog_name="remat", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):  # newer typer returns the exit code instead
        return INTERRUPTED
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "remat"
        complain(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        return USER_ERROR
    except RematError as error:
        complain(str(error))
        return USER_ERROR
    except SystemExit as ended:  # not ours: a model's, or of what it calls
        complain(f"the model ended the program (exit code {shown(ended.code)}): take that out of it")
        return USER_ERROR
    except MemoryError:
        complain("this machine's memory does not do for it: ask for less, or take a larger machine")
        return USER_ERROR
    except Exception as error:
        from remat_executor.errors import note_on

        note = note_on(error)
        if note is not None:
            complain(f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}; {note}")
        elif isinstance(error, OSError):  # files have errors of their own: it is the output, or a device
            give_up_output()
            complain(
                f"the system refuses: {error.strerror or error}; check where the output goes, and the disk"
            )
        else:
            raise
        return USER_ERROR
    return code if isinstance(code, int) else 0
