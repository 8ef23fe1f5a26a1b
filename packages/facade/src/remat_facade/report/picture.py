"""Draw a plan: memory over time of the planned and the unplanned step, and the recomputations.

The figure is saved as a PNG or, for the HTML page, as an SVG whose colours are CSS variables, so that it
follows the light or dark mode of the page.
"""

import io
import re
from collections.abc import Generator, Sequence
from typing import Any

import attrs
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

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


LIGHT = Palette()
"""The colours that figures are drawn in; `svg` replaces them by the variables of the page."""


@context
def new_figure(width: float, height: float) -> Generator[Figure, None, None]:
    """A figure of this size in inches, in the common font; it uses no global state of matplotlib."""
    with rc_context({"font.size": 10, "font.family": ["DejaVu Sans"], "axes.unicode_minus": False}):
        figure = Figure(figsize=(width, height), facecolor=LIGHT.paper)
        FigureCanvasAgg(figure)
        yield figure


def headline(figure: Figure, title: str, subtitle: str) -> None:
    """Write a title and a subtitle 0.4 and 0.7 inches below the top of the figure."""
    height = figure.get_figheight()
    figure.text(0.085, 1 - 0.4 / height, title, color=LIGHT.ink, size=15, weight="bold", parse_math=False)
    figure.text(0.085, 1 - 0.7 / height, subtitle, color=LIGHT.muted, size=10, parse_math=False)


def draw(graph: Graph, plan: Plan) -> Figure:
    """The figure of a plan.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.
    """
    planned, without = trace(graph, plan.schedule), trace(graph, Schedule.unplanned(graph))
    with new_figure(11, 7) as figure:
        grid = figure.add_gridspec(
            2, 1, height_ratios=[3, 2], left=0.085, right=0.975, top=0.85, bottom=0.085, hspace=0.24
        )
        memory, runs = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        headline(
            figure,
            f"{plan.graph_name}: {format_nbytes(plan.peak_nbytes)} instead of "
            f"{format_nbytes(plan.noremat_peak_nbytes)}, with {plan.overhead:+.1%} time",
            f"budget {format_nbytes(plan.budget_nbytes)}  ·  {len(graph.ops)} ops, {len(planned.repeats)} "
            f"repeats  ·  lower bound {plan.lower_bound_overhead:+.1%}  ·  solver {plan.solver}",
        )
        scale, unit = _time_unit(max(planned.end_s, without.end_s), planned.has_times)
        _draw_memory(memory, plan, planned, without, scale)
        _draw_runs(runs, graph, planned, scale)
        for axes in (memory, runs):
            _style(axes)
            axes.set_xlim(0, max(planned.end_s, without.end_s) * scale * 1.002 or 1)
            axes.axvline(planned.boundary_s * scale, color=LIGHT.muted, lw=0.8, ls=(0, (1, 2)), zorder=1)
        memory.tick_params(labelbottom=False)
        runs.set_xlabel(f"time ({unit})", color=LIGHT.muted)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an SVG element whose colours are CSS variables named as in `Palette`."""
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "remat"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # unused ids, which repeat in every figure
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', system-ui, sans-serif")
    for name, colour in attrs.asdict(LIGHT).items():
        text = text.replace(colour, f"var(--{name})")
    return text


def _draw_memory(axes: Axes, plan: Plan, planned: Trace, without: Trace, scale: float) -> None:
    size, unit = _byte_unit(max(without.peak_nbytes, planned.peak_nbytes, plan.budget_nbytes))
    axes.set_ylabel(f"predicted memory ({unit})", color=LIGHT.muted)
    top = max(without.peak_nbytes, planned.peak_nbytes) / size * 1.12 or 1
    axes.set_ylim(0, top)

    x, y = _stairs(without, without.held_nbytes, scale, size)
    axes.fill_between(x, y, color=LIGHT.unplanned, alpha=0.16, lw=0)
    axes.plot(x, y, color=LIGHT.unplanned, lw=1.2)
    x, y = _stairs(planned, planned.held_nbytes, scale, size)
    axes.fill_between(x, y, color=LIGHT.planned, alpha=0.30, lw=0)
    axes.plot(x, y, color=LIGHT.planned, lw=1.4)
    entries = [("unplanned", LIGHT.unplanned, 0.5), ("planned", LIGHT.planned, 0.6)]
    if planned.gradient_nbytes and planned.gradient_nbytes[-1]:
        entries.append(("finished gradients", LIGHT.gradients, 0.85))
        x, y = _stairs(planned, planned.gradient_nbytes, scale, size)
        axes.fill_between(x, y, color=LIGHT.gradients, alpha=0.75, lw=0)

    budget = plan.budget_nbytes / size
    if budget < top:
        axes.axhline(budget, color=LIGHT.budget, lw=1.2, ls=(0, (5, 3)))
        text, units = f"budget {format_nbytes(plan.budget_nbytes)}", ("axes fraction", "data")
        annotate(axes, text, (1, budget), units, (-6, 4), LIGHT.budget, ha="right")
    legend(axes, entries)
    boundary, units = (planned.boundary_s * scale, 1), ("data", "axes fraction")
    for text, offset, align in (("forward", -6, "right"), ("backward", 6, "left")):
        annotate(axes, text, boundary, units, (offset, -14), LIGHT.muted, ha=align)


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


def legend(axes: Axes, entries: Sequence[tuple[str, str, float]]) -> None:
    """A legend above the axes, where it covers no curve; an entry is (name, colour, opacity)."""
    legend = axes.legend(
        [Patch(color=colour, alpha=alpha, lw=0) for _, colour, alpha in entries],
        [name for name, _, _ in entries],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(entries),
        frameon=False,
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.6,
    )
    for text in legend.get_texts():
        text.set_color(LIGHT.ink)


def _draw_runs(axes: Axes, graph: Graph, planned: Trace, scale: float) -> None:
    again = {run.op for run in planned.repeats}
    shown = [i for i, op in enumerate(graph.ops) if not op.backward or i in again]
    row = {op: rank for rank, op in enumerate(shown)}
    axes.set_ylabel("forward ops, in order", color=LIGHT.muted)
    axes.set_ylim(-0.5, max(len(shown), 2) - 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    shortest = planned.end_s * scale / 500  # a shorter bar would be invisible
    tall = max(0.9, len(shown) / 60)
    for repeat, colour in ((False, LIGHT.unplanned), (True, LIGHT.repeat)):
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
    legend(axes, [("first run", LIGHT.unplanned, 1.0), ("recomputed", LIGHT.repeat, 1.0)])


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


def _style(axes: Axes) -> None:
    axes.set_facecolor(LIGHT.paper)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT.muted)
    axes.tick_params(colors=LIGHT.muted, length=0, pad=5)
    axes.tick_params(axis="x", length=3)
    axes.grid(axis="y", color=LIGHT.grid, lw=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_label_coords(-0.058, 0.5)


def _time_unit(seconds: float, has_times: bool) -> tuple[float, str]:
    if not has_times:
        return 1.0, "ops"
    return (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "µs")


def _byte_unit(nbytes: int) -> tuple[int, str]:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 2 * 1024**power:
            return 1024**power, unit
    return 1, "bytes"
