"""The results of commands: plans as tables and facts, and the files of plans."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from remat_facade.cli.output import CommandOutput
from remat_facade.report.table import Table, plan_table, rounding_table
from remat_graph import Graph, Plan, save_order, save_plan
from remat_solvers.facts import plan_facts


def deliver(output: CommandOutput, made: Plan, plan_out: Path | None, order_out: Path | None = None) -> None:
    """Show a plan; write the plan and its order to the given paths."""
    output.facts["plan"] = plan_facts(made)
    output.show(plan_table(made))
    if made.rounding:
        output.show(rounding_table(made))
    output.save(plan_out, lambda path: save_plan(made, path))
    output.save(order_out, lambda path: save_order(made.schedule.order, path))


def draw(output: CommandOutput, graph: Graph, made: Plan, places: Mapping[str, Path | None]) -> None:
    """Write what `remat show` draws of a plan, by the options that give the paths."""
    if not any(places.values()):
        return
    from remat_facade.report import picture  # imports matplotlib
    from remat_facade.report.chrome_trace import write_trace
    from remat_facade.report.dataflow import write_dataflow
    from remat_facade.report.html import page
    from remat_facade.report.matrix import draw_matrix
    from remat_facade.report.snapshot import write_snapshot

    for name, figure in (("--png", picture.draw), ("--matrix", draw_matrix)):
        path = places[name]
        if path is not None:
            output.write(path, partial(_image, figure, graph, made, path))
    output.write(places["--html"], lambda: page(graph, made))
    for name, write in (
        ("--dataflow", write_dataflow),
        ("--snapshot", write_snapshot),
        ("--trace", write_trace),
    ):
        output.save(places[name], partial(_written, write, graph, made))


def _image(figure: Callable[[Graph, Plan], Any], graph: Graph, made: Plan, path: Path) -> bytes:
    from remat_facade.report.picture import image

    return image(figure(graph, made), path)


def _written(write: Callable[[Path, Graph, Plan], Path], graph: Graph, made: Plan, path: Path) -> None:
    write(path, graph, made)


def table_facts(table: Table) -> dict[str, Any]:
    """A table whose rows are objects: the first column is ``name``, if it has no head."""
    heads = [
        head or ("name" if index == 0 else f"column_{index}") for index, head in enumerate(table.columns)
    ]
    rows = [dict(zip(heads, row, strict=True)) for row in table.rows]
    return {"title": table.title, "rows": rows, "note": table.note}
