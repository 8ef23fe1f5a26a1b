"""The command `remat`.

Each command imports the heavy libraries that it needs, so help is quick and `remat solve` needs no torch. A
user error gives one line on stderr and exit code 2. Ctrl-C ends a search, whose best result so far is shown
and written, with one line and exit code 130; before there is one, or pressed again, it ends the command.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from remat_facade.cli import options
from remat_facade.cli.doctor import doctor
from remat_facade.cli.results import deliver, draw
from remat_facade.cli.searches import EndedEarly, largest, swept
from remat_facade.cli.terminal import complain, give_up_output, progress, say, show
from remat_facade.config.types import generate_config
from remat_facade.config.yaml_io import config_text, save_config
from remat_facade.files import check_paths, save_to, write_whole
from remat_facade.planning.interrupts import interrupted, stopped_by_interrupts
from remat_facade.planning.method import choose_method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.report.table import (
    Table,
    batch_table,
    fit_table,
    layers_table,
    plan_table,
    repeats_table,
    rounding_table,
    smallest_table,
    ways_table,
)
from remat_graph import (
    Graph,
    RematError,
    find_platform,
    load_graph,
    load_plan,
    parse_nbytes,
    resolve_budget,
    save_graph,
)
from remat_graph.errors import shown, text_of
from remat_solvers import (
    Deadline,
    budgets_of,
    get_solver,
    max_batch,
    min_budget,
    min_present_budget,
    solve_present,
    solve_switches,
    solver_names,
)

app = typer.Typer(
    name="remat",
    help="Train any PyTorch model inside a memory budget given in bytes.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

DOES_NOT_FIT, USER_ERROR, INTERRUPTED = 1, 2, 130
"""Exit codes: the model does not fit, an error of the user, and Ctrl-C."""


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="gpt2 (on Python's source text) or resnet (on digits).")
    ] = "gpt2",
    budget: options.BudgetOption = "40%",
    steps: Annotated[int, typer.Option(min=4, help="Training steps.")] = 12,
    outputs: options.OutputsOption = None,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder for the picture, the report, the plan and the graph."),
    ] = Path("remat-demo"),
) -> None:
    """Train a real model with and without a budget, and compare."""
    from remat_facade.demo.run import run_demo
    from remat_facade.demo.tasks import get_task

    check_paths({"--out": out / "plan.json"})
    RecomputePlanner(budget=budget).check()
    with progress("importing torch") as update:
        result = run_demo(
            get_task(model), budget, steps=steps, out=out, outputs=outputs or "kept", on_progress=update
        )
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
    target: options.TargetArgument,
    budget: options.BudgetOrAutoOption,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="The optimizer whose states count, such as sgd.")
    ] = "adamw",
    device_memory: options.DeviceMemoryOption = None,
    platform: options.PlatformOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
    zoo: Annotated[bool, typer.Option(help="Load a saved plan if one matches, and save new plans.")] = True,
    out: options.OutOption = None,
    graph_out: options.OutOption = None,
) -> None:
    """Plan your model, and report whether it fits."""
    from remat_facade.cli.target import load_target

    check_paths(
        {"--out": out, "--graph-out": graph_out},
        {"MODULE:FACTORY": target.rpartition(":")[0], "--config": config, "--platform": platform},
    )
    device_nbytes = None if device_memory is None else parse_nbytes(device_memory)
    times = None if platform is None else find_platform(platform)
    with progress(f"loading {target}") as update:
        model, sample, sample_kwargs = load_target(target)
        from remat_facade.entrypoints.inputs import as_call
        from remat_facade.entrypoints.options import CostOptions, PlanOptions
        from remat_facade.entrypoints.prepare import plan_model
        from remat_facade.planning.memory_fit import states_nbytes

        states_nbytes((), optimizer)  # raises for an unknown name, before the long work
        method = choose_method(
            "auto", config, solver, seed, time_limit, ways, outputs=outputs, gradients=gradients
        )
        graph, made, fit = plan_model(
            model,
            as_call(sample, sample_kwargs),
            PlanOptions(budget=budget, optimizer=optimizer, zoo=zoo),
            method,
            CostOptions(platform=times, on_progress=update, live=True),
            device_nbytes=device_nbytes,
        )
    deliver(made, out)
    show(fit_table(fit))
    if graph_out is not None:
        say(f"wrote {save_to(graph_out, lambda path: save_graph(graph, path))}")
    if interrupted(made):
        raise EndedEarly
    if fit.fits is False:
        complain(f"training {fit.summary()}")
        raise typer.Exit(DOES_NOT_FIT)


@app.command()
def solve(
    graph: options.GraphArgument,
    budget: options.BudgetOption,
    solver: options.SolverOption = None,
    config: options.ConfigOption = None,
    seed: options.SeedOption = 0,
    time_limit: options.TimeLimitOption = None,
    gradients: options.GradientsOption = None,
    order_out: options.OutOption = None,
    plan_out: options.OutOption = None,
) -> None:
    """Plan a saved graph; needs no torch."""
    check_paths({"--plan-out": plan_out, "--order-out": order_out}, {"GRAPH.json": graph, "--config": config})
    with progress(f"reading {graph}") as update:
        loaded = load_graph(graph)
        method = choose_method("auto", config, solver, seed, time_limit, gradients=gradients)
        planner = RecomputePlanner(budget=budget, method=method, grads=method.grads)
        planner.on_progress, planner.live = update, True
        made = planner(loaded)
    deliver(made, plan_out, order_out)
    if interrupted(made):
        raise EndedEarly


@app.command("min-budget")
def smallest_budget(
    graph: options.GraphArgument,
    time_limit: options.TimeLimitOption = None,
    gradients: options.GradientsOption = None,
) -> None:
    """Find the smallest budget of a saved graph; needs no torch."""
    with progress(f"reading {graph}") as update:
        loaded = load_graph(graph)
        update(f"searching for the smallest budget of {loaded.name}")
        find = min_present_budget if gradients == "present" else min_budget
        deadline = Deadline(time_limit)
        with stopped_by_interrupts(deadline):
            found = find(loaded, deadline)
    show(smallest_table(loaded, found))
    if deadline.stopped:
        raise EndedEarly("a smaller budget may work too")


@app.command()
def sweep(
    graph: options.GraphArgument,
    solvers: Annotated[str, typer.Option(metavar="A,B,...", help="Methods to compare.")] = "auto",
    budgets: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help='Such as "30%,50%,2GiB". [default: from the smallest]'),
    ] = None,
    points: Annotated[int, typer.Option(min=1, max=1000, help="Number of budgets, without --budgets.")] = 9,
    no: options.AblationOption = None,
    time_limit: options.TimeLimitOption = None,
    csv: options.OutOption = None,
    png: options.OutOption = None,
) -> None:
    """Compare methods on a saved graph; needs no torch."""
    from remat_facade.report import sweep as report

    check_paths({"--csv": csv, "--png": png}, {"GRAPH.json": graph})
    names = list(dict.fromkeys(text.strip() for text in solvers.split(",")))
    for name in names:
        get_solver(name)  # raises for an unknown name, before the long work
    with progress(f"reading {graph}") as update:
        loaded = load_graph(graph)
        variants = report.ablations(loaded, no or ())
        if budgets is None:
            update("searching for the smallest budget")
            sizes = budgets_of(loaded, points, seconds=time_limit)
        else:
            sizes = tuple(sorted(resolve_budget(text.strip(), loaded) for text in budgets.split(",")))
        found = swept(variants, names, sizes, time_limit, update)
    show(report.sweep_table(loaded, found.curves, found.bounds))
    if csv is not None:
        say(f"wrote {write_whole(csv, report.sweep_csv(found.curves, found.bounds))}")
    if png is not None:
        from remat_facade.report import picture

        say(f"wrote {write_whole(png, picture.png(report.draw_sweep(loaded, found.curves, found.bounds)))}")
    if found.ended_early:
        raise EndedEarly("these are the plans until then, with their bounds")


@app.command("max-batch")
def largest_batch(
    target: options.BatchTargetArgument,
    budget: options.SizeOption,
    max_overhead: Annotated[float, typer.Option(min=0.0, help="Most extra time: 0.3 is 30 %.")] = 1.0,
    first: Annotated[int, typer.Option(min=1, help="The smallest batch size to try.")] = 1,
    solver: options.SolverOption = None,
    time_limit: options.TimeLimitOption = None,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
) -> None:
    """Find the largest batch that trains inside a budget."""
    from remat_executor import step_graph
    from remat_facade.cli.target import load_target
    from remat_facade.entrypoints.inputs import as_call, check_model
    from remat_facade.entrypoints.options import families_of

    nbytes = parse_nbytes(budget)
    with progress(f"loading {target}") as update:

        def graph_of(batch: int) -> Graph:
            update(f"batch {batch}: capturing and measuring")
            model, sample, sample_kwargs = load_target(target, batch)
            args, kwargs = as_call(sample, sample_kwargs)
            check_model(model, args, kwargs)
            families = families_of(ways or "exact")
            graph = step_graph(model, args, kwargs, ways=families, outputs=outputs or "kept")
            update(f"batch {batch}: planning {len(graph.ops)} ops")
            return graph

        search = partial(
            max_batch,
            graph_of,
            nbytes,
            max_overhead=max_overhead,
            first=first,
            solver=solver or "auto",
            seconds=time_limit,
            solve=solve_present if gradients == "present" else solve_switches,
        )
        found, ended_early = largest(search)
    show(batch_table(target, nbytes, found))
    if ended_early:
        raise EndedEarly("a larger batch may fit too")
    if not found.batch:
        complain(f"a batch of {first} does not fit: raise --budget or --max-overhead")
        raise typer.Exit(DOES_NOT_FIT)


app.command()(doctor)


@app.command("config")
def show_config(type: options.TypeArgument, out: options.OutOption = None) -> None:
    """Print or write a config with every field explained."""
    made = generate_config(type)
    if out is None:
        say(config_text(made).rstrip("\n"))
    else:
        say(f"wrote {save_config(made, out)}")


@app.command("show")
def show_plan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A saved plan.")],
    graph: Annotated[Path | None, typer.Option(metavar="FILE", help="The graph of the plan.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory over time.")] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw which ops run and which values are live per stage."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write both pictures and the tables as one HTML page.")
    ] = None,
) -> None:
    """Show a plan, layer by layer; with its graph also recomputed operators and pictures."""
    places = {"--png": png, "--matrix": matrix, "--html": html}
    check_paths(places, {"PLAN": plan, "--graph": graph})
    if graph is None and any(places.values()):
        raise typer.BadParameter("a picture needs the graph of the plan: add --graph FILE")
    loaded = load_graph(graph) if graph is not None else None
    made = load_plan(plan, loaded)
    for table in (plan_table(made), layers_table(made), ways_table(made), rounding_table(made)):
        if table.rows:
            show(table)
    if loaded is None:
        return
    if made.recomputed_s or len(made.schedule.order) > len(loaded.ops):
        show(repeats_table(loaded, made))
    draw(loaded, made, png, matrix, html)


@app.command()
def solvers() -> None:
    """List the solvers."""
    rows = []
    for name in solver_names():
        try:
            about = (type(get_solver(name)).__doc__ or "").strip()
        except ImportError as error:  # one broken package must not hide the other solvers
            about = f"cannot be loaded: {text_of(error)}"
        rows.append((name, about.partition("\n")[0]))
    show(Table(title="solvers", columns=("name", "what it does"), rows=tuple(rows), prose=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
        return _run(words or ["--help"])


def _run(words: list[str]) -> int:
    usage_error: type[Any] = typer.BadParameter.__mro__[1]  # typer versions define it in different modules
    try:
        # Not `app(...)`, which sets attributes on errors: ours are frozen.
        code = typer.main.get_command(app).main(words, prog_name="remat", standalone_mode=False)
        if code == INTERRUPTED:  # what newer versions of typer return
            raise KeyboardInterrupt
    except EndedEarly as ended:  # a plan has its own warning
        if ended.args:
            complain(f"interrupted: {ended}")
        return INTERRUPTED
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted; files of earlier runs are unchanged")
        return INTERRUPTED
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "remat"
        complain(f"{error.format_message().rstrip('.')}; see `{command} --help`")
        return USER_ERROR
    except RematError as error:
        complain(str(error))
        return USER_ERROR
    except SystemExit as ended:  # raised by the model or a function that it calls
        complain(f"the model ended the program (exit code {shown(ended.code)}): remove its call of sys.exit")
        return USER_ERROR
    except MemoryError:
        complain("out of memory: use a smaller model or batch, or a machine with more memory")
        return USER_ERROR
    except Exception as error:
        from remat_executor.errors import note_on

        note = note_on(error)
        if note is not None:
            complain(f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}; {note}")
        elif isinstance(error, OSError):  # errors of files have their own class: it is the output or a device
            give_up_output()
            complain(f"system error: {error.strerror or error}; check the output and the disk")
        else:
            raise
        return USER_ERROR
    return code if isinstance(code, int) else 0
