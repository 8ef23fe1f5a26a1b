"""The gallery's pictures: for both widths, in the colours of both modes, with what a plan's files have."""

import re
from pathlib import Path

import attrs
import pytest

from benchmarks.gallery_files import draw_blocks, draw_trace
from benchmarks.page_pictures import both_modes
from remat_facade.report.allocations import allocations
from remat_facade.report.chrome_trace import chrome_trace
from remat_facade.report.picture import LIGHT, Look
from remat_facade.report.snapshot import memory_snapshot
from remat_graph import Graph, Plan, Schedule, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = pytest.mark.parametrize("look", [Look(), Look(narrow=True)], ids=["wide", "narrow"])


def planned(seed: int) -> tuple[Graph, Plan]:
    """A random graph with layers, and a plan with repeats."""
    graph = random_graph(seed, forward_ops=9)
    graph = attrs.evolve(graph, ops=[attrs.evolve(op, layer=f"h.{i % 3}") for i, op in enumerate(graph.ops)])
    schedule = Schedule.from_order(graph, random_order(graph, seed))
    peak = simulate(graph, schedule).peak_nbytes
    return graph, Plan.from_schedule(
        graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="hand", links=None
    )


def test_the_page_shows_every_picture_for_both_widths() -> None:
    """A picture that the script draws and no page shows would be forgotten, and the reverse is a gap."""
    folder = ROOT / "docs" / "gallery"
    shown = re.findall(r"\"([\w-]+)\.svg", (folder / "index.md").read_text(encoding="utf-8"))
    files = {path.stem for path in folder.glob("*.svg")}
    assert files == set(shown)
    assert files == {f"{name.removesuffix('-narrow')}{kind}" for name in files for kind in ("", "-narrow")}


@WIDTHS
def test_blocks_are_those_of_the_plan(look: Look) -> None:
    """One rectangle for each allocation, between two events and below the highest address."""
    graph, plan = planned(3)
    axes = draw_blocks("net", memory_snapshot(graph, plan), look).axes[0]
    drawn = [path for group in axes.collections for path in group.get_paths()]
    assert len(allocations(graph, plan.schedule, plan.grads).blocks) == len(drawn)
    assert all(path.get_extents().width > 0 and path.get_extents().height >= 0 for path in drawn)


@WIDTHS
def test_runs_are_those_of_the_trace(look: Look) -> None:
    """One bar for each run; repeats have a row of their own."""
    graph, plan = planned(4)
    axes = draw_trace("net", chrome_trace(graph, plan), look).axes[0]
    assert len(plan.schedule.order) == sum(len(group.get_paths()) for group in axes.collections)
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert ["forward", "recomputed", "backward"] == rows


def test_a_file_has_the_colours_of_both_modes() -> None:
    """No colour of the light mode is left outside of the style, whose second half is the dark mode."""
    graph, plan = planned(5)
    text = both_modes(draw_blocks("net", memory_snapshot(graph, plan), Look()), "blocks")
    style, drawing = re.findall(r"<style>(.*?)</style>(.*)", text, re.DOTALL)[0]
    assert "@media (prefers-color-scheme: dark)" in style
    used = set(re.findall(r"var\((--[\w-]+)\)", drawing))
    assert all(style.count(f"{name}:") == 2 for name in used)
    assert [] == [colour for colour in attrs.asdict(LIGHT).values() if colour in drawing]
