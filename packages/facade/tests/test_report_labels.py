"""A label takes the first of its places that is free."""

import pytest
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from remat_facade.report.labels import Labels, Spot
from remat_facade.report.picture import WIDE, new_figure


@pytest.fixture
def axes() -> Axes:
    """A plot of 10 by 10."""
    with new_figure(WIDE, 5) as figure:
        made: Axes = figure.add_subplot()
    made.set_xlim(0, 10)
    made.set_ylim(0, 10)
    return made


@pytest.fixture
def labels(axes: Axes) -> Labels:
    """Its labels, with a horizontal curve in the middle."""
    placed = Labels(axes)
    placed.avoid_stairs([0, 10], [5, 5])
    return placed


def places(axes: Axes) -> list[tuple[float, float]]:
    """The points of the labels."""
    return [text.xy for text in axes.texts if isinstance(text, Annotation)]


def test_the_first_free_place_is_taken(axes: Axes, labels: Labels) -> None:
    """Not on the curve, not outside of the plot, not on another label."""
    on_the_curve, outside, free = Spot(5, 4.9), Spot(9.9, 1), Spot(5, 8)
    assert labels.put("first", "#000000", [on_the_curve, outside, free])
    assert labels.put("second", "#000000", [free, Spot(5, 2)])
    assert [(5, 8), (5, 2)] == places(axes)


def test_a_label_without_a_free_place(axes: Axes, labels: Labels) -> None:
    """It is written where it covers least, within the plot, or left out if it may be."""
    outside, on_the_curve = Spot(9.9, 1), Spot(5, 4.9)
    assert not labels.put("optional", "#000000", [on_the_curve], optional=True)
    assert not labels.put("needed", "#000000", [outside, on_the_curve])
    assert [(5, 4.9)] == places(axes)
