"""The results of commands: plans as tables and facts, and the files of plans."""

from pathlib import Path
from typing import Any

from remat_facade.cli.output import CommandOutput
from remat_facade.planning.interrupts import interrupted
from remat_facade.report.table import Table, plan_table, rounding_table
from remat_graph import Graph, Plan, save_order, save_plan


def deliver(output: CommandOutput, made: Plan, plan_out: Path | None, order_out: Path | None = None) -> None:
    """Show a plan; write the plan and its order to the given paths."""
    output.facts["plan"] = plan_facts(made)
    output.show(plan_table(made))
    if made.rounding:
        output.show(rounding_table(made))
    output.save(plan_out, lambda path: save_plan(made, path))
    output.save(order_out, lambda path: save_order(made.schedule.order, path))


def draw(
    output: CommandOutput, graph: Graph, made: Plan, png: Path | None, matrix: Path | None, html: Path | None
) -> None:
    """Write the pictures and the HTML page of a plan to the given paths."""
    if png or matrix or html:
        from remat_facade.report import picture  # imports matplotlib
        from remat_facade.report.html import page
        from remat_facade.report.matrix import draw_matrix

        output.write(png, lambda: picture.png(picture.draw(graph, made)))
        output.write(matrix, lambda: picture.png(draw_matrix(graph, made)))
        output.write(html, lambda: page(graph, made))


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The figures of a plan by the names of its attributes, without its schedule."""
    names = (
        *("graph_name", "solver", "platform", "grads", "budget_nbytes", "peak_nbytes", "live_peak_nbytes"),
        *("noremat_peak_nbytes", "gradient_nbytes", "time_s", "noremat_time_s", "noremat_step_s"),
        *("recomputed_s", "overhead", "recomputed_overhead", "lower_bound_s", "lower_bound_overhead", "gap"),
        *("deadline_hit", "switched", "rounding", "layers", "ways"),
    )
    runs = plan.schedule.order
    counts = {"ops": len(set(runs)), "runs": len(runs), "interrupted": interrupted(plan)}
    return {name: getattr(plan, name) for name in names} | counts


def table_facts(table: Table) -> dict[str, Any]:
    """A table whose rows are objects: the first column is ``name``, if it has no head."""
    heads = [
        head or ("name" if index == 0 else f"column_{index}") for index, head in enumerate(table.columns)
    ]
    rows = [dict(zip(heads, row, strict=True)) for row in table.rows]
    return {"title": table.title, "rows": rows, "note": table.note}
