"""Draw a plan as Checkmate's figures do: what runs in which stage, and what is kept from stage to stage.

Time runs down: a row is a stage, which ends with the first run of the next op. Left, a column is an op (the
paper's R); right, a value (the paper's S); those of 0 bytes are left out. Large matrices are joined to cells
before they are drawn; the cells are shapes rather than pixels, so that in the HTML page they follow the
reader's light or dark mode.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator

from remat_facade.report.picture import Palette, legend
from remat_facade.report.stages import Stages, pooled, stages
from remat_graph import Graph, Plan

CELLS = 240  # rows and columns of a panel: a cell is some three pixels wide
SHADES = (0.3, 0.5, 0.75, 1.0)  # opacity of a cell of which up to a quarter, a half, ... is live


def draw_matrix(graph: Graph, plan: Plan, palette: Palette | None = None) -> Figure:
    """The figure of a plan's matrices.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.
        palette: colours.
    """
    palette = palette or Palette()
    cut = stages(graph, plan.schedule)
    shown = np.array([graph.values[v].nbytes > 0 for v in cut.values], np.bool_)
    if not shown.any():  # a graph that knows no sizes
        shown[:] = True
    with rc_context({"font.size": 10, "font.family": ["DejaVu Sans"], "axes.unicode_minus": False}):
        figure = Figure(figsize=(11, 6.3), facecolor=palette.paper)
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1, 2, left=0.085, right=0.975, top=0.80, bottom=0.085, wspace=0.14)
        runs, live = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        _headline(figure, plan, cut, palette)
        _draw_runs(runs, cut, palette)
        _draw_live(live, graph, cut, shown, palette)
        _dress(runs, len(cut.ops), cut.boundary, len(cut.ops), cut.boundary, palette)
        before = int(shown[: cut.forward_values].sum())
        _dress(live, int(shown.sum()), before, len(cut.ops), cut.boundary, palette)
        runs.set_xlabel("ops, in the order of their first runs", color=palette.muted)
        runs.set_ylabel("stages, from the first down", color=palette.muted)
        live.set_xlabel("values of more than 0 bytes, in the order in which they come", color=palette.muted)
        live.tick_params(labelleft=False)
    return figure


def _headline(figure: Figure, plan: Plan, cut: Stages, palette: Palette) -> None:
    repeats = int(cut.repeats.sum())
    figure.text(
        0.085,
        0.925,
        f"{plan.graph_name}: what runs when, and what is kept",
        color=palette.ink,
        size=15,
        weight="bold",
        parse_math=False,
    )
    joined = -(-max(len(cut.ops), 1) // CELLS)
    figure.text(
        0.085,
        0.875,
        f"{len(cut.ops)} stages, each ends with the first run of the next op  ·  {repeats} repeats"
        + (f"  ·  drawn {joined} by {joined}, paler where fewer values are kept" if joined > 1 else ""),
        color=palette.muted,
        size=10,
    )


def _draw_runs(axes: Axes, cut: Stages, palette: Palette) -> None:
    """R: first runs are the diagonal, repeats stand left of it."""
    first = np.eye(len(cut.ops), dtype=np.bool_)
    for matrix, colour, zorder in ((first, palette.unplanned, 2), (cut.repeats, palette.repeat, 3)):
        _fill(axes, pooled(matrix, CELLS) > 0, matrix.shape, colour, 1.0, zorder)
    legend(axes, [("runs first", palette.unplanned, 1.0), ("runs again", palette.repeat, 1.0)], palette)


def _draw_live(axes: Axes, graph: Graph, cut: Stages, shown: npt.NDArray[np.bool_], palette: Palette) -> None:
    """S: what the caller is owed (outputs, gradients) apart from what is kept for the step itself."""
    live = cut.live[:, shown]
    pinned = np.array([graph.values[v].pinned for v in cut.values], np.bool_)[shown]
    entries = [("kept when a stage begins", palette.planned, 1.0)]
    for matrix, colour, zorder in (
        (live & ~pinned, palette.planned, 3),
        (live & pinned, palette.gradients, 2),
    ):
        share = pooled(matrix, CELLS)
        level = np.searchsorted((0.0, 0.25, 0.5, 0.75), share, side="left")  # 0 is nothing
        for shade, alpha in enumerate(SHADES, start=1):
            _fill(axes, level == shade, matrix.shape, colour, alpha, zorder)
    if pinned.any():
        entries.append(("outputs and gradients", palette.gradients, 1.0))
    legend(axes, entries, palette)


def _fill(
    axes: Axes,
    cells: npt.NDArray[np.bool_],
    shape: tuple[int, ...],
    colour: str,
    alpha: float,
    zorder: int,
) -> None:
    """Draw the cells that are set as one shape, so that no seam shows between neighbours.

    Args:
        axes: where to.
        cells: booleans.
        shape: rows and columns of the matrix that the cells stand for: the units of the axes.
        colour: of the shape.
        alpha: its opacity.
        zorder: what it covers.
    """
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
    """Maximal runs of set cells down each column: (column, first row, row after the last)."""
    padded = np.zeros((cells.shape[0] + 2, cells.shape[1]), np.int8)
    padded[1:-1] = cells
    turns = np.diff(padded, axis=0).T
    for (column, top), (_, bottom) in zip(np.argwhere(turns == 1), np.argwhere(turns == -1), strict=True):
        yield int(column), int(top), int(bottom)


def _corners(column: int, top: int, bottom: int) -> list[tuple[int, int]]:
    left, right = column, column + 1
    return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


def _dress(axes: Axes, wide: int, forward_wide: int, tall: int, forward_tall: int, palette: Palette) -> None:
    axes.set_facecolor(palette.paper)
    axes.set_xlim(-0.5, max(wide, 1) - 0.5)
    axes.set_ylim(max(tall, 1) - 0.5, -0.5)
    for spine in axes.spines.values():
        spine.set_color(palette.grid)
    axes.tick_params(colors=palette.muted, length=0, pad=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
    axes.axvline(forward_wide - 0.5, color=palette.muted, lw=0.8, ls=(0, (1, 2)), zorder=4)
    axes.axhline(forward_tall - 0.5, color=palette.muted, lw=0.8, ls=(0, (1, 2)), zorder=4)
    for text, offset, align in (("forward", 5, "bottom"), ("backward", -5, "top")):
        axes.annotate(
            text,
            (1, forward_tall - 0.5),
            xycoords=("axes fraction", "data"),
            xytext=(-6, offset),
            textcoords="offset points",
            color=palette.muted,
            ha="right",
            va=align,
        )
