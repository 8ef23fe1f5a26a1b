"""Draw what viewers show of a plan's files: blocks of a memory snapshot, and runs of a Chrome trace."""

from collections import Counter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from remat_facade.report.picture import Look, byte_unit, headline, legend, new_figure, style_axes
from remat_facade.report.sweep import SERIES
from remat_graph import format_nbytes, format_seconds

MOST_COLOURS = 5
"""Categories of a snapshot with a colour of their own; more cannot be told apart."""

Rectangle = tuple[float, float, float, float]  # left, right, bottom, top


def draw_blocks(name: str, snapshot: dict[str, Any], look: Look) -> Figure:
    """Each block of a snapshot as a rectangle: from its allocation to its free, at its address."""
    events = [each for each in snapshot["device_traces"][0] if each["action"] in ("alloc", "free_completed")]
    lowest = min(event["addr"] for event in events)
    size, unit = byte_unit(max(event["addr"] + event["size"] for event in events) - lowest)
    total: Counter[str] = Counter()
    begins: dict[int, int] = {}  # by address, of the blocks that are live
    spans: list[tuple[int, int]] = []
    for position, event in enumerate(events):
        if event["action"] == "alloc":
            begins[event["addr"]] = position
            total[event["category"]] += event["size"]
        else:
            spans.append((begins.pop(event["addr"]), position))
    spans += [(begin, len(events)) for begin in begins.values()]
    blocks = [(events[i]["category"], _block(events[i], i, end, lowest, size)) for i, end in spans]
    shown = [category for category, _ in total.most_common(MOST_COLOURS)]
    colours = dict(zip(shown, SERIES[0], strict=False))
    with new_figure(look, 5.2 if look.narrow else 5.6) as figure:
        about = "a rectangle is a block, from its allocation to its free, coloured by layer"
        frame = headline(figure, look, f"{name}: {len(blocks)} blocks of memory in one step", about)
        columns = 2 if look.narrow else len(colours) + 1
        frame.top += 0.25 * -(-(len(colours) + 1) // columns)
        axes = figure.add_subplot(figure.add_gridspec(1, 1, **frame.fractions())[0])
        style_axes(axes, frame)
        axes.set_xlim(0, len(events))
        axes.set_ylim(0, max(top for _, (*_, top) in blocks))
        axes.set_xlabel("allocations and frees, in order", color=look.palette.muted)
        axes.set_ylabel(f"address ({unit})", color=look.palette.muted)
        for category in (*colours, None):
            chosen = [at for each, at in blocks if (each if each in colours else None) == category]
            _fill(axes, chosen, colours.get(category or "", look.palette.unplanned), look.palette.paper)
        entries = [(_short(each), colour, 1.0) for each, colour in colours.items()]
        legend(axes, [*entries, ("others", look.palette.unplanned, 1.0)], look, columns)
    return figure


def draw_trace(name: str, trace: dict[str, Any], look: Look) -> Figure:
    """The runs of a trace in one row for each track and kind, and the counter of the device's memory."""
    works = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    memory = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "device memory"]
    kinds = [kind for kind in _kinds(look) if any(event["cat"] == kind for event in works)]
    end = max(event["ts"] + event["dur"] for event in works)
    shortest = end / look.pixels  # a shorter bar would be invisible
    scale, unit = (1e-3, "ms") if end >= 2e3 else (1.0, "µs")
    size, byte = byte_unit(max(event["args"]["bytes"] for event in memory))
    with new_figure(look, 5.0) as figure:
        facts = trace["otherData"]
        title = f"{name}: a step of {format_seconds(facts['time_s'])}, {len(works)} runs of operators"
        about = f"peak {format_nbytes(facts['peak_nbytes'])}, time {facts['overhead']:+.1%}"
        frame = headline(figure, look, title, about)
        frame.left += 0.45 if look.narrow else 0.2
        grid = figure.add_gridspec(2, 1, height_ratios=[len(kinds), 3], hspace=0.15, **frame.fractions())
        runs, held = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        for axes in (runs, held):
            style_axes(axes, frame)
            axes.set_xlim(0, end * scale)
        runs.grid(visible=False)
        runs.tick_params(labelbottom=False)
        runs.set_ylim(len(kinds) - 0.4, -0.6)
        runs.set_yticks(range(len(kinds)), kinds)
        for row, kind in enumerate(kinds):
            spans = [(e["ts"], e["ts"] + max(e["dur"], shortest)) for e in works if e["cat"] == kind]
            bars = [(a * scale, b * scale, row - 0.36, row + 0.36) for a, b in spans]
            _fill(runs, bars, _kinds(look)[kind])
        x, y = [e["ts"] * scale for e in memory], [e["args"]["bytes"] / size for e in memory]
        held.fill_between(x, y, step="post", color=look.palette.planned, alpha=0.3, lw=0)
        held.step(x, y, where="post", color=look.palette.planned, lw=1.2)
        held.set_ylim(0)
        held.set_ylabel(f"memory ({byte})", color=look.palette.muted)
        held.set_xlabel(f"time ({unit})", color=look.palette.muted)
    return figure


def _kinds(look: Look) -> dict[str, str]:
    """The colours of the kinds of work."""
    colours = look.palette
    return {
        "forward": colours.unplanned,
        "recomputed": colours.repeat,
        "backward": colours.planned,
        "copy": colours.moved,
        "update": colours.gradients,
    }


def _block(event: dict[str, Any], begin: int, end: int, lowest: int, size: int) -> Rectangle:
    bottom = event["addr"] - lowest
    return begin, end, bottom / size, (bottom + event["size"]) / size


def _fill(axes: Axes, rectangles: list[Rectangle], colour: str, edge: str = "none") -> None:
    """Draw rectangles of one colour, with thin edges of another or without."""
    corners = [[(a, low), (b, low), (b, high), (a, high)] for a, b, low, high in rectangles]
    axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=0.3, zorder=3))


def _short(category: str) -> str:
    return category if len(category) <= 22 else "\u2026" + category[-21:]
