"""Which texts of a figure cover each other or a curve, or leave the figure."""

from collections.abc import Iterator

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def _texts(figure: Figure) -> Iterator[Text]:
    """All texts that are drawn."""
    yield from figure.texts
    for axes in figure.axes:
        yield from axes.texts
        legend = axes.get_legend()
        yield from legend.get_texts() if legend else ()
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            yield axis.label
            yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def overlaps(figure: Figure) -> list[str]:
    """Pairs of texts that cover each other, texts on a curve, and texts that leave the figure."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    shown = [text for text in _texts(figure) if text.get_visible() and text.get_text().strip()]
    names = [text.get_text() for text in shown]
    # Not the extent of an annotation, which includes the line that leads to it.
    extents = [Text.get_window_extent(text, canvas.get_renderer()) for text in shown]
    low = np.array([[box.x0, box.y0] for box in extents])
    high = np.array([[box.x1, box.y1] for box in extents])
    found = []
    for i, name in enumerate(names):
        covered = ((low[i] < high) & (low < high[i])).all(axis=1)
        found += [f"{name} covers {names[j]}" for j in np.flatnonzero(covered) if j > i]
        if (low[i] < 0).any() or (high[i] > [figure.bbox.width, figure.bbox.height]).any():
            found.append(f"{name} leaves the figure")
    for line in (line for axes in figure.axes for line in axes.lines):
        points = line.get_transform().transform(np.column_stack(line.get_data()))
        if len(points) < 3 or line.get_linestyle() == "None":
            continue
        starts, ends = np.minimum(points[:-1], points[1:]), np.maximum(points[:-1], points[1:])
        for i, name in enumerate(names):
            over = ((starts < high[i]) & (ends > low[i])).all(axis=1)
            found += [f"{name} lies on a curve"] if over.any() else []
    return found
