"""Moves of the sequence search: in which order they compute dead values, and which runs they remove."""

import random
from itertools import permutations
from typing import Any

import numba
import numpy as np
import pytest

from remat_graph import Graph, Value
from remat_graph.testing.small_graphs import small_graph
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.search_state import make_state
from remat_solvers.kernels import derived, incremental, moves, recompute


@numba.njit
def closed_over(S: Any, value: Any, gap: Any) -> Any:
    """How many runs compute a value again; `S.extra` has them."""
    derived.rebuild(S, 1 << 60)
    incremental.begin(S)
    S.meta.left_s = np.inf
    good = recompute.close_over(S, value, gap, 0.0, 50)
    return S.meta.inserted if good else -1


@numba.njit
def gave_way(S: Any, value: Any, p: Any, gap: Any) -> Any:
    """How many runs a move deletes, which recomputes at `gap` the value that the run at `p` makes."""
    derived.rebuild(S, 1 << 60)
    incremental.begin(S)
    moves.give_way(S, value, p, gap)
    return S.meta.deleted


def random_tree(seed: int) -> tuple[Graph, list[list[int]]]:
    """A forward in which each value is read once, and what each op reads; a backward reads the last value.

    Value i is made by op i.
    """
    rng = random.Random(seed)
    roots: list[int] = []
    children: list[list[int]] = []
    for i in range(rng.randint(6, 14)):
        taken = [roots.pop(rng.randrange(len(roots))) for _ in range(min(len(roots), rng.randint(0, 3)))]
        children.append(taken)
        roots.append(i)
    children.append(roots)
    values = [Value(name=f"v{i}", nbytes=rng.randint(1, 30)) for i in range(len(children) + 2)]
    last = len(children) - 1
    reads = [(each, (i,)) for i, each in enumerate(children)]
    ops = [*reads, ((last,), (last + 1,)), ((last, last + 1), (last + 2,))]
    return small_graph("tree", values, ops, forward=last + 2, time_s=1.0), children


def least_nbytes(graph: Graph, children: list[list[int]], root: int) -> int:
    """The smallest peak of all orders that compute the inputs of an op one after the other."""
    size = [value.nbytes for value in graph.values]
    need = {child: least_nbytes(graph, children, child) for child in children[root]}
    peaks = []
    for order in permutations(children[root]):
        held, peak = 0, 0
        for child in order:
            peak = max(peak, held + need[child])
            held += size[child]
        peaks.append(max(peak, held + size[root]))
    return min(peaks)


@pytest.mark.parametrize("seed", range(60))
def test_dead_inputs_are_computed_in_the_order_that_takes_the_least(seed: int) -> None:
    graph, children = random_tree(seed)
    root, count = len(children) - 1, len(graph.ops)
    state = make_state(flatten(graph), np.arange(count), seed=0)
    inserted = closed_over(state, root, count - 1)
    order = [int(op) for op in state.extra["in_op"][:inserted]]
    assert sorted(order) == list(range(len(children)))
    size = [value.nbytes for value in graph.values]
    held = peak = 0
    for op in order:
        peak = max(peak, held + size[op])
        held += size[op] - sum(size[child] for child in children[op])
    assert peak == least_nbytes(graph, children, root)


def test_the_order_matters_in_some_trees() -> None:
    """So that the test above is about something."""
    worse = 0
    for seed in range(60):
        graph, children = random_tree(seed)
        whole = evaluate(flatten(graph), np.arange(len(graph.ops))).profile[: len(children)].max()
        worse += int(whole) > least_nbytes(graph, children, len(children) - 1)
    assert worse > 10


def test_a_run_gives_way_only_where_nobody_reads_it_before() -> None:
    """Of the first runs only those of the backward do, and the run that reads a value last stays."""
    values = [Value(name=f"v{i}", nbytes=4) for i in range(7)]
    # a forward of two ops; b = (2) is read at once and at the end, c = (3) at the end only.
    ops = [
        ((), (0,)),
        ((0,), (1,)),
        ((1,), (2,)),
        ((1,), (3,)),
        ((2,), (4,)),
        ((4,), (5,)),
        ((2, 3, 5, 1), (6,)),
    ]
    graph = small_graph("readers", values, ops, forward=2, time_s=1.0)
    state = make_state(flatten(graph), np.arange(7), seed=0)
    assert gave_way(state, 3, 3, 6) == 1
    assert gave_way(state, 2, 2, 6) == 0  # read at 4
    assert gave_way(state, 2, 4, 6) == 0  # the run that reads it does not make it
    assert gave_way(state, 1, 1, 6) == 0  # of the forward
