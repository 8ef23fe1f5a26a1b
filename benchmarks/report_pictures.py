"""Pictures of the pages of results: overheads over budgets, methods over peaks, seconds over ops, growth.

Each is drawn from the committed rows of one benchmark, by `benchmarks/report.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks import page_pictures
from benchmarks.growth import Row as GrowthRow
from benchmarks.growth import draw_growth
from remat_facade.report.picture import LIGHT, WIDE, Frame, Look, headline, new_figure, style_axes

Row = Mapping[str, Any]
Entry = tuple[str, dict[str, Any]]
"""A name in a legend, and how its curve is drawn."""

PLAN: Entry = ("remat", {"color": LIGHT.planned, "marker": "o", "ms": 4, "lw": 1.8})
BOUND: Entry = ("lower bound: no plan costs less", {"color": LIGHT.muted, "ls": (0, (4, 3)), "lw": 1.2})
KNOWN: Entry = ("best known before remat", {"color": LIGHT.repeat, "marker": "x", "ms": 6, "lw": 0})
CHECKPOINT: Entry = ("torch.utils.checkpoint", {"color": LIGHT.repeat, "marker": "s", "ms": 5, "lw": 0})
TORCH: Entry = ("activation_memory_budget", {"color": LIGHT.moved, "marker": "^", "ms": 5, "lw": 0})
EAGER: Entry = ("eager", {"color": LIGHT.ink, "marker": "D", "ms": 5, "lw": 0})
BUDGETS: Mapping[str, dict[str, Any]] = {
    "60%": {"color": LIGHT.moved, "marker": "^", "ms": 4, "lw": 0, "alpha": 0.8},
    "40%": {"color": LIGHT.planned, "marker": "o", "ms": 4, "lw": 0, "alpha": 0.8},
    "20%": {"color": LIGHT.repeat, "marker": "s", "ms": 4, "lw": 0, "alpha": 0.8},
}
COMPARED = ("gpt2", "resnet50")


def overheads(rows: Sequence[Row], look: Look = WIDE) -> Figure:
    """Extra time over the budget, a panel for each graph, with its lower bound."""
    graphs = {row["graph"]: row["ops"] for row in rows}
    title = f"Extra time over the budget, on {len(graphs)} graphs"
    about = "budget in % of the unplanned peak, extra time in % of the unplanned step"
    with new_figure(look, 15.5 if look.narrow else 6.6) as figure:
        frame = headline(figure, look, title, about)
        panels = _panels(figure, frame, 2, -(-len(graphs) // 2), (PLAN, BOUND, KNOWN))
        for axes, (graph, ops) in zip(panels, graphs.items(), strict=False):
            own = sorted((row for row in rows if row["graph"] == graph), key=lambda r: r["budget_fraction"])
            for key, (_, style) in (
                ("lower_bound_pct", BOUND),
                ("known_best_pct", KNOWN),
                ("overhead_pct", PLAN),
            ):
                met = [row for row in own if row[key] is not None]
                axes.plot([100 * row["budget_fraction"] for row in met], [row[key] for row in met], **style)
            _name(axes, f"{graph}, {ops:,} ops", "budget (%)", "extra time (%)")
            axes.set_xlim(0, 75)
            axes.set_ylim(bottom=0)
    return figure


def peers(rows: Sequence[Row], look: Look = WIDE) -> Figure:
    """What each method recomputes and how long its step takes, over its peak."""
    title = "Recomputed FLOPs and step time of each method, over its peak"
    about = "one meter; rows with Inductor and rows that round are in the table only"
    shown = [row for row in rows if row["peak_nbytes"] and not row["note"] and not row["rounding"]]
    series: tuple[tuple[Entry, Callable[[str], bool]], ...] = (
        (TORCH, lambda method: method.startswith("torch ") and not method.endswith(" d")),
        (CHECKPOINT, lambda method: "checkpoint" in method and not method.startswith("remat")),
        ((PLAN[0], PLAN[1] | {"lw": 0}), lambda method: method.startswith("remat")),
        (EAGER, lambda method: method == "eager"),
    )
    with new_figure(look, 11.5 if look.narrow else 7.4) as figure:
        frame = headline(figure, look, title, about)
        panels = _panels(figure, frame, 2, len(COMPARED), [entry for entry, _ in series])
        for index, axes in enumerate(panels):
            model = COMPARED[index % len(COMPARED)]
            key, unit = (
                ("recomputed_pct", "recomputed FLOPs (%)")
                if index < 2
                else ("step_ratio", "step time / eager's")
            )
            for (_, style), belongs in series:
                own = [row for row in shown if row["model"] == model and belongs(row["method"])]
                own.sort(key=lambda row: row["peak_nbytes"])
                axes.plot([row["peak_nbytes"] / 2**20 for row in own], [row[key] for row in own], **style)
            _name(axes, model, "peak (MiB)", unit)
    return figure


def seconds(rows: Sequence[Row], look: Look = WIDE) -> Figure:
    """Seconds of planning over ops, for three budgets."""
    free = [row for row in rows if row["limit_s"] is None]
    made = [row for row in free if row["budget"] in BUDGETS and row["overhead"] is not None]
    middle = [row["wall_s"] for row in made if row["budget"] == "40%"]
    title = f"{len(middle)} models are planned in {statistics.median(middle):.1f} s at 40 %, in the median"
    about = "from the captured graph to the plan, without a time limit; both axes logarithmic"
    with new_figure(look, 5.2) as figure:
        frame = headline(figure, look, title, about)
        entries = [(f"budget {budget.replace('%', ' %')}", style) for budget, style in BUDGETS.items()]
        (axes,) = _panels(figure, frame, 1, 1, entries)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for budget, style in BUDGETS.items():
            own = [row for row in made if row["budget"] == budget]
            axes.plot([row["ops"] for row in own], [row["wall_s"] for row in own], **style)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.minorticks_off()
        _name(axes, "", "ops, forward and backward", "seconds")
    return figure


def growth(rows: Sequence[Row], look: Look = WIDE) -> Figure:
    """Seconds of planning over ops, of models that differ in their depth only."""
    return draw_growth([GrowthRow(**row) for row in rows], look)


PICTURES: Mapping[str, tuple[str, Callable[[Sequence[Row], Look], Figure]]] = {
    "growth": ("growth", growth),
    "overheads": ("solvers", overheads),
    "peers": ("peers", peers),
    "seconds": ("planning", seconds),
}
"""By the name of the picture: the results that it shows, and what draws them."""


def written(results: Path, images: Path) -> Iterator[Path]:
    """Draw the pictures of all results that are there; yield their files."""
    for name, (source, draw) in PICTURES.items():
        path = results / f"{source}.json"
        if path.exists():
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            yield from page_pictures.written(images, name, partial(draw, rows))


def _panels(figure: Figure, frame: Frame, down: int, across: int, entries: Iterable[Entry]) -> list[Axes]:
    """Panels below one legend, row by row; below each other on a narrow screen."""
    handles = [Line2D([], [], label=name, **style) for name, style in entries]
    width, height = figure.get_size_inches()
    narrow = frame.look.narrow
    columns = 1 if narrow else len(handles)
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=((0.1 if narrow else frame.left - 0.08) / width, 1 - (frame.top - 0.06) / height),
        ncols=columns,
        frameon=False,
        labelcolor=LIGHT.ink,
        borderaxespad=0,
    )
    frame.top += 0.34 + 0.21 * -(-len(handles) // columns)
    if narrow:
        down, across = down * across, 1
    grid = figure.add_gridspec(down, across, hspace=0.95 if narrow else 0.5, wspace=0.24, **frame.fractions())
    panels = [figure.add_subplot(grid[row, column]) for row in range(down) for column in range(across)]
    for axes in panels:
        style_axes(axes, frame)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if not narrow:
            axes.yaxis.set_label_coords(-0.06 * across, 0.5)
    return panels


def _name(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=LIGHT.ink)
    axes.set_xlabel(across, color=LIGHT.muted)
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel(up, color=LIGHT.muted)
