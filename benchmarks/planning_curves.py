"""Draw how the best plan and the bound of a search change over time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BUDGET = "40%"
DRAWN = (
    *("gpt2", "llama", "t5", "bert", "vit"),
    *("resnet18", "googlenet", "densenet121", "convnext_tiny", "stock_transformer"),
)
"""Graphs of several kinds: decoders, an encoder and decoder, images with and without attention."""


class Searched(Protocol):
    """A search of one graph at one budget."""

    model: str
    ops: int
    budget: str
    wall_s: float
    curve: list[tuple[float, float | None, float]]


def draw(rows: Iterable[Searched], path: Path) -> None:
    """One panel for each of the graphs: overhead and bound in per cent, over seconds."""
    chosen = {row.model: row for row in rows if row.budget == BUDGET and row.model in DRAWN}
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, -(-len(DRAWN) // 2), squeeze=False).flat
    for axes, name in zip(panels, DRAWN, strict=False):
        row = chosen.get(name)
        axes.set_title(name if row is None else f"{name}, {row.ops} ops", fontsize=9)
        if row is None:
            continue
        for column, label in ((1, "best plan"), (2, "lower bound")):
            known = [(step[0], 100 * step[column]) for step in row.curve if step[column] is not None]
            if known:
                known.append((row.wall_s, known[-1][1]))
                axes.step(*zip(*known, strict=True), where="post", label=label)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, alpha=0.25)
    figure.supxlabel("seconds of planning", fontsize=9)
    figure.supylabel("overhead, % of the step", fontsize=9)
    figure.suptitle(f"Best plan and lower bound over time, at {BUDGET} of the unplanned peak", fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
