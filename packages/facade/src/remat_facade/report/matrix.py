"""Draw the matrices of a plan as the Checkmate paper does: runs per stage, and values kept between stages.

A row is a stage, from the first at the top. On the left a column is an op (the paper's R), on the right a
value of more than 0 bytes (the paper's S). Large matrices are pooled into cells. Cells are vector shapes, so
that their colours follow the light or dark mode of the HTML page.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from remat_facade.report.picture import WIDE, Look, annotate, headline, legend, new_figure
from remat_facade.report.stages import StageMatrices, pooled, stages
from remat_graph import Graph, Plan

CELLS = 240  # most rows and columns of a panel: a cell is about three pixels wide
SHADES = (0.3, 0.5, 0.75, 1.0)  # opacity of a cell that is live up to a quarter, a half, ...


def draw_matrix(graph: Graph, plan: Plan, look: Look = WIDE) -> Figure:
    """The figure of a plan's matrices.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.
        look: its colours and width; the matrices of a narrow figure are below each other.
    """
    cut = stages(graph, plan.schedule)
    shown = np.array([graph.values[v].nbytes > 0 for v in cut.values], np.bool_)
    if not shown.any():  # a graph without sizes
        shown[:] = True
    muted = look.palette.muted
    with new_figure(look, 9.6 if look.narrow else 6.3) as figure:
        count, repeats = len(cut.ops), int(cut.repeats.sum())
        joined = -(-max(count, 1) // CELLS)
        pooling = f"  ·  {joined} by {joined} entries per cell, paler if fewer are live" if joined > 1 else ""
        frame = headline(
            figure,
            look,
            f"{plan.graph_name}: runs and live values by stage",
            f"{count} stages, each ends with the first run of the next op  ·  {repeats} repeats{pooling}",
        )
        frame.top += 0.25  # the legend
        shape = (2, 1) if look.narrow else (1, 2)
        grid = figure.add_gridspec(*shape, wspace=0.14, hspace=0.24, **frame.fractions())
        runs, live = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        _draw_runs(runs, cut, look)
        _draw_live(live, graph, cut, shown, look)
        _style(runs, look, count, cut.boundary, count, cut.boundary)
        before = int(shown[: cut.forward_values].sum())
        _style(live, look, int(shown.sum()), before, count, cut.boundary)
        runs.set_xlabel("ops, in the order of their first runs", color=muted)
        runs.set_ylabel("stages, from the first at the top", color=muted)
        live.set_xlabel("values above 0 bytes, as they become live", color=muted)
        if look.narrow:
            live.set_ylabel("stages, from the first at the top", color=muted)
        else:
            live.tick_params(labelleft=False)
    return figure


def _draw_runs(axes: Axes, cut: StageMatrices, look: Look) -> None:
    """R: first runs are the diagonal, recomputations are left of it."""
    colours = look.palette
    first = np.eye(len(cut.ops), dtype=np.bool_)
    for matrix, colour, zorder in ((first, colours.unplanned, 2), (cut.repeats, colours.repeat, 3)):
        _fill(axes, pooled(matrix, CELLS) > 0, matrix.shape, colour, 1.0, zorder)
    legend(axes, [("first run", colours.unplanned, 1.0), ("recomputed", colours.repeat, 1.0)], look)


def _draw_live(
    axes: Axes, graph: Graph, cut: StageMatrices, shown: npt.NDArray[np.bool_], look: Look
) -> None:
    """S: outputs and gradients in one colour, values that the step itself needs in another."""
    colours = look.palette
    live = cut.live[:, shown]
    pinned = np.array([graph.values[v].pinned for v in cut.values], np.bool_)[shown]
    entries = [("live when the stage begins", colours.planned, 1.0)]
    for matrix, colour, zorder in (
        (live & ~pinned, colours.planned, 3),
        (live & pinned, colours.gradients, 2),
    ):
        share = pooled(matrix, CELLS)
        level = np.searchsorted((0.0, 0.25, 0.5, 0.75), share, side="left")  # level 0 is an empty cell
        for shade, alpha in enumerate(SHADES, start=1):
            _fill(axes, level == shade, matrix.shape, colour, alpha, zorder)
    if pinned.any():
        entries.append(("outputs and gradients", colours.gradients, 1.0))
    legend(axes, entries, look)


def _fill(
    axes: Axes, cells: npt.NDArray[np.bool_], shape: tuple[int, ...], colour: str, alpha: float, zorder: int
) -> None:
    """Draw the true cells as one shape, without seams; `shape` is the shape of the matrix before pooling."""
    corners = [corner for column, top, bottom in _bars(cells) for corner in _corners(column, top, bottom)]
    if not corners:
        return
    tall, wide = (-(-size // CELLS) for size in shape)
    points = np.minimum(np.array(corners) * (wide, tall), shape[::-1]) - 0.5
    codes = np.tile(
        np.array([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], Path.code_type), len(points) // 5
    )
    patch = PathPatch(Path(points, codes), facecolor=colour, alpha=alpha, lw=0, zorder=zorder, snap=False)
    axes.add_patch(patch)


def _bars(cells: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of true cells in each column: (column, first row, row after the last)."""
    padded = np.zeros((cells.shape[0] + 2, cells.shape[1]), np.int8)
    padded[1:-1] = cells
    turns = np.diff(padded, axis=0).T
    for (column, top), (_, bottom) in zip(np.argwhere(turns == 1), np.argwhere(turns == -1), strict=True):
        yield int(column), int(top), int(bottom)


def _corners(column: int, top: int, bottom: int) -> list[tuple[int, int]]:
    left, right = column, column + 1
    return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


def _style(axes: Axes, look: Look, wide: int, forward_wide: int, tall: int, forward_tall: int) -> None:
    colours = look.palette
    axes.set_facecolor(colours.paper)
    axes.set_xlim(-0.5, max(wide, 1) - 0.5)
    axes.set_ylim(max(tall, 1) - 0.5, -0.5)
    for spine in axes.spines.values():
        spine.set_color(colours.grid)
    axes.tick_params(colors=colours.muted, length=0, pad=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.axvline(forward_wide - 0.5, color=colours.muted, lw=0.8, ls=(0, (1, 2)), zorder=4)
    axes.axhline(forward_tall - 0.5, color=colours.muted, lw=0.8, ls=(0, (1, 2)), zorder=4)
    point, units = (1, forward_tall - 0.5), ("axes fraction", "data")
    for text, offset, align in (("forward", 5, "bottom"), ("backward", -5, "top")):
        annotate(axes, text, point, units, (-6, offset), colours.muted, ha="right", va=align)
