"""A label takes the first of its places that is free."""

import pytest

from remat_facade.report.labels import Labels, Spot
from remat_facade.report.picture import WIDE, new_figure


@pytest.fixture
def labels() -> Labels:
    """The labels of a plot of 10 by 10, with a horizontal curve in the middle."""
    with new_figure(WIDE, 5) as figure:
        axes = figure.add_subplot()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    placed = Labels(axes)
    placed.avoid_stairs([0, 10], [5, 5])
    return placed


def test_the_first_free_place_is_taken(labels: Labels) -> None:
    """Not on the curve, not outside of the plot, not on another label."""
    on_the_curve, outside, free = Spot(5, 4.9), Spot(9.9, 1), Spot(5, 8)
    assert labels.put("first", "#000000", [on_the_curve, outside, free])
    assert labels.put("second", "#000000", [free, Spot(5, 2)])
    assert [(5, 8), (5, 2)] == [text.xy for text in labels._axes.texts]


def test_a_label_without_a_free_place(labels: Labels) -> None:
    """It is written where it covers least, within the plot, or left out if it may be."""
    outside, on_the_curve = Spot(9.9, 1), Spot(5, 4.9)
    assert not labels.put("optional", "#000000", [on_the_curve], optional=True)
    assert not labels.put("needed", "#000000", [outside, on_the_curve])
    assert [(5, 4.9)] == [text.xy for text in labels._axes.texts]
