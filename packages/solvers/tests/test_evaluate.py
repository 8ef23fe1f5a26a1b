"""The compiled evaluator says exactly what the referee says."""

import random

import pytest

from remat_graph import InvalidSchedule, Schedule, simulate, verify
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.testing import random_graph


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_the_referee_on_random_sequences(seed: int) -> None:
    """Peak and time are equal to the byte and bit, and so is the verdict on validity."""
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
        got = evaluate(arrays, order)
        try:
            timeline = simulate(graph, Schedule.from_order(graph, order))
        except InvalidSchedule:
            assert not got.valid
        else:
            assert got.valid
            assert timeline.peak_nbytes == got.peak_nbytes
            assert timeline.time_s == got.time_s
