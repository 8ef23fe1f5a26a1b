"""The command `remat max-batch`: the largest batch that trains inside a budget."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat_facade.cli import options
from remat_facade.cli.plan import DOES_NOT_FIT, SMALLER
from remat_facade.cli.terminal import complain, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from remat_facade.cli.batch_search import BatchClock, Largest
    from remat_facade.cli.output import CommandOutput
    from remat_facade.planning.memory_fit import Fit
    from remat_facade.planning.planner import Progress
    from remat_graph import Graph


def largest_batch(
    target: options.BatchTargetArgument,
    budget: options.StepSizeOption = None,
    device_memory: options.WholeDeviceOption = None,
    input: options.InputOption = None,
    dtype: options.DtypeOption = None,
    solvers: options.SolversOption = "auto",
    max_overhead: options.MaxOverheadOption = 1.0,
    first: Annotated[int, typer.Option(min=1, help="The smallest batch size to try.")] = 1,
    platform: options.PlatformOption = None,
    optimizer: options.OptimizerOption = "adamw",
    time_limit: options.SearchLimitOption = 60.0,
    ways: options.WaysOption = None,
    outputs: options.OutputsOption = None,
    gradients: options.GradientsOption = None,
    json: options.JsonOption = False,
) -> None:
    """Find the largest batch that trains."""
    from functools import partial

    from remat_facade.cli.checks import load_methods, methods_of
    from remat_facade.cli.output import CommandOutput
    from remat_facade.cli.searches import EndedEarly
    from remat_facade.cli.target import Target
    from remat_facade.planning.state_rules import rule_of
    from remat_graph import find_platform

    size_nbytes = _size_of_either(budget, device_memory)
    names = methods_of(solvers)
    rule_of(optimizer)
    times = None if platform is None else find_platform(platform)
    named = Target.parse(target, input, dtype=dtype)
    with CommandOutput(as_json=json) as output:
        with progress(f"loading {target}") as update:
            from remat_facade.cli.batch_search import BatchClock, Largest, at_most, largest
            from remat_solvers import MaxBatch, max_batch, solve_present, solve_switches

            clock = BatchClock(time_limit)
            present = partial(solve_present, solve=solve_switches)  # a size that fits needs no second search
            solve = at_most(present if gradients == "present" else solve_switches, clock)
            load = partial(named.load, meta=times is not None)
            nbytes, advice, note = size_nbytes, "raise --budget or --max-overhead", ""
            load_methods(names)
            if device_memory is not None:
                nbytes, advice, note, fit = _left_of(load(first), size_nbytes, optimizer)
                output.facts |= {"device_nbytes": size_nbytes, "fit": fit}
            graph_of, peaks = _graphs(load, update, clock, platform=times, ways=ways, outputs=outputs)
            search = partial(max_batch, graph_of, nbytes, max_overhead=max_overhead, first=first, solve=solve)
            nothing = {name: MaxBatch(batch=0, solution=None, refused=first) for name in names}
            made = largest(search, names, clock) if nbytes else Largest(found=nothing)
        if made.out_of_time and not made.interrupted:
            note = "; ".join(filter(None, [note, _more(made.out_of_time, times is None)]))
        # The peaks are those of steps that find no gradients.
        _report(output, target, nbytes, made, {} if gradients == "present" else peaks, note)
    if made.interrupted:
        raise EndedEarly("a larger batch may fit too")
    if not any(each.batch for each in made.found.values()):
        complain(
            f"a batch of {first} does not fit: {'lower --first, or ' if nbytes and first > 1 else ''}{advice}"
        )
        raise typer.Exit(DOES_NOT_FIT)


def _size_of_either(budget: str | None, device_memory: str | None) -> int:
    """The bytes of the option that is given."""
    from remat_facade.entrypoints.model_budget import size_of

    if (budget is None) == (device_memory is None):
        raise typer.BadParameter("give either --budget, the bytes of a step, or --device-memory")
    option = "--budget" if device_memory is None else "--device-memory"
    return size_of(budget or device_memory or "0", option)


def _report(
    output: "CommandOutput",
    target: str,
    budget_nbytes: int,
    made: "Largest",
    peaks: dict[int, int],
    note: str,
) -> None:
    from remat_facade.cli.batch_search import Unplanned
    from remat_facade.report.table import batch_facts, batch_table

    output.facts |= {"target": target, "budget_nbytes": budget_nbytes, "methods": batch_facts(made.found)}
    unplanned = Unplanned.between(peaks, budget_nbytes)
    output.facts |= {"unplanned": unplanned, "out_of_time": made.out_of_time, "interrupted": made.interrupted}
    table = batch_table(
        target, budget_nbytes, made.found, unplanned=unplanned, out_of_time=made.out_of_time, note=note
    )
    output.show(table)


def _more(late: "Sequence[str]", measured: bool) -> str:
    """What more time could give."""
    advice = ", or give --platform, which measures nothing" if measured else ""
    ended = f"the time limit ended the search of {' and '.join(late)}"
    return f"{ended}: a larger batch may fit, or a faster plan; raise --time-limit{advice}"


def _left_of(
    loaded: tuple[Any, Any, Any], device_nbytes: int, optimizer: str
) -> "tuple[int, str, str, Fit | None]":
    """Bytes of a device that remain for a step, or 0; what to say if no batch fits; what the device holds."""
    from remat_facade.entrypoints.inputs import check_model
    from remat_facade.errors import NothingLeft
    from remat_facade.planning.memory_fit import budget_on, fit_of
    from remat_graph import format_nbytes

    device = check_model(loaded[0], (), {}, filled=True)
    try:
        nbytes = budget_on(loaded[0], optimizer, device_nbytes)
    except NothingLeft as error:
        return 0, f"{error.problem}; {SMALLER}", "", None
    fit = fit_of(loaded[0], nbytes, optimizer, device=device, device_nbytes=device_nbytes)
    free = "" if fit.left_nbytes is None else f", {format_nbytes(fit.left_nbytes)} kept free"
    note = f"{format_nbytes(device_nbytes)} less {fit.parts()}{free}"
    return nbytes, "raise --device-memory or --max-overhead", note, fit


def _graphs(
    load: "Callable[[int], tuple[Any, Any, Any]]",
    update: "Progress",
    clock: "BatchClock",
    **options: Any,
) -> "tuple[Callable[[int], Graph], dict[int, int]]":
    """The step of each batch size, and for the sizes captured so far the peak of the unplanned step.

    A size that several methods try is captured once.
    """
    from functools import cache

    from remat_facade.cli.steps import graph_of
    from remat_graph import noremat_peak_nbytes

    peaks: dict[int, int] = {}
    given = {name: value for name, value in options.items() if value is not None}

    @cache
    def captured(batch: int) -> "Graph":
        update(f"batch {batch}: capturing")
        with clock.size(batch):
            graph = graph_of(load(batch), on_progress=clock.check, **given)
        peaks[batch] = noremat_peak_nbytes(graph)
        update(f"batch {batch}: planning {len(graph.ops)} ops")
        return graph

    return captured, peaks
