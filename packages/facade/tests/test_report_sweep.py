"""The picture of a sweep: steps, a headline that says what was found, and labels that cover nothing."""

import math
from collections.abc import Sequence

import pytest

from remat_facade.report import picture
from remat_facade.report.picture import DARK, LIGHT, Look
from remat_facade.report.sweep import draw_sweep, finding
from remat_facade.report.sweep_rows import Curves
from remat_graph import Graph, Schedule, noremat_peak_nbytes
from remat_solvers import BudgetPoint, Solution, Status
from remat_solvers.testing import chain

from .overlaps import overlaps

LOOKS = [Look(palette=palette, narrow=narrow) for palette in (LIGHT, DARK) for narrow in (False, True)]
NAMES = ["light", "light, narrow", "dark", "dark, narrow"]
GRAPH = chain(8)
BOUNDS = (0.3, 0.1, 0.05, 0.0)


def points(graph: Graph, overheads: Sequence[float | None]) -> list[BudgetPoint]:
    """Points at evenly spaced budgets up to the unplanned peak."""
    peak, count = noremat_peak_nbytes(graph), len(overheads)
    found = []
    for i, overhead in enumerate(overheads):
        solution = Solution(
            status=Status.FEASIBLE if overhead is not None else Status.NOT_FOUND,
            schedule=None if overhead is None else Schedule.unplanned(graph),
            lower_bound_s=1.0,
            base_s=1.0,
            time_s=None if overhead is None else 1.0 + overhead,
            peak_nbytes=None if overhead is None else 1,
        )
        budget = peak * (i + 1) // count
        found.append(BudgetPoint(budget_nbytes=budget, solution=solution, wall_s=0.1))
    return found


def curves(**overheads: Sequence[float | None]) -> Curves:
    """Curves by name."""
    return {name: points(GRAPH, each) for name, each in overheads.items()}


def steps(shown: Curves, name: str) -> list[tuple[float, float]]:
    """The corners of a curve, as drawn."""
    figure = draw_sweep(GRAPH, shown, BOUNDS)
    (axes,) = figure.axes
    drawn = [line for line in axes.lines if line.get_linestyle() == "-"]
    x, y = drawn[list(shown).index(name)].get_data()
    return [(float(a), float(b)) for a, b in zip(x, y, strict=True)]


def test_a_plan_serves_every_larger_budget() -> None:
    """A curve is flat up to the next better plan, and never rises, even where a later plan is worse."""
    corners = steps(curves(auto=[None, 0.2, 0.3, 0.0]), "auto")
    assert [20.0, 20.0, 20.0, 20.0, 0.0, 0.0] == pytest.approx([y for _, y in corners])
    budgets = [point.budget_nbytes for point in points(GRAPH, [0.0] * 4)]
    scale = corners[0][0] / budgets[1]
    expected = [budgets[i] * scale for i in (1, 2, 2, 3, 3, 3)]
    assert expected == pytest.approx([x for x, _ in corners])


def test_the_headline_says_what_was_found() -> None:
    """One method: what the memory costs; several: which needs the least time, and where."""
    title, _ = finding(GRAPH, curves(auto=[0.4, 0.2, 0.1, 0.0]))
    assert f"{GRAPH.name}: 50% of the memory costs +20.0% time, 25% costs +40.0%" == title
    title, _ = finding(GRAPH, curves(greedy=[None, 0.3, 0.1, 0.0], auto=[0.4, 0.2, 0.1, 0.0]))
    assert f"{GRAPH.name}: auto needs the least time in all 4 budgets" == title
    title, _ = finding(GRAPH, curves(one=[0.4, 0.2, 0.2, 0.0], two=[None, 0.3, 0.1, 0.0]))
    assert "one needs the least time in 3 of 4 budgets" in title
    title, _ = finding(GRAPH, curves(auto=[None] * 4, greedy=[None] * 4))
    assert "no schedule was found in 4 budgets" in title
    title, _ = finding(GRAPH, curves(auto=[None] * 4))
    assert "no schedule was found in 4 budgets" in title


def test_the_headline_names_all_that_are_best() -> None:
    """Methods that need the least time in the same budgets are named together; in other budgets, each."""
    same = [0.4, 0.2, 0.1, 0.0]
    title, _ = finding(GRAPH, curves(greedy=same, slow=[None, 0.3, 0.2, 0.0], auto=same))
    assert f"{GRAPH.name}: greedy and auto need the least time in all 4 budgets" == title
    title, _ = finding(GRAPH, curves(noremat=same, greedy=same, auto=same))
    assert f"{GRAPH.name}: noremat, greedy and auto need the least time in all 4 budgets" == title
    title, about = finding(GRAPH, curves(one=[0.4, 0.3, 0.1, 0.1], two=[None, 0.2, 0.2, 0.0]))
    assert f"{GRAPH.name}: one and two each need the least time in 2 of 4 budgets" == title
    assert about.startswith("50% of the memory costs +20.0% time, 25% costs +40.0%")


@pytest.mark.parametrize("look", LOOKS, ids=NAMES)
def test_methods_with_the_same_curve_share_a_label(look: Look) -> None:
    """One line and one label for both; a curve that lies below others, to be seen, is wider than these."""
    same = [0.003, -0.05, -0.05, -0.05]
    shown = curves(
        noremat=[None, *same[1:]], chen_sqrt=[0.25, *same[1:]], greedy=same, auto=[1e-12 + x for x in same]
    )
    figure = draw_sweep(GRAPH, shown, [-0.05] * 4, look)
    (axes,) = figure.axes
    assert ["lower bound", "noremat", "chen_sqrt", "greedy = auto"] == [t.get_text() for t in axes.texts]
    below, chen_sqrt, above = (line.get_linewidth() for line in axes.lines if line.get_linestyle() == "-")
    assert below > chen_sqrt == above
    assert [] == overlaps(figure)


@pytest.mark.parametrize("look", LOOKS, ids=NAMES)
def test_a_label_of_many_methods_stays_in_the_figure(look: Look) -> None:
    """The names stand below each other where one line would be too long."""
    names = [f"method_{i} (no pools)" for i in range(4)]
    figure = draw_sweep(GRAPH, curves(**dict.fromkeys(names, (0.3, 0.1, 0.05, 0.0))), BOUNDS, look)
    assert "\n= ".join(names) in {text.get_text() for text in figure.axes[0].texts}
    assert [] == overlaps(figure)


@pytest.mark.parametrize("look", LOOKS, ids=NAMES)
@pytest.mark.parametrize(
    ("overheads", "bounds"),
    [
        ([0.003, -0.05, -0.05, -0.05], [-0.05] * 4),
        ([0.3, 0.1, 0.1, 0.1], [-0.05] * 4),
        ([0.25, 0.0, 0.0, 0.0], [0.0] * 4),
        ([-0.05] * 4, [-0.05] * 4),
        ([0.0] * 4, [0.0] * 4),
    ],
)
def test_what_is_below_zero_is_inside(overheads: list[float], bounds: list[float], look: Look) -> None:
    """Faster plans and their bound do not lie on the axis, and each label is between the axes."""
    figure = draw_sweep(GRAPH, curves(auto=overheads), bounds, look)
    (axes,) = figure.axes
    lowest = 100 * min(*overheads, *bounds)
    assert axes.get_ylim()[0] < lowest if lowest < 0 else axes.get_ylim()[0] == 0
    assert [] == overlaps(figure)
    plot = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert plot.y0 <= box.y0 < box.y1 <= plot.y1, text.get_text()
        assert plot.x0 <= box.x0 < box.x1 <= plot.x1, text.get_text()


@pytest.mark.parametrize("look", LOOKS, ids=NAMES)
def test_labels_cover_nothing(look: Look) -> None:
    """Each curve has a label, in a crowd too, and none covers another, a curve or the edge."""
    shown = curves(
        auto=[0.30, 0.10, 0.05, 0.0],
        greedy=[0.50, 0.14, 0.06, 0.0],
        close=[0.31, 0.11, 0.051, 0.0],
        late=[None, None, 0.07, 0.001],
        never=[None] * 4,
    )
    figure = draw_sweep(GRAPH, shown, (math.inf, *BOUNDS[1:]), look)
    written = {text.get_text() for text in figure.axes[0].texts}
    assert {"auto", "greedy", "close", "late", "lower bound"} == written
    assert [] == overlaps(figure)


def test_curves_differ_in_colour_and_marker() -> None:
    """No two of six curves share a colour or a marker, in the light or the dark mode."""
    shown = curves(**{f"m{i}": [0.1 * (i + 1), 0.05 * (i + 1), 0.01 * i, 0.0] for i in range(6)})
    for palette in (LIGHT, DARK):
        (axes,) = draw_sweep(GRAPH, shown, BOUNDS, Look(palette=palette)).axes
        marks = [(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"]
        assert 6 == len({colour for colour, _ in marks}) == len({marker for _, marker in marks})


@pytest.mark.parametrize("overheads", [[None], [0.0], [-0.1, -0.2], [0.1, None]])
def test_odd_sweeps_can_be_drawn(overheads: list[float | None]) -> None:
    """One budget, none with a plan, plans that are faster, a method that ended early."""
    shown = curves(auto=overheads, short=[])
    bounds = [0.0 if overhead is None else min(0.0, overhead) for overhead in overheads]
    assert picture.png(draw_sweep(GRAPH, shown, bounds), 400).startswith(b"\x89PNG")
