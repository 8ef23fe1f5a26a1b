"""Draw a plan: memory over time of the planned and the unplanned step, and the recomputations.

The figure is saved as PNG, SVG or PDF or, for the HTML page, as an SVG element whose colours are CSS
variables, so that it follows the light or dark mode of the page.
"""

import io
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import attrs
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from remat_facade.report.labels import Labels, Spot
from remat_facade.report.picture_file import format_of
from remat_facade.report.trace import Trace, trace
from remat_graph import Graph, Plan, Schedule, format_nbytes
from remat_graph.contexts import context


@attrs.frozen(kw_only=True)
class Palette:
    """Colours of the light mode by meaning; all differ, because `svg` replaces them by their text."""

    paper: str = "#fdfdfc"
    ink: str = "#1d2530"
    muted: str = "#66717f"
    grid: str = "#e4e7eb"
    unplanned: str = "#98a2ae"
    planned: str = "#2166c4"
    gradients: str = "#123c7a"
    repeat: str = "#d9640a"
    budget: str = "#b3261e"
    moved: str = "#0a8a68"


LIGHT = Palette()
"""The colours of the light mode; `svg` replaces them by the variables of the page."""

DARK = Palette(
    paper="#15191f",
    ink="#e8ebef",
    muted="#98a3b1",
    grid="#2a313b",
    unplanned="#7d8996",
    planned="#5b9bf0",
    gradients="#a9cbfa",
    repeat="#f59546",
    budget="#f2786f",
    moved="#3fc9a0",
)
"""The colours of the dark mode."""


@attrs.frozen(kw_only=True)
class Look:
    """How a figure is drawn.

    Attributes:
        palette: its colours.
        narrow: whether it is for screens of about 400 pixels; the text keeps its size.
    """

    palette: Palette = LIGHT
    narrow: bool = False

    @property
    def width(self) -> float:
        """Width of the figure in inches."""
        return 4.4 if self.narrow else 11.0

    @property
    def pixels(self) -> int:
        """Width of the screen that it is for."""
        return 400 if self.narrow else 1280


WIDE = Look()
"""The look of a figure unless another is given."""


@attrs.define
class Frame:
    """Margins of a figure in inches, from its edges to its plots."""

    figure: Figure
    look: Look
    left: float
    right: float
    bottom: float
    top: float

    def fractions(self) -> dict[str, Any]:
        """The same as fractions of the figure, as matplotlib takes them."""
        width, height = self.figure.get_size_inches()
        return {
            "left": self.left / width,
            "right": 1 - self.right / width,
            "bottom": self.bottom / height,
            "top": 1 - self.top / height,
        }


@context
def new_figure(look: Look, height: float) -> Generator[Figure, None, None]:
    """A figure of this height in inches, in the common font; it uses no global state of matplotlib."""
    with rc_context({"font.size": 10, "font.family": ["DejaVu Sans"], "axes.unicode_minus": False}):
        figure = Figure((look.width, height), look.pixels / look.width, facecolor=look.palette.paper)
        FigureCanvasAgg(figure)
        yield figure


def headline(figure: Figure, look: Look, title: str, subtitle: str) -> Frame:
    """Write a title and a subtitle at the top, in as many lines as they need; return what they leave."""
    size, columns = (12, 38) if look.narrow else (15, 84)
    left = 0.7 if look.narrow else 0.94
    below = 0.14
    for text, points, most, colour, weight in (
        (title, size, columns, look.palette.ink, "bold"),
        (subtitle, 10, 50 if look.narrow else 130, look.palette.muted, "normal"),
    ):
        # A line begins neither with a dot nor with a unit.
        text = re.sub(r"(\d) (\w?i?B\b|%)", "\\1\u00a0\\2", text.replace("  ·  ", "\u00a0\u00a0·\u00a0 "))
        for line in wrap(text, most):
            below += points * 1.35 / 72
            x, y = (0.14 if look.narrow else left) / look.width, 1 - below / figure.get_figheight()
            figure.text(x, y, line, color=colour, size=points, weight=weight, parse_math=False)
        below += 0.06
    return Frame(figure, look, left, 0.16 if look.narrow else 0.27, 0.6, below + 0.1)


def draw(graph: Graph, plan: Plan, look: Look = WIDE) -> Figure:
    """The figure of a plan.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.
        look: its colours and width.
    """
    planned = trace(graph, plan.schedule, plan.grads)
    without = trace(graph, Schedule.unplanned(graph), plan.grads)
    colours = look.palette
    with new_figure(look, 7.4 if look.narrow else 7) as figure:
        frame = headline(
            figure,
            look,
            f"{plan.graph_name}: {format_nbytes(plan.peak_nbytes)} instead of "
            f"{format_nbytes(plan.noremat_peak_nbytes)}, with {plan.overhead:+z.1%} time",
            f"budget {format_nbytes(plan.budget_nbytes)}  ·  {len(graph.ops)} ops, {len(planned.repeats)} "
            f"repeats  ·  lower bound {plan.lower_bound_overhead:+z.1%}  ·  solver {plan.solver}",
        )
        frame.top += 0.25  # the legend
        grid = figure.add_gridspec(2, 1, height_ratios=[3, 2], hspace=0.24, **frame.fractions())
        memory, runs = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        end_s = max(planned.end_s, without.end_s)
        scale, unit = _time_unit(end_s, planned.has_times)
        for axes in (memory, runs):
            style_axes(axes, frame)
            axes.set_xlim(0, end_s * scale * 1.002 or 1)
            axes.axvline(planned.boundary_s * scale, color=colours.muted, lw=0.8, ls=(0, (1, 2)), zorder=1)
        _draw_memory(memory, plan, planned, without, scale, look)
        _draw_runs(runs, graph, planned, scale, look)
        memory.tick_params(labelbottom=False)
        runs.set_xlabel(f"time ({unit})", color=colours.muted)
    return figure


def image(figure: Figure, path: Path) -> bytes:
    """The figure in the format that a path's suffix names: PNG, SVG or PDF.

    Raises:
        CannotWrite: the suffix is that of no picture.
    """
    kind = format_of(path)
    if kind == "png":
        return png(figure)
    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "remat"}):  # the same bytes for the same figure
        figure.savefig(out, format=kind, metadata={"Date" if kind == "svg" else "CreationDate": None})
    return out.getvalue()


def png(figure: Figure, pixels: int | None = None) -> bytes:
    """The figure as PNG with this width; by default 150 pixels for each inch."""
    dpi = 150.0 if pixels is None else pixels / figure.get_figwidth()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure, name: str = "remat") -> str:
    """The figure as an SVG element whose colours are CSS variables named as in `Palette`.

    Args:
        figure: drawn in the colours of `LIGHT`.
        name: differs for each figure of a page; the ids in the element follow from it.
    """
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # unused ids, which repeat in every figure
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', system-ui, sans-serif")
    for name, colour in attrs.asdict(LIGHT).items():
        text = text.replace(colour, f"var(--{name})")
    return text


def _draw_memory(axes: Axes, plan: Plan, planned: Trace, without: Trace, scale: float, look: Look) -> None:
    colours = look.palette
    highest = max(without.peak_nbytes, planned.peak_nbytes)
    size, unit = byte_unit(max(highest, plan.budget_nbytes))
    axes.set_ylabel(f"predicted memory ({unit})", color=colours.muted)
    above = 1.3 if look.narrow else 1.18  # "forward" and "backward" are above all curves
    top = highest / size * above or 1
    axes.set_ylim(0, top)
    labels = Labels(axes)

    for shown, colour, alpha in ((without, colours.unplanned, 0.16), (planned, colours.planned, 0.30)):
        x, y = _stairs(shown, shown.held_nbytes, scale, size)
        axes.fill_between(x, y, color=colour, alpha=alpha, lw=0)
        axes.plot(x, y, color=colour, lw=1.3)
        labels.avoid_stairs(x, y)
    entries = [("unplanned", colours.unplanned, 0.5), ("planned", colours.planned, 0.6)]
    if any(planned.gradient_nbytes):
        entries.append(("finished gradients", colours.gradients, 0.85))
        x, y = _stairs(planned, planned.gradient_nbytes, scale, size)
        axes.fill_between(x, y, color=colours.gradients, alpha=0.75, lw=0)
    legend(axes, entries, look)

    boundary, end = planned.boundary_s * scale, axes.get_xlim()[1]
    labels.avoid_stairs([boundary, boundary], [0, top])
    for text, offset, align in (("forward", -5, "right"), ("backward", 5, "left")):
        if 0 < boundary < end:
            labels.put(text, colours.muted, [Spot(boundary, top, (offset, -3), align, "top")], optional=True)
    budget = plan.budget_nbytes / size
    if budget < top:
        axes.axhline(budget, color=colours.budget, lw=1.2, ls=(0, (5, 3)))
        places = [end * share / 200 for share in range(200, 0, -1)]
        spots = [
            Spot(x, budget, (-3, offset), "right", va)
            for offset, va in ((4, "bottom"), (-4, "top"))
            for x in places
        ]
        labels.put(f"budget {format_nbytes(plan.budget_nbytes)}", colours.budget, spots)


def annotate(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    units: tuple[str, str],
    offset: tuple[int, int],
    colour: str,
    **align: Any,
) -> None:
    """Write `text` `offset` points from a point, whose coordinates have these units of matplotlib."""
    at: dict[str, Any] = {"xycoords": units, "xytext": offset, "textcoords": "offset points"}
    axes.annotate(text, point, color=colour, **at, **align)


def legend(
    axes: Axes, entries: Sequence[tuple[str, str, float]], look: Look, columns: int | None = None
) -> None:
    """A legend above the axes, where it covers no curve; an entry is (name, colour, opacity)."""
    legend = axes.legend(
        [Patch(color=colour, alpha=alpha, lw=0) for _, colour, alpha in entries],
        [name for name, _, _ in entries],
        loc="lower left",
        bbox_to_anchor=(-0.15 if look.narrow else 0, 1.0),
        ncols=columns or len(entries),
        frameon=False,
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=0.9 if look.narrow else 1.6,
    )
    for text in legend.get_texts():
        text.set_color(look.palette.ink)


def _draw_runs(axes: Axes, graph: Graph, planned: Trace, scale: float, look: Look) -> None:
    colours = look.palette
    again = {run.op for run in planned.repeats}
    shown = [i for i, op in enumerate(graph.ops) if not op.backward or i in again]
    row = {op: rank for rank, op in enumerate(shown)}
    axes.set_ylabel("forward ops, in order", color=colours.muted)
    axes.set_ylim(-0.5, max(len(shown), 2) - 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    shortest = planned.end_s * scale / 500  # a shorter bar would be invisible
    tall = max(0.9, len(shown) / 60)
    for repeat, colour in ((False, colours.unplanned), (True, colours.repeat)):
        bars = []
        for run in planned.runs:
            if run.repeat is not repeat or run.op not in row:
                continue
            left, right, y = run.begin_s * scale, run.end_s * scale, row[run.op]
            right = max(right, left + shortest)
            bars.append(
                [(left, y - tall / 2), (right, y - tall / 2), (right, y + tall / 2), (left, y + tall / 2)]
            )
        axes.add_collection(PolyCollection(bars, facecolors=colour, linewidths=0, zorder=3 if repeat else 2))
    legend(axes, [("first run", colours.unplanned, 1.0), ("recomputed", colours.repeat, 1.0)], look)


def _stairs(
    shown: Trace, levels: Sequence[int], scale: float, size: float
) -> tuple[list[float], list[float]]:
    """Points of a step curve, without those between equal levels."""
    x, y = [0.0], [0.0]
    for run, level in zip(shown.runs, levels, strict=True):
        if level / size != y[-1]:
            x += [run.begin_s * scale, run.begin_s * scale]
            y += [y[-1], level / size]
    return [*x, shown.end_s * scale], [*y, y[-1]]


def style_axes(axes: Axes, frame: Frame) -> None:
    """Give a plot the colours of a look, a grid, and few ticks."""
    colours = frame.look.palette
    axes.set_facecolor(colours.paper)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colours.muted)
    axes.tick_params(colors=colours.muted, length=0, pad=5)
    axes.tick_params(axis="x", length=3)
    axes.grid(axis="y", color=colours.grid, lw=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5 if frame.look.narrow else 9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    # The labels of both panels are in one line.
    axes.yaxis.set_label_coords(-0.6 * frame.left / (frame.look.width - frame.left - frame.right), 0.5)


def _time_unit(seconds: float, has_times: bool) -> tuple[float, str]:
    if not has_times:
        return 1.0, "ops"
    return (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def byte_unit(nbytes: int) -> tuple[int, str]:
    """The unit for an axis up to n bytes: its bytes and its name."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 2 * 1024**power:
            return 1024**power, unit
    return 1, "bytes"
