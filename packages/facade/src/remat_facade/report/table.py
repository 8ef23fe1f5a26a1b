"""Tables as data, for the terminal and the HTML page."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from remat_facade.report.trace import repeated_targets
from remat_graph import Grads, Graph, Plan, format_nbytes, format_seconds
from remat_graph.layers.summary import OUTSIDE
from remat_graph.units import format_change, in_brackets

if TYPE_CHECKING:  # the first imports torch, the others numpy
    from remat_facade.planning.memory_fit import Fit
    from remat_solvers import MaxBatch, MinBudget, Solution


@attrs.frozen(kw_only=True)
class Table:
    """Rows of text."""

    title: str  # shown above the table
    columns: tuple[str, ...]  # the heads; the first column names the rows
    rows: tuple[tuple[str, ...], ...]  # one string per column
    note: str = ""  # one line below the table
    prose: bool = False  # whether the cells are prose instead of numbers


def smallest_table(graph: Graph, found: "MinBudget") -> Table:
    """The smallest budget found, and the bound below which no budget works."""
    rows = (
        ("smallest budget with a schedule", format_nbytes(found.nbytes), f"{found.nbytes}"),
        ("no schedule exists below", format_nbytes(found.proven_nbytes), f"{found.proven_nbytes}"),
        (
            f"needed by {found.floor_place} alone",
            format_nbytes(found.floor_op_nbytes),
            f"{found.floor_op_nbytes}",
        ),
    )
    note = found.floor_reason
    if found.cut_short:
        note += "; time was up before smaller budgets were tried"
    return Table(title=graph.name, columns=("", "", "bytes"), rows=rows, note=note)


def batch_table(
    name: str,
    budget_nbytes: int,
    found: "Mapping[str, MaxBatch]",
    *,
    unplanned: object = None,
    out_of_time: Collection[str] = (),
    note: str = "",
) -> Table:
    """The largest batch by each method, its plan, and the smallest batch size that failed.

    Args:
        name: of the model.
        budget_nbytes: the budget of a step.
        found: by the names of methods.
        unplanned: the largest batch without a plan, as it is shown; None if it is unknown.
        out_of_time: methods that ran out of time, so that a larger batch may fit.
        note: shown below.
    """

    def batch(method: str) -> str:
        return f"{'at least ' if method in out_of_time else ''}{found[method].batch}"

    def row(head: str, cell: "Callable[[MaxBatch], str]") -> tuple[str, ...]:
        return (head, *(cell(each) for each in found.values()))

    def of_plan(show: "Callable[[Solution], str]") -> "Callable[[MaxBatch], str]":
        return lambda each: "" if each.solution is None else show(each.solution)

    rows = (
        ("largest batch", *map(batch, found)),
        row("without a plan", lambda _: f"{unplanned or ''}"),
        row("budget", lambda _: format_nbytes(budget_nbytes)),
        row("peak", of_plan(lambda plan: format_nbytes(plan.peak_nbytes or 0))),
        row("extra time", of_plan(lambda plan: f"{plan.overhead or 0.0:.2%}")),
        row("lower bound of extra time", of_plan(lambda plan: f"{plan.lower_bound_overhead:.2%}")),
        row("does not fit", lambda each: "" if each.refused is None else f"{each.refused}"),
    )
    heads = ("",) if len(found) == 1 else tuple(found)
    shown = tuple(cells for cells in rows if any(cells[1:]))
    return Table(title=name, columns=("", *heads), rows=shown, note=note)


def batch_facts(found: "Mapping[str, MaxBatch]") -> dict[str, dict[str, Any]]:
    """The largest batch by each method and the figures of its plan, for JSON."""
    return {
        name: {
            "batch": each.batch,
            "refused": each.refused,
            "peak_nbytes": each.solution and each.solution.peak_nbytes,
            "overhead": each.solution and each.solution.overhead,
            "lower_bound_overhead": each.solution and each.solution.lower_bound_overhead,
        }
        for name, each in found.items()
    }


def plan_table(plan: Plan) -> Table:
    """Memory and time of a plan, and of the unplanned step."""
    runs = plan.schedule.order
    ops = len(set(runs))
    gradients, freed = format_nbytes(plan.gradient_nbytes), plan.grads is Grads.PRESENT
    ways = f"{len(plan.switched)}{in_brackets(plan.overhead - plan.recomputed_overhead)}"
    rows = (
        ("peak, allocator", format_nbytes(plan.noremat_peak_nbytes), format_nbytes(plan.peak_nbytes)),
        ("peak, tensors only", "", format_nbytes(plan.live_peak_nbytes)),
        ("gradients in the peak", gradients, "" if freed else gradients),
        ("budget", "", format_nbytes(plan.budget_nbytes)),
        ("time of a step", format_seconds(plan.noremat_step_s), format_seconds(plan.time_s)),
        ("ops run", f"{ops}", f"{len(runs)}"),
        ("recomputed", "", f"{format_seconds(plan.recomputed_s)}{in_brackets(plan.recomputed_overhead)}"),
        *((("other ways to run ops", "", ways),) if plan.switched else ()),
        ("lower bound", "", f"{plan.lower_bound_overhead:+z.2%}, gap {plan.gap:.2%}"),
    )
    note = f"planned by {plan.solver}" + (f" for {plan.platform}" if plan.platform else "")
    if freed:
        note += "; for steps that find a .grad for every parameter"
    if plan.deadline_hit:
        ended = "Ctrl-C" if plan.solver_stats.get("interrupted") else "the time limit"
        note += f"; {ended} ended the search"
        note += f": more time may save up to {gap} of the step" if (gap := saved_by_time(plan)) else ""
    if plan.waits_for_host:
        note += f"; {plan.launch_note}"
    return Table(
        title=f"{plan.graph_name}, predicted", columns=("", "unplanned", "planned"), rows=rows, note=note
    )


def saved_by_time(plan: Plan) -> str:
    """What a longer search may save at most, as a percentage; empty if that rounds to nothing."""
    return format_change(plan.gap).removeprefix("+")


def fit_table(fit: "Fit") -> Table:
    """The memory of training, part by part, and of the device."""
    rows = [
        ("parameters", fit.parameters_nbytes),
        ("buffers", fit.buffers_nbytes),
        ("gradients of an earlier step", fit.gradients_nbytes),
        (f"states of {fit.optimizer}", fit.states_nbytes),
        ("budget of a step", fit.budget_nbytes),
        ("total", fit.total_nbytes),
    ]
    if fit.device_nbytes is not None:
        rows.append((f"memory of {fit.device}", fit.device_nbytes))
    return Table(
        title="will it fit",
        columns=("", ""),
        rows=tuple((name, format_nbytes(nbytes)) for name, nbytes in rows),
        note=fit.summary(),
    )


def layers_table(plan: Plan, most: int = 12) -> Table:
    """What is recomputed and kept by groups of layers; no rows if the layers are unknown.

    Groups after the first `most` are summed up.
    """
    groups = [g for g in plan.layers if g.repeats or g.unplanned_nbytes != g.planned_nbytes]
    rows = []
    for named in (*([group] for group in groups[:most]), groups[most:]):
        repeats, seconds = sum(g.repeats for g in named), sum(g.repeats_s for g in named)
        kept, unplanned = sum(g.planned_nbytes for g in named), sum(g.unplanned_nbytes for g in named)
        figures = (f"{repeats}", _cost(plan, seconds), format_nbytes(kept), _signed(unplanned - kept))
        if len(named) == 1:
            (group,) = named
            rows.append((group.layers or OUTSIDE, f"{group.recomputed} of {group.of}", *figures))
        elif named:
            rows.append((f"{len(named)} more", "", *figures))
    return Table(
        title="recomputed and kept, by layer",
        columns=("layers", "recomputed", "repeats", "costs", "keeps", "saves"),
        rows=tuple(rows),
        note="keeps: what a layer's ops made and the step still holds when the backward begins",
    )


def ways_table(plan: Plan, most: int = 12) -> Table:
    """Which ops run in another way, by groups of layers; no rows if none does.

    Groups after the first `most` are summed up.
    """
    rows = [
        (
            group.family + (f" in {group.layers}" if group.layers else ""),
            f"{group.on} of {group.of}",
            _short(*group.targets),
            _cost(plan, group.extra_s),
            format_nbytes(group.nbytes),
            _signed(group.saved_nbytes),
        )
        for group in plan.ways[:most]
    ]
    if rest := plan.ways[most:]:
        cost = _cost(plan, sum(group.extra_s for group in rest))
        rows.append((f"{len(rest)} more", f"{sum(g.on for g in rest)}", "", cost, "", ""))
    return Table(
        title="ops that run in another way",
        columns=("way", "on", "ops", "costs", "peak", "saves"),
        rows=tuple(rows),
        note="peak: without recomputation, between the first and the last of these ops",
    )


def _cost(plan: Plan, seconds: float) -> str:
    """Seconds as a share of the unplanned step, if its times are known."""
    return format_change(seconds / plan.noremat_time_s) if plan.noremat_time_s else ""


def _signed(nbytes: int) -> str:
    return f"-{format_nbytes(-nbytes)}" if nbytes < 0 else format_nbytes(nbytes)


def _short(*targets: str, most: int = 2) -> str:
    """The names of the first operators, without namespace and overload."""
    names = [target.removeprefix("aten.").partition(".")[0] for target in targets]
    return ", ".join([*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])])


def rounding_table(plan: Plan) -> Table:
    """Where ops run in a way whose results may differ from the original's within rounding, by layer.

    A family whose layers are unknown has a row for each op.
    """
    groups = plan.rounding_layers
    known = {group.family for group in groups}
    rows = [(g.family, g.layers or OUTSIDE, f"{g.ops}", _short(*g.targets)) for g in groups]
    rows += [(family, "", "1", op) for op, family in plan.rounding if family not in known]
    return Table(
        title="ops that are not bit-identical, within rounding",
        columns=("way", "layers", "number", "ops"),
        rows=tuple(rows),
        note="allowed by ways=rounding",
    )


def repeats_table(graph: Graph, plan: Plan, most: int = 8) -> Table:
    """Recomputed kinds of ops, the most expensive first; kinds after the first `most` are summed up."""
    kinds = repeated_targets(graph, plan.schedule)
    rows = [
        (
            f"{_short(kind.target)} in {kind.layers}" if kind.layers else kind.target,
            f"{kind.count}",
            format_seconds(kind.time_s),
        )
        for kind in kinds[:most]
    ]
    if rest := kinds[most:]:
        count, time_s = sum(kind.count for kind in rest), sum(kind.time_s for kind in rest)
        rows.append((f"{len(rest)} more kinds", f"{count}", format_seconds(time_s)))
    return Table(title="recomputed ops", columns=("op", "count", "time"), rows=tuple(rows))
