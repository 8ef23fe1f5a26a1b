"""Place labels in a plot where they cover no curve and no other label.

Each label has candidate positions, the best first, and gets the first that is free. All curves here are
stairs, so an obstacle is a rectangle in pixels: a piece of a curve, or a label. If no candidate is free, the
label gets the one that covers the fewest obstacles. The cost is O(candidates x obstacles) for a label.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

GAP = 2.0
"""Points that stay free around a label."""


@attrs.frozen
class Spot:
    """A candidate: a point in the coordinates of the data, and the offset and alignment of the text there."""

    x: float
    y: float
    offset: tuple[float, float] = (0, 0)  # in points
    ha: str = "left"
    va: str = "bottom"
    leader: bool = False  # whether a line leads from the text to the point


class Labels:
    """The labels of one plot, whose limits and place in the figure are final."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        figure = axes.get_figure(root=True)
        assert figure is not None
        assert isinstance(figure.canvas, FigureCanvasAgg)
        self._renderer: Any = figure.canvas.get_renderer()  # type: ignore[no-untyped-call]
        self._point = figure.dpi / 72  # pixels
        self._obstacles = np.zeros((0, 4))  # left, bottom, right, top

    def avoid_stairs(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Keep labels off a curve of horizontal and vertical pieces."""
        if len(x) > 1:
            pixels = self._axes.transData.transform(np.column_stack([x, y]))
            pairs = np.stack([pixels[:-1], pixels[1:]])
            self._obstacles = np.vstack([self._obstacles, np.hstack([pairs.min(axis=0), pairs.max(axis=0)])])

    def put(
        self, text: str, colour: str, spots: Iterable[Spot], *, optional: bool = False, **style: Any
    ) -> bool:
        """Write a label at the first free spot, or at the least bad one.

        Args:
            text: the label.
            colour: of the text.
            spots: candidates, at least one.
            optional: whether the label is left out if no spot is free.
            **style: further arguments of matplotlib's text.

        Returns:
            Whether a spot was free.
        """
        spots = list(spots)
        label = self._write(text, colour, spots[0], **style)
        size = label.get_window_extent(self._renderer)
        boxes = np.array([self._box(spot, size.width, size.height) for spot in spots])
        covered = [self._covered(box) for box in boxes]
        best = int(np.argmin(covered))
        spot = spots[best]
        label.remove()
        if optional and covered[best]:
            return False
        line = {"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkA": 0, "shrinkB": 0}
        self._write(text, colour, spot, arrowprops=line if spot.leader else None, **style)
        self._obstacles = np.vstack([self._obstacles, boxes[best]])
        return covered[best] == 0

    def _write(self, text: str, colour: str, spot: Spot, **style: Any) -> Annotation:
        at: dict[str, Any] = {"xytext": spot.offset, "textcoords": "offset points", "parse_math": False}
        return self._axes.annotate(
            text, (spot.x, spot.y), color=colour, ha=spot.ha, va=spot.va, **at, **style
        )

    def _box(self, spot: Spot, width: float, height: float) -> tuple[float, float, float, float]:
        x, y = self._axes.transData.transform((spot.x, spot.y)) + np.array(spot.offset) * self._point
        left = x - {"left": 0.0, "center": 0.5, "right": 1.0}[spot.ha] * width
        bottom = y - {"bottom": 0.0, "center": 0.5, "top": 1.0}[spot.va] * height
        return left, bottom, left + width, bottom + height

    def _covered(self, box: npt.NDArray[np.float64]) -> int:
        """Number of obstacles under a label; leaving the plot is worse than all of them."""
        gap = GAP * self._point
        left, bottom, right, top = box + np.array([-gap, -gap, gap, gap])
        found = self._obstacles
        under = (found[:, 0] < right) & (found[:, 2] > left) & (found[:, 1] < top) & (found[:, 3] > bottom)
        plot = self._axes.get_window_extent(self._renderer)
        outside = (box[0] < plot.x0, box[1] < plot.y0, box[2] > plot.x1, box[3] > plot.y1)
        return int(under.sum()) + sum(map(int, outside)) * (1 + len(found))
