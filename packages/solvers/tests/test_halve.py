"""Divide-and-conquer checkpointing."""

import math

import numpy as np
import pytest

from remat_graph import Schedule, noremat_peak_nbytes, simulate
from remat_solvers import Deadline, Problem
from remat_solvers.bounds import budget_floor
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.halve import WIDTHS, ForwardOrder, halve
from remat_solvers.portfolio.auto import Auto
from remat_solvers.testing import chain, random_graph, transformer, unet


@pytest.mark.parametrize("seed", range(30))
def test_orders_are_valid(seed: int) -> None:
    """Buffers, shared storage and ops that run once included; the referee judges."""
    graph = random_graph(seed, ops=4 + seed)
    arrays = flatten(graph)
    for width in WIDTHS:
        order = ForwardOrder(arrays).reversal(width)
        assert simulate(graph, Schedule.from_order(graph, order.tolist())).time_s >= graph.time_s


@pytest.mark.parametrize("length", [8, 64, 512])
def test_a_chain_keeps_a_logarithm_of_its_values(length: int) -> None:
    """And runs each forward op at most as often as there are halvings: cuts lie in the middle third."""
    graph = chain(length)
    arrays = flatten(graph)
    order = ForwardOrder(arrays).reversal(1)
    halvings = math.ceil(math.log(length, 1.5)) + 1
    assert np.bincount(order).max() <= halvings
    peak_nbytes = evaluate(arrays, order).peak_nbytes
    assert peak_nbytes <= budget_floor(graph).nbytes + halvings * int(arrays.size.max())


def test_wider_parts_recompute_less() -> None:
    """A part as wide as the forward recomputes nothing."""
    arrays = flatten(unet(5))
    times = [evaluate(arrays, ForwardOrder(arrays).reversal(width)).time_s for width in (1, 4, 16, 10_000)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == unet(5).time_s


def test_it_fits_where_evictions_from_trace_order_do_not() -> None:
    """A transformer of 12 layers at a sixteenth of its memory, planned without a walk."""
    graph = transformer(12)
    arrays, budget_nbytes = flatten(graph), noremat_peak_nbytes(graph) // 16
    assert evaluate(arrays, evict(arrays, budget_nbytes, Deadline())).peak_nbytes > budget_nbytes
    assert evaluate(arrays, halve(arrays, budget_nbytes, Deadline())).peak_nbytes <= budget_nbytes
    assert Auto(moves=0).solve(Problem(graph=graph, budget_nbytes=budget_nbytes)).feasible


def test_a_graph_without_a_forward_keeps_its_order() -> None:
    """Nothing to cut."""
    arrays = flatten(random_graph(0, ops=3))
    alone = arrays._replace(backward=np.ones_like(arrays.backward))
    assert ForwardOrder(alone).reversal(1).tolist() == list(range(len(alone.backward)))
