"""The compiled evaluator and the referee agree on graphs with everything the memory rule knows."""

import random

import pytest

from remat_graph import InvalidSchedule, Schedule, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_solvers.evaluation.arrays import evaluate, flatten


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_the_referee(seed: int) -> None:
    """On orders that recompute, and on the same orders with one run moved."""
    graph = random_graph(seed, seed % 12 + 1)
    arrays, rng = flatten(graph), random.Random(seed)
    for attempt in range(6):
        order = random_order(graph, seed + 100 * attempt, forget=attempt * 0.12)
        if attempt > 3:
            order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
        got = evaluate(arrays, order)
        try:
            timeline = simulate(graph, Schedule.from_order(graph, order))
        except InvalidSchedule:
            assert not got.valid
        else:
            assert (True, timeline.peak_nbytes, timeline.time_s) == (got.valid, got.peak_nbytes, got.time_s)
