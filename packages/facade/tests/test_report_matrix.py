"""The matrices: runs of ops per stage, live values when a stage begins, and their picture."""

import io
import re
from collections import Counter
from xml.etree import ElementTree

import attrs
import numpy as np
import pytest
from matplotlib.image import imread

from remat_facade.report import picture
from remat_facade.report.html import page
from remat_facade.report.matrix import draw_matrix
from remat_facade.report.stages import pooled, stages
from remat_graph import (
    Compute,
    Graph,
    Implementation,
    InvalidSchedule,
    Op,
    Placement,
    Plan,
    Role,
    Schedule,
    Value,
    simulate,
)
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.small_graphs import small_graph
from remat_solvers.testing import chain


def step() -> Graph:
    """x -> a, m -> out | t, out -> d; d, a, m -> g: an op of two values, an output, a tangent, a gradient."""
    values = [
        Value(name="x", nbytes=100, external=True),
        Value(name="a", nbytes=10),
        Value(name="m", nbytes=1),
        Value(name="out", nbytes=5, role=Role.OUTPUT),
        Value(name="t", nbytes=5, role=Role.TANGENT, of=3),
        Value(name="d", nbytes=5),
        Value(name="g", nbytes=7, role=Role.GRAD, of=0),
        Value(name="weight", nbytes=50, placement=Placement.DEVICE),
    ]
    ops = [((0,), (1, 2)), ((1, 7), (3,)), ((4, 3), (5,)), ((5, 1, 2), (6,))]
    return small_graph("step", values, ops, names=("op0", "op1", "op2", "op3"), forward=2, time_s=1)


def plan_of(graph: Graph, order: list[int]) -> Plan:
    """The plan that runs ops in this order."""
    schedule = Schedule.from_order(graph, order)
    peak = simulate(graph, schedule).peak_nbytes
    return Plan.from_schedule(graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="hand")


def test_the_matrices_of_a_small_step() -> None:
    """Op 0 is recomputed in the last stage; a and m are freed before, out and the weight stay."""
    graph = step()
    cut = stages(graph, Schedule.from_order(graph, [0, 1, 2, 0, 3]))
    assert cut.ops == (0, 1, 2, 3)
    assert [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]] == cut.runs.tolist()
    assert [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]] == cut.repeats.tolist()
    assert [graph.values[v].name for v in cut.values] == ["weight", "a", "m", "out", "t", "d", "g"]
    assert [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 0, 1, 0],
    ] == cut.live.astype(int).tolist()
    assert (cut.boundary, cut.forward_values) == (2, 4)


def test_nothing_repeated_and_what_runs_last() -> None:
    """Without repeats R is the identity; runs after the last first run are in the last stage."""
    graph = step()
    plain = stages(graph, Schedule.from_order(graph, range(4)))
    assert np.eye(4).tolist() == plain.runs.tolist()
    assert not plain.repeats.any()
    late = stages(graph, Schedule.from_order(graph, [0, 1, 2, 3, 0, 0]))
    assert [2, 0, 0, 1] == late.runs[3].tolist()


@pytest.mark.parametrize("moves", [0, 3])
@pytest.mark.parametrize("seed", range(60))
def test_they_agree_with_the_referee(seed: int, moves: int) -> None:
    """The bytes of a row of S equal those of the referee; the columns of R count the runs."""
    graph = random_graph(seed, forward_ops=1 + seed % 12)
    schedule = Schedule.from_order(graph, random_order(graph, seed))
    schedule = random_moves(graph, schedule, seed, moves=moves)
    cut, held = stages(graph, schedule), simulate(graph, schedule).live_nbytes
    assert tuple(dict.fromkeys(schedule.order)) == cut.ops
    assert Counter(schedule.order) == dict(zip(cut.ops, cut.runs.sum(axis=0).tolist(), strict=True))
    assert not np.triu(cut.runs, 1).any()

    size = np.array([graph.allocated_nbytes(v) for v in cut.values])
    tangents = sum(map(graph.allocated_nbytes, graph.tangents))
    seen: set[int] = set()
    begins = True
    for position, one in enumerate(schedule.steps):
        if not isinstance(one, Compute):
            continue
        if begins and len(seen) < len(cut.ops):
            before = held[position - 1] if position else 0
            # The tangents come with the step at the boundary, which the referee counts to that step.
            before += tangents if position == schedule.boundary else 0
            assert before == int(size[cut.live[len(seen)]].sum())
        begins = one.op not in seen
        seen.add(one.op)
    before_it = schedule.steps[: schedule.boundary]
    assert len({one.op for one in before_it if isinstance(one, Compute)}) == cut.boundary


def test_a_schedule_that_cannot_run() -> None:
    """An invalid schedule raises the referee's error."""
    with pytest.raises(InvalidSchedule):
        stages(step(), Schedule([Compute(1)], 1))


def test_one_among_many_is_never_lost() -> None:
    """A single entry is never lost; a cell is the share of its entries, also at the uneven edge."""
    for row in range(7):
        for column in range(11):
            matrix = np.zeros((7, 11), np.uint16)
            matrix[row, column] = 300
            small = pooled(matrix, 3)
            assert small.shape == (3, 3)
            assert np.argwhere(small).tolist() == [[row // 3, column // 4]]
    matrix = np.ones((3, 5), np.bool_)
    matrix[0, 4] = False
    assert [[1, 0.75], [1, 1]] == pooled(matrix, 2).tolist()
    assert pooled(np.zeros((0, 0)), 5).shape == (0, 0)


def orange(figure: object) -> int:
    """Number of pixels with the colour of repeats."""
    pixels = imread(io.BytesIO(picture.png(figure)))
    wanted = [int(picture.Palette().repeat[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(pixels[:, :, :3] - wanted) < 0.05).all(axis=2).sum())


@pytest.mark.parametrize("length", [10, 400])
def test_a_lone_repeat_is_seen(length: int) -> None:
    """A repeat shows in a small and in a pooled matrix; without one only the legend has its colour."""
    graph = chain(length)
    order = list(range(len(graph.ops)))
    without = orange(draw_matrix(graph, plan_of(graph, order)))
    assert orange(draw_matrix(graph, plan_of(graph, [*order[:-1], 5, order[-1]]))) > without > 0


def bare(count: int) -> Graph:
    """Ops that make a value of 0 bytes each, all forward."""
    values = [Value(name=f"v{i}", nbytes=0) for i in range(count)]
    ops = [
        Op(name=f"op{i}", target="op", implementations=[Implementation(inputs=(), outputs=(i,))])
        for i in range(count)
    ]
    return Graph(name="$bare & <b>$", values=values, ops=ops)


@pytest.mark.parametrize("graph", [bare(0), bare(1), bare(3)], ids=["no ops", "one op", "no backward"])
def test_odd_graphs_can_be_drawn(graph: Graph) -> None:
    """An empty graph, no backward, no sizes; names are escaped."""
    text = page(graph, plan_of(graph, list(range(len(graph.ops)))))
    assert "$bare &amp; &lt;b&gt;$: runs and live values" in text


def test_the_picture_follows_the_page() -> None:
    """No colour of its own and no raster in the SVG, the same PNG twice, and all figures in one page."""
    graph = step()
    plan = plan_of(graph, [0, 1, 2, 0, 3])
    svg = picture.svg(draw_matrix(graph, plan))
    ElementTree.fromstring(svg)
    assert "<image" not in svg
    assert all(colour not in svg for colour in attrs.asdict(picture.Palette()).values())
    for name in ("unplanned", "repeat", "planned", "gradients", "grid"):
        assert f"var(--{name})" in svg
    assert picture.png(draw_matrix(graph, plan)) == picture.png(draw_matrix(graph, plan))

    text = page(graph, plan)
    assert text.count("<svg") == 6  # three figures, for wide and narrow screens
    ids = Counter(re.findall(r'\bid="([^"]*)"', text))
    assert set(ids.values()) == {1}
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', text)) <= set(ids)
