"""What commands make: plans, orders and pictures, shown and written."""

from pathlib import Path
from typing import TYPE_CHECKING

from remat_facade.cli.terminal import say, show
from remat_facade.files import save_to, write_whole

if TYPE_CHECKING:
    from remat_graph import Graph, Plan


def deliver(made: "Plan", plan_out: Path | None, order_out: Path | None = None) -> None:
    """Show a plan; write it, and its order, where a path is given."""
    from remat_facade.report.table import plan_table
    from remat_graph import save_order, save_plan

    show(plan_table(made))
    if plan_out is not None:
        say(f"wrote {save_to(plan_out, lambda path: save_plan(made, path))}")
    if order_out is not None:
        say(f"wrote {save_to(order_out, lambda path: save_order(made.schedule.order, path))}")


def draw(graph: "Graph", made: "Plan", png: Path | None, matrix: Path | None, html: Path | None) -> None:
    """Write pictures of a plan and its page, where a path is given."""
    if png is not None:
        from remat_facade.report import picture

        say(f"wrote {write_whole(png, picture.png(picture.draw(graph, made)))}")
    if matrix is not None:
        from remat_facade.report.matrix import draw_matrix
        from remat_facade.report.picture import png as as_png

        say(f"wrote {write_whole(matrix, as_png(draw_matrix(graph, made)))}")
    if html is not None:
        from remat_facade.report.html import page

        say(f"wrote {write_whole(html, page(graph, made))}")
