"""The floor from the last run of heavy ops."""

from collections.abc import Callable

import pytest

from remat_graph import (
    Graph,
    Implementation,
    Op,
    Role,
    Schedule,
    Value,
    load_graph,
    noremat_peak_nbytes,
    relaxed,
    simulate,
    specialize,
)
from remat_graph.testing.random_switches import with_random_switches
from remat_graph.testing.random_training import random_training
from remat_solvers import Deadline, min_budget
from remat_solvers.bounds import budget_floor, last_run
from remat_solvers.bounds.decisions import combinations_of
from remat_solvers.bounds.last_run import raised_floor_nbytes
from remat_solvers.switching import smallest_peak
from remat_solvers.testing import dense, random_graph

from . import oracle
from .corpus import GRAPHS
from .test_bounds import layers, leaves, run


@pytest.fixture
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor to the byte, with small values too."""
    monkeypatch.setattr(last_run, "CLOSE", 0.0)
    monkeypatch.setattr(last_run, "SMALL", 0.0)


def smallest_nbytes(graph: Graph) -> int:
    """The smallest budget that any schedule fits, by brute force."""
    low, high = 0, noremat_peak_nbytes(graph)
    while low < high:
        middle = (low + high) // 2
        if oracle.fastest_s(graph, middle) == float("inf"):
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("family", [layers, lambda seed: random_graph(seed, ops=6, fancy=False)])
@pytest.mark.parametrize("seed", range(30))
def test_no_floor_is_above_the_smallest_budget(seed: int, family: Callable[[int], Graph]) -> None:
    """By brute force; tangents may come late, and values of a forward may never be needed again."""
    graph = family(seed)
    assert raised_floor_nbytes(graph, 0, noremat_peak_nbytes(graph), Deadline()) <= smallest_nbytes(graph)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("seed", range(30))
def test_the_floor_is_the_smallest_budget_where_gradients_pile_up(seed: int) -> None:
    graph = leaves(seed)
    raised = raised_floor_nbytes(graph, 0, noremat_peak_nbytes(graph), Deadline())
    assert max(raised, budget_floor(graph).nbytes) == smallest_nbytes(graph)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("seed", range(20))
def test_no_floor_is_above_a_schedule_that_reuses_storage(seed: int) -> None:
    for graph in (random_graph(seed, ops=14), random_training(seed, layers=4)):
        peak = simulate(graph, smallest_peak(graph, 0, Deadline())).peak_nbytes
        assert raised_floor_nbytes(graph, 0, 3 * peak, Deadline()) <= peak


@pytest.mark.usefixtures("exactly")
def test_of_two_large_inputs_one_is_made_while_the_other_is_live() -> None:
    """Gradients need two values of 10 bytes, each made from one of 10: 30 bytes, where 26 suffice to read."""
    values = [
        Value(name="x", nbytes=1, role=Role.ACTIVATION),
        *(Value(name=name, nbytes=10) for name in ("a", "b", "c", "d")),
        Value(name="w", nbytes=5, role=Role.GRAD),
        Value(name="g", nbytes=1, role=Role.GRAD),
    ]
    ops = [
        run("fx", [], [0], 1.0),
        *(run(f"f{name}", [0], [v], 1.0) for name, v in (("a", 1), ("b", 2))),
        *(run(f"f{name}", [v], [v + 2], 1.0) for name, v in (("c", 1), ("d", 2))),
        run("bw", [3, 4], [5], 1.0),
        run("bg", [3, 4], [6], 1.0),
    ]
    graph = Graph(name="pair", values=values, ops=ops)
    assert budget_floor(graph).nbytes == 26
    assert smallest_nbytes(graph) == 30
    assert raised_floor_nbytes(graph, 26, 60, Deadline()) == 30


@pytest.mark.parametrize("seed", range(8))
def test_with_switches_it_holds_for_every_decision(seed: int) -> None:
    graph = with_random_switches(random_graph(seed, 10), seed, most=3)
    made = [specialize(graph, on).graph for on in combinations_of(graph)[0]]
    peaks = [simulate(each, smallest_peak(each, 0, Deadline())).peak_nbytes for each in made]
    assert raised_floor_nbytes(graph, 0, 2 * min(peaks), Deadline()) <= min(peaks)


Way = tuple[list[int], list[int], int]
"""Inputs, outputs and workspace of a run."""


def two_ways(sizes: dict[str, int], ops: dict[str, tuple[Way, ...]], reuses: tuple[int, int] | None) -> Graph:
    """A graph whose ops may run otherwise the second time; gradients are called "g", backward ops "b"."""
    values = [
        Value(name=name, nbytes=nbytes, role=Role.GRAD if name[0] == "g" else Role.ACTIVATION)
        for name, nbytes in sizes.items()
    ]
    made = []
    for name, ways in ops.items():
        runs = [
            Implementation(
                inputs=inputs,
                outputs=outputs,
                time_s=1.0,
                workspace_nbytes=workspace,
                reuses=[reuses] if reuses and reuses[0] in outputs else [],
            )
            for inputs, outputs, workspace in ways
        ]
        rerun = len(runs) - 1
        made.append(Op(name=name, target=name, backward=name[0] == "b", implementations=runs, rerun=rerun))
    return Graph(name="ways", values=values, ops=made)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize(
    ("sizes", "ops", "reuses", "order", "peak_nbytes"),
    [
        (
            {"a": 5, "b": 2, "c": 5, "d": 2, "g0": 8, "g1": 3},
            {
                "f0": (([], [0], 10), ([], [0, 1], 0)),
                "f1": (([1], [2, 3], 0), ([], [2], 0)),
                "b0": (([0, 2, 3], [4], 0),),
                "b1": (([1, 2, 4], [5], 0),),
            },
            None,
            [0, 0, 1, 2, 0, 1, 3],
            20,
        ),
        (
            {"a": 2, "g": 8, "b": 8, "c": 5, "g0": 1, "d": 8, "g1": 8},
            {
                "f0": (([], [0], 10),),
                "f1": (([0], [1, 2], 10), ([], [1, 2, 3], 10)),
                "b0": (([0, 1, 2], [4], 0),),
                "b1": (([0, 1, 4], [5, 6], 0),),
            },
            None,
            [0, 1, 2, 3],
            28,
        ),
        (
            {"a": 3, "b": 2, "c": 2, "d": 2, "e": 3, "f": 8, "g0": 1, "g1": 3},
            {
                "f0": (([], [0], 0),),
                "f1": (([0], [1], 10), ([], [1], 10)),
                "f2": (([0], [2], 0),),
                "f3": (([2], [3], 5), ([2], [3, 4], 5)),
                "b0": (([3], [5], 0),),
                "b1": (([2, 4, 5], [6], 0),),
                "b2": (([1, 4, 6], [7], 0),),
            },
            (3, 2),
            [0, 2, 3, 4, 2, 1, 2, 3, 2, 4, 3, 4, 5, 0, 3, 2, 4, 1, 0, 2, 3, 6],
            15,
        ),
    ],
)
def test_repeats_may_read_less_and_make_more(
    sizes: dict[str, int],
    ops: dict[str, tuple[Way, ...]],
    reuses: tuple[int, int] | None,
    order: list[int],
    peak_nbytes: int,
) -> None:
    """Whichever way an op ran last: of the first ways alone, or of what both make, floors were too high."""
    graph = two_ways(sizes, ops, reuses)
    assert simulate(graph, Schedule.from_order(graph, order)).peak_nbytes == peak_nbytes
    assert raised_floor_nbytes(graph, 0, 3 * peak_nbytes, Deadline()) <= peak_nbytes


@pytest.mark.usefixtures("exactly")
def test_ops_on_the_way_back_run_later() -> None:
    """A schedule of 18 bytes repeats the heavy ops that make the inputs of the one that is last."""
    graph = two_ways(
        {"a": 5, "b": 3, "c": 5, "g": 5, "h": 2},
        {
            "f0": (([], [0], 10),),
            "f1": (([0], [1], 10),),
            "f2": (([0], [2], 10),),
            "b0": (([1, 2], [3], 0),),
            "b1": (([2, 3], [4], 0),),
        },
        (2, 0),
    )
    peak = simulate(graph, smallest_peak(graph, 0, Deadline())).peak_nbytes
    assert peak == 18
    assert raised_floor_nbytes(graph, 0, 3 * peak, Deadline()) <= peak


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("seed", range(8))
def test_the_floor_of_the_relaxed_graph_holds_for_every_decision(seed: int) -> None:
    graph = with_random_switches(random_graph(seed, 10), seed, most=3)
    made = [specialize(graph, on).graph for on in combinations_of(graph)[0]]
    peaks = [simulate(each, smallest_peak(each, 0, Deadline())).peak_nbytes for each in made]
    assert raised_floor_nbytes(relaxed(graph), 0, 2 * min(peaks), Deadline()) <= min(peaks)


def test_a_network_needs_its_gradients_beside_a_pair_of_activations() -> None:
    graph = load_graph(GRAPHS / "resnet50.json")
    found = min_budget(graph)
    assert found.floor_nbytes < 0.9 * found.nbytes < found.proven_nbytes <= found.nbytes
    told = str(found.as_error(found.proven_nbytes - 1, graph))
    assert "no schedule can fit it" in told
    assert f"given what must be kept after large ops; {found.floor_place} needs" in told
    assert "was found" in str(found.as_error(found.proven_nbytes, graph))


def test_without_time_or_work_the_known_floor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dense(2)
    floor_nbytes, peak_nbytes = budget_floor(graph).nbytes, noremat_peak_nbytes(graph)
    assert raised_floor_nbytes(graph, floor_nbytes, peak_nbytes, Deadline()) > floor_nbytes
    assert raised_floor_nbytes(graph, floor_nbytes, peak_nbytes, Deadline(0.0)) == floor_nbytes
    monkeypatch.setattr(last_run, "MOST_WORK", 0)
    assert raised_floor_nbytes(graph, floor_nbytes, peak_nbytes, Deadline()) == floor_nbytes


def test_a_search_that_is_cut_short_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dense(2)
    smallest = min_budget(graph).nbytes
    for work in (1_000, 10_000, 100_000):
        monkeypatch.setattr(last_run, "MOST_WORK", work)
        assert raised_floor_nbytes(graph, 0, 2 * smallest, Deadline()) <= smallest
