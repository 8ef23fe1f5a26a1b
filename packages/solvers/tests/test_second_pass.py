"""Gradients left to a second pass over the step."""

import numpy as np
import pytest

from remat_graph import Graph, Role, Schedule, Value, noremat_peak_nbytes, simulate
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.small_graphs import small_graph
from remat_solvers import Deadline, min_budget
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.local_search.second_pass import ops_of_one_gradient, with_second_pass
from remat_solvers.testing import random_graph

SMALL, LARGE, GRADIENT = 1, 50, 40


def wide_first_layer() -> Graph:
    """A network of two layers: the first has large activations, the second a large gradient."""
    values = [
        Value(name="x", nbytes=0, external=True),
        Value(name="wide", nbytes=LARGE),
        Value(name="thin", nbytes=SMALL),
        Value(name="out", nbytes=SMALL),
        Value(name="d_thin", nbytes=SMALL),
        Value(name="second gradient", nbytes=GRADIENT, role=Role.GRAD),
        Value(name="d_wide", nbytes=LARGE),
        Value(name="first gradient", nbytes=SMALL, role=Role.GRAD),
    ]
    forward = [((0,), (1,)), ((1,), (2,)), ((2,), (3,))]
    backward = [((3,), (4,)), ((4, 2), (5,)), ((4, 1), (6,)), ((6,), (7,))]
    return small_graph("wide first layer", values, forward + backward, forward=3, time_s=1.0)


def test_a_large_gradient_is_left_to_a_second_pass() -> None:
    graph = wide_first_layer()
    arrays = flatten(graph)
    trace = np.arange(len(graph.ops))
    once = 2 * LARGE + GRADIENT + SMALL
    assert evaluate(arrays, trace).peak_nbytes >= once
    found = with_second_pass(arrays, trace, Deadline())
    assert found is not None
    order, peak_nbytes = found
    assert peak_nbytes == simulate(graph, Schedule.from_order(graph, order.tolist())).peak_nbytes < once
    assert min_budget(graph).nbytes < once


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_is_valid(seed: int) -> None:
    """Of any sequence, also where ops may not run again, overwrite buffers or make several gradients."""
    graph = random_graph(seed, ops=14)
    arrays = flatten(graph)
    order = np.array(random_order(graph, seed))
    found = with_second_pass(arrays, order, Deadline())
    if found is None:
        return
    replayed, peak_nbytes = found
    assert simulate(graph, Schedule.from_order(graph, replayed.tolist())).peak_nbytes == peak_nbytes
    assert set(replayed.tolist()) == set(range(len(graph.ops)))


def test_most_random_graphs_have_a_second_pass() -> None:
    """So that the test above is about something."""
    graphs = [random_graph(seed, ops=14) for seed in range(40)]
    orders = [with_second_pass(flatten(graph), np.arange(len(graph.ops)), Deadline()) for graph in graphs]
    assert sum(order is not None for order in orders) > 20


@pytest.mark.parametrize("seed", range(40))
def test_ops_of_one_gradient(seed: int) -> None:
    """They are those from which all paths end at one and the same gradient."""
    graph = random_graph(seed, ops=14)
    arrays = flatten(graph)

    def ends(op: int) -> set[int]:
        found: set[int] = set()
        for v in graph.ops[op].first.outputs:
            found |= {v} if arrays.pinned[v] and arrays.size[v] > 0 else set()
            for other, reader in enumerate(graph.ops):
                if any(v in run.inputs for run in reader.implementations):
                    found |= ends(other) or {-other}
        return found

    expected = {}
    for op, one in enumerate(graph.ops):
        needs = ends(op)
        if one.backward and len(needs) == 1 and min(needs) >= 0:
            expected[op] = needs.pop()
    assert ops_of_one_gradient(arrays) == expected


def test_a_passed_deadline_ends_it() -> None:
    graph = wide_first_layer()
    assert with_second_pass(flatten(graph), np.arange(len(graph.ops)), Deadline(0.0)) is None


def test_the_peak_of_a_step_without_gradients_stays() -> None:
    """There is nothing to delay, and nothing breaks."""
    values = [Value(name=name, nbytes=SMALL) for name in "ab"]
    graph = small_graph("forward", values, [((), (0,)), ((0,), (1,))], time_s=1.0)
    assert with_second_pass(flatten(graph), np.arange(2), Deadline()) is None
    assert min_budget(graph).nbytes <= noremat_peak_nbytes(graph)
