"""Overhead against budget: a table, CSV and a picture, one line a method and the bound below them."""

import csv
import io
import math
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from remat_facade.report.picture import Palette
from remat_facade.report.table import Table
from remat_graph import Graph, format_nbytes, noremat_peak_nbytes
from remat_solvers.queries import Point

Curves = Mapping[str, Sequence[Point]]  # by solver


def sweep_table(graph: Graph, curves: Curves, bounds: Sequence[float]) -> Table:
    """A row a budget, a column a method; `bounds` is the least overhead per budget."""
    some = next(iter(curves.values()))
    peak = noremat_peak_nbytes(graph)
    rows = []
    for i, point in enumerate(some):
        cells = [_percent(points[i].solution.overhead) for points in curves.values()]
        share = f"{point.budget_nbytes / peak:.0%}" if peak else ""
        rows.append((format_nbytes(point.budget_nbytes), share, *cells, _percent(bounds[i])))
    return Table(
        title=f"{graph.name}: extra time by budget",
        columns=("budget", "of unplanned", *curves, "bound"),
        rows=tuple(rows),
        note="-: the method found none; bound: no schedule costs less",
    )


def sweep_csv(curves: Curves, bounds: Sequence[float]) -> str:
    """Every point as a line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["solver", "budget_nbytes", "overhead", "lower_bound_overhead", "peak_nbytes", "wall_s"])
    for solver, points in curves.items():
        for point, bound in zip(points, bounds, strict=True):
            found = point.solution
            writer.writerow(
                [
                    solver,
                    point.budget_nbytes,
                    "" if found.overhead is None else repr(found.overhead),
                    repr(bound),
                    "" if found.peak_nbytes is None else found.peak_nbytes,
                    f"{point.wall_s:.3f}",
                ]
            )
    return out.getvalue()


def draw_sweep(
    graph: Graph, curves: Curves, bounds: Sequence[float], palette: Palette | None = None
) -> Figure:
    """Overhead against budget; where no method found a schedule the background is marked."""
    palette = palette or Palette()
    colours = [palette.planned, palette.repeat, palette.gradients, palette.unplanned, palette.budget]
    with rc_context({"font.size": 10, "font.family": ["DejaVu Sans"], "axes.unicode_minus": False}):
        figure = Figure(figsize=(9, 5.5), facecolor=palette.paper)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_facecolor(palette.paper)
        some = next(iter(curves.values()))
        budgets = [point.budget_nbytes / 2**20 for point in some]
        least = [100 * bound if math.isfinite(bound) else math.nan for bound in bounds]
        axes.plot(budgets, least, color=palette.muted, lw=1.2, ls=(0, (4, 3)), label="lower bound")
        for place, (solver, points) in enumerate(curves.items()):
            shown = [(p.budget_nbytes / 2**20, p.solution.overhead) for p in points]
            x = [budget for budget, overhead in shown if overhead is not None]
            y = [100 * overhead for _, overhead in shown if overhead is not None]
            axes.plot(x, y, marker="o", ms=4, lw=1.6, color=colours[place % len(colours)], label=solver)
        infeasible = [
            budget
            for i, budget in enumerate(budgets)
            if not any(points[i].solution.feasible for points in curves.values())
        ]
        if infeasible:
            axes.axvspan(min(budgets), max(infeasible), color=palette.budget, alpha=0.10, label="none found")
        axes.set_xlabel("budget (MiB)", color=palette.muted)
        axes.set_ylabel("extra time (%)", color=palette.muted)
        axes.set_title(graph.name, color=palette.ink, loc="left")
        axes.grid(color=palette.grid, lw=0.8)
        axes.legend(frameon=False, labelcolor=palette.ink)
    return figure


def _percent(overhead: float | None) -> str:
    if overhead is None:
        return "-"
    return f"{100 * overhead:.2f} %" if math.isfinite(overhead) else "none exists"
