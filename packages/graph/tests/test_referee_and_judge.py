"""The simulation and the corpus' own judge agree on any schedule of any corpus graph."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

from remat_graph import Graph, InvalidSchedule, Schedule, load_graph, noremat_peak_nbytes, simulate

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "data" / "graphs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def judge():
    spec = importlib.util.spec_from_file_location("judge", FOLDER / "judge.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    path = FOLDER / f"{request.param}.json"
    return json.loads(path.read_text()), load_graph(path)


def random_order(graph: Graph, rng: random.Random, forget: float) -> list[int]:
    """Ops in random topological order; some values are freed and recomputed when they are read."""
    readers = [0] * len(graph.ops)
    followers: list[list[int]] = [[] for _ in graph.ops]
    for i, op in enumerate(graph.ops):
        for maker in {graph.producer[v] for v in op.first.inputs}:
            followers[maker].append(i)
            readers[i] += 1
    live: set[int] = set()
    order: list[int] = []

    def run(op: int) -> None:
        stack = [op]
        while stack:
            missing = [v for v in graph.ops[stack[-1]].first.inputs if v not in live]
            if missing:
                stack.append(graph.producer[missing[0]])
                continue
            op = stack.pop()
            order.append(op)
            live.update(graph.ops[op].first.outputs)

    ready = [i for i, count in enumerate(readers) if not count]
    while ready:
        forward = [i for i in ready if not graph.ops[i].backward] or ready
        chosen = min(rng.sample(forward, min(2, len(forward))))
        ready.remove(chosen)
        if rng.random() < forget and live:
            live.difference_update(rng.sample(sorted(live), min(len(live), 1 + int(4 * rng.random()))))
        run(chosen)
        for follower in followers[chosen]:
            readers[follower] -= 1
            if not readers[follower]:
                ready.append(follower)
    return order


def test_all_six_graphs_are_here():
    """Otherwise the tests below would check nothing."""
    assert 6 == len(NAMES)


def test_the_unplanned_peaks_are_equal(judge, case):
    """Budgets are fractions of this peak."""
    raw, graph = case
    assert judge.save_all_peak(raw) == noremat_peak_nbytes(graph)


@pytest.mark.parametrize("seed", range(4))
def test_peaks_and_overheads_are_equal(judge, case, seed):
    """On random valid schedules, with few repeats and with many."""
    raw, graph = case
    order = random_order(graph, random.Random(seed), forget=(0.0, 0.02, 0.1, 0.3)[seed])
    peak, overhead = judge.replay(raw, order)
    timeline = simulate(graph, Schedule.from_order(graph, order))
    assert peak == timeline.peak_nbytes == timeline.live_peak_nbytes
    assert overhead == pytest.approx(100 * timeline.recomputed_s / graph.time_s, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_both_refuse_an_order_that_cannot_be(judge, case, seed):
    """A run is missing, or comes too early."""
    raw, graph = case
    rng = random.Random(seed)
    order = list(range(len(graph.ops)))
    op = order.pop(rng.randrange(len(order)))
    if seed % 2 and graph.ops[op].first.inputs:
        order.insert(0, op)
    with pytest.raises(ValueError, match=r"must run|before they are computed|reads dead"):
        judge.replay(raw, order)
    with pytest.raises(InvalidSchedule):
        simulate(graph, Schedule.from_order(graph, order))
