"""The compiled evaluator gives exactly what the referee gives."""

import random
from collections.abc import Sequence

import pytest

from remat_graph import Graph, InvalidSchedule, Schedule, simulate, verify
from remat_graph.testing import random_graphs
from remat_graph.testing.random_schedules import random_order
from remat_solvers.evaluation.arrays import Arrays, evaluate, flatten
from remat_solvers.testing import random_graph


def assert_agrees(graph: Graph, arrays: Arrays, order: Sequence[int]) -> None:
    """Peak and time are equal to the byte and bit, and so is the verdict on validity."""
    got = evaluate(arrays, order)
    try:
        timeline = simulate(graph, Schedule.from_order(graph, order))
    except InvalidSchedule:
        assert not got.valid
    else:
        assert (True, timeline.peak_nbytes, timeline.time_s) == (got.valid, got.peak_nbytes, got.time_s)


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_the_referee_on_random_sequences(seed: int) -> None:
    """Orders with ops inserted at random places, and some with one run moved."""
    rng = random.Random(seed)
    graph = random_graph(seed, ops=rng.randint(2, 24))
    verify(graph)
    arrays = flatten(graph)
    for _ in range(40):
        order = list(range(len(graph.ops)))
        for _ in range(rng.randint(0, 8)):
            order.insert(rng.randint(1, len(order)), rng.randrange(len(graph.ops)))
        if rng.random() < 0.2:
            i = rng.randrange(len(order))
            order.insert(i, order.pop(rng.randrange(len(order))))
        assert_agrees(graph, arrays, order)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_the_referee_on_rich_graphs(seed: int, dropped: bool) -> None:
    """Graphs with everything that the memory rule knows; orders that recompute, some with one run moved."""
    graph = random_graphs.random_graph(seed, seed % 12 + 1, dropped=dropped)
    arrays, rng = flatten(graph), random.Random(seed)
    for variant in range(6):
        order = random_order(graph, seed + 100 * variant, forget=variant * 0.12)
        if variant > 3:
            order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
        assert_agrees(graph, arrays, order)
