"""Tables as data: what the terminal and the HTML page show alike."""

from typing import TYPE_CHECKING

import attrs

from remat_facade.report.trace import repeated_targets
from remat_graph import Graph, Plan, format_nbytes, format_seconds
from remat_solvers import MinBudget
from remat_solvers.queries import MaxBatch

if TYPE_CHECKING:  # it imports torch
    from remat_facade.planning.memory_fit import Fit


@attrs.frozen(kw_only=True)
class Table:
    """Rows of text.

    Attributes:
        title: what it shows.
        columns: their heads; the first column names the row.
        rows: as many texts each as there are columns.
        note: one line below.
        prose: whether the other columns are text rather than figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    prose: bool = False


def smallest_table(graph: Graph, found: MinBudget) -> Table:
    """The smallest budget, and below which none can work."""
    rows = (
        ("smallest budget with a schedule", format_nbytes(found.nbytes), f"{found.nbytes}"),
        ("none exists below", format_nbytes(found.floor_nbytes), f"{found.floor_nbytes}"),
        (
            f"what {found.floor_op} alone needs",
            format_nbytes(found.floor_op_nbytes),
            f"{found.floor_op_nbytes}",
        ),
    )
    note = found.floor_reason
    if found.cut_short:
        note += "; time was up before smaller budgets were tried"
    return Table(title=graph.name, columns=("", "", "bytes"), rows=rows, note=note)


def batch_table(name: str, budget_nbytes: int, found: MaxBatch) -> Table:
    """The largest batch, its plan, and the size that was too large."""
    rows = [("largest batch", f"{found.batch}"), ("budget", format_nbytes(budget_nbytes))]
    plan = found.solution
    if plan is not None and plan.overhead is not None and plan.peak_nbytes is not None:
        rows += [
            ("peak", format_nbytes(plan.peak_nbytes)),
            ("extra time", f"{plan.overhead:.2%}"),
            ("no schedule costs less than", f"{plan.lower_bound_overhead:.2%}"),
        ]
    if found.refused is not None:
        rows.append(("refused", f"{found.refused}"))
    return Table(title=name, columns=("", ""), rows=tuple(rows))


def plan_table(plan: Plan) -> Table:
    """The figures of a plan, beside those of the unplanned step."""
    runs = plan.schedule.order
    ops = len(set(runs))
    rows = (
        ("peak, allocator", format_nbytes(plan.noremat_peak_nbytes), format_nbytes(plan.peak_nbytes)),
        ("peak, tensors alone", "", format_nbytes(plan.live_peak_nbytes)),
        ("gradients in it", format_nbytes(plan.gradient_nbytes), format_nbytes(plan.gradient_nbytes)),
        ("budget", "", format_nbytes(plan.budget_nbytes)),
        ("time of a step", format_seconds(plan.noremat_time_s), format_seconds(plan.time_s)),
        ("ops run", f"{ops}", f"{len(runs)}"),
        ("recomputed", "", f"{format_seconds(plan.recomputed_s)} (+{plan.overhead:.2%})"),
        ("at best", "", f"+{plan.lower_bound_overhead:.2%}, gap {plan.gap:.2%}"),
    )
    note = f"planned by {plan.solver}" + (f" for {plan.platform}" if plan.platform else "")
    if plan.deadline_hit:
        note += "; the time limit cut in, so another run may end elsewhere"
    return Table(
        title=f"{plan.graph_name}, predicted", columns=("", "unplanned", "planned"), rows=rows, note=note
    )


def fit_table(fit: "Fit") -> Table:
    """What training holds, summed up against the device."""
    rows = [
        ("parameters", fit.parameters_nbytes),
        ("buffers", fit.buffers_nbytes),
        ("gradients of an earlier step", fit.gradients_nbytes),
        (f"states of {fit.optimizer}", fit.states_nbytes),
        ("budget of a step", fit.budget_nbytes),
        ("in all", fit.total_nbytes),
    ]
    if fit.device_nbytes is not None:
        rows.append((f"memory of {fit.device}", fit.device_nbytes))
    return Table(
        title="will it fit",
        columns=("", ""),
        rows=tuple((name, format_nbytes(nbytes)) for name, nbytes in rows),
        note=fit.summary(),
    )


def repeats_table(graph: Graph, plan: Plan, most: int = 8) -> Table:
    """What is recomputed, by kind of op, the dearest first.

    Args:
        graph: the graph of the plan.
        plan: the plan.
        most: how many kinds to name; the rest is summed up.
    """
    kinds = repeated_targets(graph, plan.schedule)
    rows = [(kind.target, f"{kind.count}", format_seconds(kind.time_s)) for kind in kinds[:most]]
    if rest := kinds[most:]:
        count, time_s = sum(kind.count for kind in rest), sum(kind.time_s for kind in rest)
        rows.append((f"{len(rest)} more kinds", f"{count}", format_seconds(time_s)))
    return Table(title="what runs again", columns=("op", "times", "time"), rows=tuple(rows))
