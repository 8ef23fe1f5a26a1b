"""The bound of the relaxed graph holds for every decision; rounds raise it while they are cheap."""

from itertools import chain, combinations

import pytest

from remat_graph import Graph, noremat_peak_nbytes, relaxed, specialize
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import Deadline, Problem, get_solver, min_budget
from remat_solvers.bounds import lower_bound
from remat_solvers.bounds.coarse_time_bound import CoarseBound, Round
from remat_solvers.bounds.graph_bound import CHECKS, FAR, GraphBound

AUTO = get_solver("auto", moves=1000)


def fastest_s(graph: Graph, budget_nbytes: int) -> float:
    """Of the plans of all decisions; infinite if none has one."""
    found = conflicts(graph)
    sets = chain.from_iterable(combinations(graph.switches, n) for n in range(len(graph.switches) + 1))
    graphs = [specialize(graph, on).graph for on in sets if compatible(found, on) == set(on)]
    times = [AUTO.solve(Problem(each, budget_nbytes)).time_s for each in graphs]
    return min((time_s for time_s in times if time_s is not None), default=float("inf"))


@pytest.mark.parametrize("seed", range(10))
def test_rounds_stay_below_every_schedule(seed: int) -> None:
    """At three budgets; they are no lower than the cut bound, and the same each time."""
    graph = with_random_switches(random_graph(seed, 8), seed, most=4)
    smallest, largest = min_budget(graph).nbytes, noremat_peak_nbytes(graph)
    for budget in (smallest, (2 * smallest + largest) // 3, (smallest + largest) // 2):
        known_s = fastest_s(graph, budget)
        bounds = []
        for _ in range(2):
            bound = GraphBound(relaxed(graph), budget)
            cut_s = bound.cut_s(Deadline())
            assert cut_s == lower_bound(relaxed(graph), budget)
            bounds.append(bound.rounds_s(known_s, Deadline()))
            assert cut_s <= bounds[-1] <= known_s + 1e-9
        assert bounds[0] == bounds[1]


def test_where_nothing_fits_and_where_everything_does() -> None:
    """An infinite bound, and that of the fastest implementations."""
    graph = with_random_switches(random_graph(3, 12), 3, most=5)
    floor_nbytes = GraphBound(relaxed(graph), 0).floor_nbytes
    assert GraphBound(relaxed(graph), floor_nbytes - 1).cut_s(Deadline()) == float("inf")
    free = GraphBound(relaxed(graph), noremat_peak_nbytes(graph))
    assert free.cut_s(Deadline()) == free.rounds_s(2 * graph.time_s, Deadline()) == free.graph.time_s


def rounds_of(
    monkeypatch: pytest.MonkeyPatch, known: float, raised: list[float], *, each: int = 1
) -> tuple[int, float]:
    """How many rounds are solved, and the bound, if rounds of `each` checks raise it to these ratios."""
    graph = with_random_switches(random_graph(3, 40), 3, most=8)
    bound = GraphBound(relaxed(graph), (min_budget(graph).nbytes + noremat_peak_nbytes(graph)) // 2)
    assert bound.cut_s(Deadline()) < (1 + raised[0]) * bound.graph.time_s
    solved: list[float] = []

    def solve(self: CoarseBound, deadline: Deadline, *, enough_s: float, checks: int) -> Round:
        extra_s = raised[len(solved)] * bound.graph.time_s
        solved.append(extra_s)
        return Round(
            extra_s=extra_s, order=None, fits=False, slack_s=0.0, proven=False, ended=True, checks=each
        )

    monkeypatch.setattr(CoarseBound, "round", solve)
    lower_s = bound.rounds_s((1 + known) * bound.graph.time_s, Deadline())
    return len(solved), lower_s / bound.graph.time_s - 1


def test_rounds_end_near_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is always solved; no bound is above the plan."""
    for raised, solved, bound in (([8.0, 9.0 - FAR / 2, 9.0], 2, 9.0 - FAR / 2), ([9.5], 1, 9.0)):
        rounds, lower = rounds_of(monkeypatch, 9.0, raised)
        assert rounds == solved
        assert lower == pytest.approx(bound)


def test_rounds_that_raise_nothing_use_up_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that raises the bound there is more."""
    few, _ = rounds_of(monkeypatch, 99.0, [9.0] * 999, each=CHECKS)
    more, bound = rounds_of(monkeypatch, 99.0, [9.0, 9.0, 10.0, *[10.0] * 999], each=CHECKS)
    assert 1 < few < more < 999
    assert bound == pytest.approx(10.0)
