"""Overhead against budget: a picture with one curve per method and the lower bound."""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat_facade.report.labels import Labels, Spot
from remat_facade.report.picture import (
    DARK,
    WIDE,
    Look,
    byte_unit,
    headline,
    image,
    new_figure,
    style_axes,
)
from remat_facade.report.sweep_rows import Curves
from remat_graph import Graph, noremat_peak_nbytes
from remat_solvers import BudgetPoint

# Okabe and Ito 2008: colours that people with any kind of colour vision tell apart; lighter in the dark mode.
SERIES = (
    ("#0072b2", "#d55e00", "#009e73", "#a8487f", "#1d2530", "#9a6f00"),
    ("#56b4e9", "#ff8a3d", "#2fd3a0", "#e59cc4", "#e8ebef", "#f0c33c"),
)
"""Colours of the curves in the light and in the dark mode."""

MARKERS, DASHES = ("o", "s", "^", "D", "v", "P"), ("-", "--", ":")
"""A marker goes with each colour; the dashes change where there are more curves than colours."""

SAME = 1e-9
"""Overheads that differ by at most this count as equal; the unit is the time of the unplanned step."""


def sweep_image(graph: Graph, curves: Curves, bounds: Sequence[float], path: Path) -> bytes:
    """The picture as the content of a file with this path."""
    return image(draw_sweep(graph, curves, bounds), path)


def draw_sweep(graph: Graph, curves: Curves, bounds: Sequence[float], look: Look = WIDE) -> Figure:
    """Overhead against budget, as steps: the plan of a budget serves every larger one until a better plan.

    The shaded region has no schedules: the bound of a budget holds for all smaller budgets too. Methods with
    the same curve share one line and one label. A curve that others cover entirely is wider, to be seen.

    Args:
        graph: the training step.
        curves: the points of each method; the first has all budgets.
        bounds: per budget the lower bound of the overhead, infinite where no schedule exists.
        look: colours and width of the figure.
    """
    size, unit = byte_unit(max(point.budget_nbytes for point in next(iter(curves.values()))))
    colours = look.palette
    with new_figure(look, 5.2 if look.narrow else 6.2) as figure:
        frame = headline(figure, look, *finding(graph, curves))
        axes = figure.add_subplot(figure.add_gridspec(1, 1, **frame.fractions())[0])
        style_axes(axes, frame)
        axes.set_xlabel(f"budget ({unit})", color=colours.muted)
        axes.set_ylabel("extra time (%)", color=colours.muted)
        stairs = {name: _stairs(points, size) for name, points in curves.items()}
        budgets = [point.budget_nbytes / size for point in next(iter(curves.values()))]
        _set_limits(axes, budgets, [y for _, ys in stairs.values() for y in ys], bounds)
        labels = Labels(axes)
        _draw_bound(axes, labels, budgets, bounds, look)
        groups = [names for names in _same_curves(curves) if stairs[names[0]][0]]
        series = {name: SERIES[look.palette == DARK][i % len(MARKERS)] for i, name in enumerate(curves)}
        for names, width in zip(groups, _widths(curves, groups), strict=True):
            name = names[0]
            x, y = stairs[name]
            kind = list(curves).index(name)
            dash = DASHES[kind // len(MARKERS) % len(DASHES)]
            axes.plot(x, y, lw=width, ls=dash, color=series[name], solid_joinstyle="miter")
            marker, ms = MARKERS[kind % len(MARKERS)], 3.2 + width
            axes.plot(
                x[::2], y[::2], ls="", color=series[name], marker=marker, ms=ms, mec=colours.paper, mew=0.8
            )
            labels.avoid_stairs(x, y)
        for names in groups:
            label = " = ".join(names)
            if len(label) > (30 if look.narrow else 80):
                label = "\n= ".join(names)
            labels.put(label, series[names[0]], _spots(*stairs[names[0]]), weight="bold")
    return figure


def finding(graph: Graph, curves: Curves) -> tuple[str, str]:
    """The headline of a sweep: what the best methods give, and in how many budgets no method is better."""
    count = len(next(iter(curves.values())))
    least = {name: _least(points, count) for name, points in curves.items()}
    best = [min(each[i] for each in least.values()) for i in range(count)]
    wins = {
        name: [i for i in range(count) if mine[i] <= best[i] + SAME < math.inf]
        for name, mine in least.items()
    }
    most = max(len(won) for won in wins.values())
    winners = [name for name, won in wins.items() if len(won) == most]
    peak = noremat_peak_nbytes(graph)
    points = _best_points([curves[name] for name in winners])
    about = "steps: a plan serves all larger budgets  ·  shaded: no schedule exists"
    if not points or not peak:
        return f"{graph.name}: no schedule was found in {count} budgets", about
    if len(curves) > 1:
        where = f"all {count}" if most == count else f"{most} of {count}"
        need = "need" if all(wins[name] == wins[winners[0]] for name in winners) else "each need"
        who = f"{', '.join(winners[:-1])} and {winners[-1]} {need}" if winners[1:] else f"{winners[0]} needs"
        title = f"{graph.name}: {who} the least time in {where} budgets"
        return title, f"{_cheapest(points, peak)}  ·  {about}"
    return f"{graph.name}: {_cheapest(points, peak)}", about


def _cheapest(points: Sequence[BudgetPoint], peak: int) -> str:
    """What the smallest budget costs, and about half of the unplanned peak."""
    half = [point for point in points if point.budget_nbytes <= 0.55 * peak]
    shown = dict.fromkeys([*half[-1:], points[0]])
    return ", ".join(
        f"{point.budget_nbytes / peak:.0%} of the memory costs {_signed(point.solution.overhead)} time"
        if number == 0
        else f"{point.budget_nbytes / peak:.0%} costs {_signed(point.solution.overhead)}"
        for number, point in enumerate(shown)
    )


def _best_points(curves: Iterable[Sequence[BudgetPoint]]) -> list[BudgetPoint]:
    """Per budget the point with the least overhead, without the budgets that have no plan."""
    best: dict[int, tuple[float, BudgetPoint]] = {}
    for point in (point for points in curves for point in points):
        overhead, budget = point.solution.overhead, point.budget_nbytes
        if overhead is not None and (budget not in best or overhead < best[budget][0]):
            best[budget] = overhead, point
    return [best[budget][1] for budget in sorted(best)]


def _same_curves(curves: Curves) -> list[list[str]]:
    """The methods in groups, in order of the first of each; the curves of a group are drawn the same."""
    count = len(next(iter(curves.values())))
    found: list[tuple[list[float], list[str]]] = []
    for name, points in curves.items():
        mine = _least(points, count)
        group = next((names for least, names in found if all(map(_same, least, mine))), None)
        if group is None:
            found.append((mine, [name]))
        else:
            group.append(name)
    return [names for _, names in found]


def _widths(curves: Curves, groups: Sequence[Sequence[str]]) -> list[float]:
    """Widths of the lines, in points: a line that later ones cover entirely is wider than all of these."""
    count = len(next(iter(curves.values())))
    least = [_least(curves[names[0]], count) for names in groups]
    widths, hidden = [], 0
    for i in reversed(range(len(groups))):
        later = least[i + 1 :]
        covered = all(
            mine == math.inf or any(_same(mine, other[j]) for other in later)
            for j, mine in enumerate(least[i])
        )
        hidden += covered
        widths.append(1.8 + 2.4 * hidden * covered)
    return widths[::-1]


def _same(one: float, other: float) -> bool:
    """Whether two overheads are drawn as one."""
    return one == other or abs(one - other) <= SAME


def _least(points: Sequence[BudgetPoint], count: int) -> list[float]:
    """Per budget the least overhead of the plans that fit; infinite if there is none, or no point."""
    overheads = [math.inf if p.solution.overhead is None else p.solution.overhead for p in points]
    return [*accumulate(overheads, min), *[math.inf] * (count - len(points))]


def _stairs(points: Sequence[BudgetPoint], size: int) -> tuple[list[float], list[float]]:
    """Corners of a method's curve, two for each budget with a plan: begin and end of its step."""
    plans = [
        (point.budget_nbytes / size, 100 * least)
        for point, least in zip(points, _least(points, len(points)), strict=True)
        if least < math.inf
    ]
    ends = [x for x, _ in plans[1:]] + [x for x, _ in plans[-1:]]
    x = [side for (begin, _), end in zip(plans, ends, strict=True) for side in (begin, end)]
    return x, [y for _, y in plans for _ in range(2)]


def _set_limits(
    axes: Axes, budgets: Sequence[float], overheads: Sequence[float], bounds: Sequence[float]
) -> None:
    """All budgets, curves, and bounds below zero are in view; what is below zero does not lie on the axis."""
    wide = budgets[-1] - budgets[0] or budgets[-1] or 1.0
    axes.set_xlim(budgets[0] - 0.04 * wide, budgets[-1] + 0.02 * wide)
    low, high = min([0.0, *overheads, *(100 * bound for bound in bounds)]), max([*overheads, 0.1])
    margin = 0.12 * (high - low)
    axes.set_ylim(low - margin if low < 0 else low, high + margin)


def _draw_bound(
    axes: Axes, labels: Labels, budgets: Sequence[float], bounds: Sequence[float], look: Look
) -> None:
    """Shade what no schedule reaches: below the bound of each budget, and of every smaller one."""
    bottom, top = axes.get_ylim()
    left, _ = axes.get_xlim()
    levels = [min(100 * bound, top) for bound in bounds]
    x = [side for begin, end in pairwise([left, *budgets]) for side in (begin, end)]
    y = [level for level in levels for _ in range(2)]
    axes.fill_between(x, y, bottom, color=look.palette.unplanned, alpha=0.25, lw=0)
    axes.plot(x, y, color=look.palette.muted, lw=1.0, ls=(0, (4, 3)))
    labels.avoid_stairs(x, y)
    ends = list(zip(budgets, levels, strict=True))
    spots = [Spot(end, level, (-5, -5), "right", "top") for end, level in ends]
    # Where the bound lies on the axis, only the place above is inside the plot.
    spots += [Spot(end, level, (-5, 5), "right", "bottom") for end, level in ends]
    labels.put("lower bound", look.palette.muted, spots)


def _spots(x: Sequence[float], y: Sequence[float]) -> list[Spot]:
    """Places for the label of a curve: at its ends, then above and below each of its steps."""
    found = [Spot(x[0], y[0], (5, 0), "left", "bottom"), Spot(x[-1], y[-1], (0, 5), "right", "bottom")]
    for begin, end, level in zip(x[::2], x[1::2], y[::2], strict=True):
        found += [Spot(begin, level, (6, 4), "left", "bottom"), Spot(end, level, (-6, 4), "right", "bottom")]
        found += [Spot(begin, level, (6, -4), "left", "top"), Spot(end, level, (-6, -4), "right", "top")]
    # In a crowd: above all of it, with a line.
    for begin, end, level in zip(x[::2], x[1::2], y[::2], strict=True):
        for up in range(20, 200, 14):
            found += [Spot((begin + end) / 2, level, (right, up), leader=True) for right in (0, 25)]
            found.append(Spot(end, level, (0, up), "right", leader=True))  # for several names
    return found


def _signed(overhead: float | None) -> str:
    return "" if overhead is None else f"{overhead:+z.1%}"
