"""Draw the data flow of a plan by layer: what the backward gets that was kept, recomputed or moved.

A row is a group of layers, in the order of the forward. The line on the left is the forward, from top to
bottom, as wide as what passes on from the layers above. The line on the right is the backward, from bottom to
top. Between them is an arrow for what is kept, one for what is recomputed, and one for what is swapped in
from the host. The wider a line, the more bytes.
"""

from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat_facade.report.flows import LayerFlow, layer_flows
from remat_facade.report.picture import WIDE, Frame, Look, headline, image, new_figure
from remat_graph import Graph, Plan, format_nbytes
from remat_graph.serialization.outputs import write_whole
from remat_graph.units import format_change

LINE, MARGIN = 0.26, 0.2
"""Inches of a line of a row, and between rows."""

MOST_LETTERS = 30
"""Letters of a layer's name for which there is space."""


def draw_dataflow(graph: Graph, plan: Plan, look: Look = WIDE) -> Figure:
    """The figure of a plan's data flow.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.
        look: its colours and width.
    """
    rows = layer_flows(graph, plan)
    heights = [_height(row, look) for row in rows]
    with new_figure(look, sum(heights) + (2.2 if look.narrow else 1.6)) as figure:
        frame = headline(figure, look, *_finding(plan, rows))
        axes = _canvas(figure, frame, sum(heights))
        left, right = (0.3, look.width - 0.3) if look.narrow else (3.2, look.width - 2.2)
        widest = max((max(row.nbytes, row.onward_nbytes) for row in rows), default=0)
        for x, text in ((left, "forward ↓"), (right, "backward ↑")):
            align = "center" if not look.narrow else "left" if x == left else "right"
            at = x if not look.narrow else x + (-0.16 if x == left else 0.16)
            axes.text(at, sum(heights) + 0.12, text, ha=align, va="bottom", color=look.palette.muted)
        top = sum(heights)
        nodes = []
        for row, height in zip(rows, heights, strict=True):
            nodes.append(_draw_row(axes, plan, row, top, (left, right), widest, look))
            top -= height
        for row, (above, below) in zip(rows, pairwise(nodes), strict=False):
            width = _width(row.onward_nbytes, widest) / 2  # narrower than the nodes
            axes.plot([left, left], [above, below], color=look.palette.unplanned, lw=width, zorder=1)
            axes.plot([right, right], [above, below], color=look.palette.unplanned, lw=0.8, zorder=1)
    return figure


def write_dataflow(path: str | Path, graph: Graph, plan: Plan) -> Path:
    """Write the picture of a plan's data flow as PNG, SVG or PDF, by the path's suffix.

    Raises:
        CannotWrite: the file cannot be written.
    """
    return write_whole(path, image(draw_dataflow(graph, plan), Path(path)))


def _finding(plan: Plan, rows: tuple[LayerFlow, ...]) -> tuple[str, str]:
    parts = [
        f"{what} {format_nbytes(nbytes)}"
        for what, nbytes in (
            ("keeps", sum(row.kept_nbytes for row in rows)),
            ("recomputes", sum(row.recomputed_nbytes for row in rows)),
            ("moves", sum(row.moved_nbytes for row in rows)),
        )
        if nbytes
    ]
    title = f"{plan.graph_name}: {', '.join(parts) or 'keeps nothing'}"
    about = "by layer, wider lines are more bytes; on the right, extra time of repeats"
    return title, f"{about}  ·  budget {format_nbytes(plan.budget_nbytes)}, time {plan.overhead:+z.1%}"


def _canvas(figure: Figure, frame: Frame, height: float) -> Axes:
    """A plot without axes, in inches."""
    total = figure.get_figheight()
    bottom = 0.1
    axes = figure.add_axes((0, bottom / total, 1, (total - frame.top - bottom) / total))
    axes.set_xlim(0, frame.look.width)
    axes.set_ylim(height - (total - frame.top - bottom) + 0.4, height + 0.4)
    axes.set_axis_off()
    return axes


def _lines(row: LayerFlow, look: Look) -> list[tuple[str, int, str]]:
    """What a row shows, one line each: what happens, to how many bytes, and its colour."""
    colours = look.palette
    every = (
        ("kept", row.kept_nbytes, colours.planned),
        ("recomputed", row.recomputed_nbytes, colours.repeat),
        ("moved", row.moved_nbytes, colours.moved),
    )
    return [line for line in every if line[1]] or [("nothing kept", 0, colours.muted)]


def _height(row: LayerFlow, look: Look) -> float:
    return (len(_lines(row, look)) + look.narrow) * LINE + MARGIN


def _width(nbytes: int, widest: int) -> float:
    """Points of a line; the fewest bytes have a line too."""
    return 0.8 + 8 * nbytes / widest if widest else 0.8


def _shortened(name: str) -> str:
    """The end of a long name, which tells layers apart."""
    return name if len(name) <= MOST_LETTERS else "\u2026" + name[1 - MOST_LETTERS :]


def _draw_row(
    axes: Axes, plan: Plan, row: LayerFlow, top: float, ends: tuple[float, float], widest: int, look: Look
) -> float:
    """Draw one row from its top; return the height of its nodes."""
    colours, (left, right) = look.palette, ends
    lines = _lines(row, look)
    first = top - MARGIN / 2 - (1.5 if look.narrow else 0.5) * LINE
    middle = first - (len(lines) - 1) * LINE / 2
    name = _shortened(row.layers) + (f"  \u00d7{row.of}" if row.of > 1 else "")
    cost = format_change(row.repeats_s / plan.noremat_time_s) if plan.noremat_time_s else ""
    if look.narrow:
        at = first + LINE
        axes.text(left + 0.16, at, name, va="center", color=colours.ink, weight="bold", parse_math=False)
        axes.text(right - 0.16, at, cost, va="center", ha="right", color=colours.repeat)
    else:
        axes.text(left - 0.22, middle, name, va="center", ha="right", color=colours.ink, parse_math=False)
        axes.text(right + 0.22, middle, cost, va="center", color=colours.repeat)
    for number, (what, nbytes, colour) in enumerate(lines):
        y = first - number * LINE
        text = f"{what} {format_nbytes(nbytes)}" if nbytes else what
        if nbytes:
            width, tip = _width(nbytes, widest), right - 0.13
            dash = (0, (2.5, 1.2)) if what == "recomputed" else "-"
            axes.plot([left, tip], [y, y], color=colour, lw=width, ls=dash, dash_capstyle="butt", zorder=2)
            axes.plot([tip], [y], marker=">", ms=5 + width, mew=0, color=colour, zorder=2)
        box = {"facecolor": colours.paper, "edgecolor": "none", "pad": 2.5}
        axes.text((left + right) / 2, y, text, ha="center", va="center", color=colour, bbox=box, zorder=3)
    span = (len(lines) - 1) * LINE / 2 + 0.07
    for x in ends:
        axes.plot(
            [x, x], [middle - span, middle + span], color=colours.ink, lw=5, solid_capstyle="round", zorder=4
        )
    return middle
