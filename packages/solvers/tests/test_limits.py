"""Work ends where it gains nothing and when time is up: deadline checks and rounds are counted."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from remat_graph import Graph, noremat_peak_nbytes
from remat_graph.partition import at_articulations
from remat_graph.testing.random_training import random_links, random_training
from remat_solvers import (
    Deadline,
    Problem,
    Progress,
    bounds_of,
    budgets_of,
    get_solver,
    min_budget,
    pareto,
    solver_names,
)
from remat_solvers.bounds.coarse_time_bound import CoarseBound, Round
from remat_solvers.chain.table import ChainTable, ConservativeChain, keep_all
from remat_solvers.evaluation.arrays import Ints
from remat_solvers.local_search.anneal import AnnealingWalk
from remat_solvers.methods.twremat import TreeDecomposition, TwRemat
from remat_solvers.offload.solver import Offload
from remat_solvers.portfolio import auto
from remat_solvers.testing import chain, unet

PARTS = 200  # of a solver that may each find out for itself that time is up


def looks(seconds: float) -> tuple[Deadline, Iterator[float]]:
    """A deadline whose clock advances by a second with each check."""
    clock = count(0.0)
    return Deadline(seconds, clock=clock.__next__), clock


def idle_round(extra_s: float = 0.0) -> Round:
    """A round that found nothing and ended, after so much work."""
    return Round(
        extra_s=extra_s,
        order=None,
        fits=False,
        slack_s=0.0,
        proven=False,
        ended=True,
        checks=auto.CHECKS,
    )


def with_rounds(monkeypatch: pytest.MonkeyPatch, gains: int) -> list[int]:
    """Let rounds of the coarse program never end, of which so many raise the bound at first; note them."""
    done: list[int] = []

    def play(self: CoarseBound, *_: Any, **__: Any) -> Round:
        done.append(len(done) + 1)
        return idle_round(1e-3 * self.graph.time_s * min(len(done), gains))

    monkeypatch.setattr(CoarseBound, "round", play)
    monkeypatch.setattr(CoarseBound, "finished", False)
    monkeypatch.setattr(CoarseBound, "variables", 1)
    monkeypatch.setattr("remat_solvers.bounds.time_bound.CutBound.extra_s", lambda *_: 0.0)
    return done


@pytest.mark.parametrize("gains", [0, 1, 7])
def test_rounds_that_gain_nothing_end(monkeypatch: pytest.MonkeyPatch, gains: int) -> None:
    """Some after the last one that gained."""
    done = with_rounds(monkeypatch, gains)
    graph = chain(24)
    solution = get_solver("auto", moves=0).solve(Problem(graph, int(0.5 * noremat_peak_nbytes(graph))))
    assert solution.feasible
    assert gains + auto.IDLE_ROUNDS == len(done) == solution.stats["rounds"]


def test_rounds_end_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget right below the smallest, for which no schedule is found and no proof either."""
    graph = chain(24, skips=4)
    budget = min_budget(graph).nbytes - 1
    done = with_rounds(monkeypatch, 0)
    assert not get_solver("auto", moves=0).solve(Problem(graph, budget)).feasible
    assert auto.IDLE_ROUNDS == len(done)


def nothing_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction and divide and conquer give the trace order back, which does not fit."""

    def trace(arrays: Any, *_: Any, **__: Any) -> Ints:
        return np.arange(len(arrays.backward), dtype=np.int64)

    monkeypatch.setattr(auto, "evict", trace)
    monkeypatch.setattr(auto, "keep_only", trace)
    monkeypatch.setattr(auto, "halve", trace)


def test_a_short_walk_comes_before_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no start fits, the walk finds a schedule, and the rounds know of it."""
    nothing_is_evicted(monkeypatch)
    monkeypatch.setattr(auto, "plan", lambda *_: None)
    monkeypatch.setattr(auto, "cheapest", lambda *_: (None, 0))
    done = with_rounds(monkeypatch, 0)
    told: list[tuple[str, int]] = []

    def tell(progress: Progress) -> None:
        if progress.time_s is not None:
            told.append((progress.solver, len(done)))

    graph = chain(40)
    problem = Problem(graph, int(0.4 * noremat_peak_nbytes(graph)))
    get_solver("auto").solve(problem, Deadline(on_progress=tell))
    assert ("walk", 0) == told[0]


def test_the_walk_keeps_to_the_moves_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: none is tried."""
    graph = chain(24, skips=4)
    problem = Problem(graph, min_budget(graph).nbytes - 1)
    with_rounds(monkeypatch, 0)
    assert 0 == get_solver("auto", moves=0).solve(problem).stats["moves"]


@pytest.mark.parametrize(("length", "moves"), [(40, 40_000), (900, 10_671)])
def test_the_walk_takes_no_longer_in_larger_graphs(
    monkeypatch: pytest.MonkeyPatch, length: int, moves: int
) -> None:
    """A move costs in proportion to the graph: above 600 ops there are fewer (2,249 ops here)."""
    nothing_is_evicted(monkeypatch)
    with_rounds(monkeypatch, 0)
    tried: list[int] = []

    def anneal(self: AnnealingWalk, moves: int, *_: Any, **__: Any) -> None:
        tried.append(moves)

    monkeypatch.setattr(AnnealingWalk, "anneal", anneal)
    graph = chain(length)
    get_solver("auto").solve(Problem(graph, int(0.4 * noremat_peak_nbytes(graph))))
    assert moves == tried[0]


@pytest.mark.parametrize("name", sorted(set(solver_names()) - {"offload"}))
@pytest.mark.parametrize("graph", [chain(40), unet(4)], ids=lambda graph: graph.name)
@pytest.mark.parametrize("seconds", [0.0, 40.0])
def test_every_solver_soon_ends_when_time_is_up(name: str, graph: Graph, seconds: float) -> None:
    """Each part checks the deadline once more, and none continues."""
    deadline, clock = looks(seconds)
    problem = Problem(graph, int(0.3 * noremat_peak_nbytes(graph)), random_links(graph, 0))
    get_solver(name).solve(problem, deadline)
    assert next(clock) <= seconds + PARTS


def test_a_table_is_filled_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry a look; what is not filled holds no plan."""
    graph = chain(40)
    groups = at_articulations(graph, 64)
    options = [[keep_all(groups, s)] for s in range(len(groups))]
    filled: list[tuple[int, int]] = []
    fill = ChainTable._fill

    def counted(self: ChainTable, i: int, j: int) -> None:
        filled.append((i, j))
        fill(self, i, j)

    monkeypatch.setattr(ChainTable, "_fill", counted)
    peak = noremat_peak_nbytes(graph)
    deadline, _ = looks(20.0)
    assert [] == list(ChainTable(ConservativeChain(groups), options, peak, 100, deadline).orders())
    assert 19 == len(filled)  # the first look is for when time began
    assert deadline.hit
    assert list(ChainTable(ConservativeChain(groups), options, peak, 100, Deadline()).orders())


def test_a_recursion_ends_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No separator is looked for any more."""
    asked: list[int] = []
    separator = TreeDecomposition.separator

    def counted(self: TreeDecomposition, part: set[int]) -> set[int]:
        asked.append(len(part))
        return separator(self, part)

    monkeypatch.setattr(TreeDecomposition, "separator", counted)
    graph = unet(4)
    problem = Problem(graph, int(0.3 * noremat_peak_nbytes(graph)))
    TwRemat().solve(problem)
    whole = len(asked)
    asked.clear()
    deadline, _ = looks(5.0)
    TwRemat().solve(problem, deadline)
    assert len(asked) < 5 < whole
    assert deadline.hit


def test_queries_keep_to_their_limit() -> None:
    """Without time the smallest budget known is the unplanned peak, and nothing is proven."""
    graph = chain(24)
    peak = noremat_peak_nbytes(graph)
    smallest = min_budget(graph, Deadline(0.0))
    assert (peak, True) == (smallest.nbytes, smallest.cut_short)
    assert not min_budget(graph).cut_short
    assert (peak,) == budgets_of(graph, seconds=1e-9)
    assert [peak] == [point.budget_nbytes for point in pareto(graph, seconds=1e-9)]
    assert (0.0,) == bounds_of(graph, [peak // 2], seconds=1e-9)
    assert bounds_of(graph, [peak // 2]) > (0.0,)


def test_a_search_that_moves_ends_when_time_is_up() -> None:
    """Even without a plan: two candidates at most, and the shortage is only an estimate."""
    graph = random_training(3, 6)
    deadline = Deadline(0.0)
    solution = Offload().solve(Problem(graph, 1, random_links(graph, 3)), deadline)
    assert not solution.feasible
    assert deadline.hit
    assert solution.stats["tried"] <= 2
    assert solution.shortage is not None
    assert not solution.shortage.sufficient


def test_a_part_has_the_clock_of_the_whole() -> None:
    """A part reports to the whole that its time was up."""
    deadline, clock = looks(100.0)
    part = deadline.share(0.5)
    while not part.reached():
        assert not deadline.hit
    assert deadline.hit
    assert 50.0 <= next(clock) < 60.0
