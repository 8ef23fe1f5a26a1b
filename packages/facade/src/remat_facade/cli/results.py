"""Show the results of commands, and write them to files."""

from pathlib import Path

from remat_facade.cli.terminal import say, show
from remat_facade.files import save_to, write_whole
from remat_facade.report.table import plan_table, rounding_table
from remat_graph import Graph, Plan, save_order, save_plan


def deliver(made: Plan, plan_out: Path | None, order_out: Path | None = None) -> None:
    """Show a plan; write the plan and its order to the given paths."""
    show(plan_table(made))
    if made.rounding:
        show(rounding_table(made))
    if plan_out is not None:
        say(f"wrote {save_to(plan_out, lambda path: save_plan(made, path))}")
    if order_out is not None:
        say(f"wrote {save_to(order_out, lambda path: save_order(made.schedule.order, path))}")


def draw(graph: Graph, made: Plan, png: Path | None, matrix: Path | None, html: Path | None) -> None:
    """Write the pictures and the HTML page of a plan to the given paths."""
    if png is not None:
        from remat_facade.report import picture  # imports matplotlib

        say(f"wrote {write_whole(png, picture.png(picture.draw(graph, made)))}")
    if matrix is not None:
        from remat_facade.report import picture
        from remat_facade.report.matrix import draw_matrix

        say(f"wrote {write_whole(matrix, picture.png(draw_matrix(graph, made)))}")
    if html is not None:
        from remat_facade.report.html import page

        say(f"wrote {write_whole(html, page(graph, made))}")
