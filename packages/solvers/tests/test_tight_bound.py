"""The bound that takes the time it is given: below every schedule under any decision, and near the best."""

import attrs
import pytest

from remat_graph import Alternative, noremat_peak_nbytes
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import Deadline, Problem, get_solver, min_budget
from remat_solvers.bounds import lower_bound, tight_bound
from remat_solvers.bounds.decisions import DecidedBound, decided_bound_s
from remat_solvers.bounds.highs import MixedIntegerProgram, ProgramResult
from remat_solvers.testing import chain

from .test_graph_bound import fastest_s


def test_it_is_below_the_best_plan_of_every_decision_and_often_meets_it() -> None:
    """At two budgets each; the parts of the decisions alone prove less."""
    met = higher = 0
    for seed in range(5):
        graph = with_random_switches(chain(4, seed=seed, skips=2), seed, most=4)
        smallest, largest = min_budget(graph).nbytes, noremat_peak_nbytes(graph)
        for budget in (smallest, (2 * smallest + largest) // 3):
            known_s = fastest_s(graph, budget)
            decided_s = decided_bound_s(graph, budget, Deadline(), enough_s=known_s)
            tight_s = tight_bound(graph, budget, Deadline(), known_s=known_s)
            assert min(decided_s, known_s) - 1e-9 <= tight_s <= known_s
            met += tight_s == pytest.approx(known_s, rel=1e-5)
            higher += tight_s > decided_s + 1e-6
    assert met >= 7
    assert higher >= 3


def test_it_reports_each_higher_bound_and_ends_with_the_deadline() -> None:
    """A deadline that has passed leaves the bound by cuts."""
    graph = chain(12, seed=3, skips=4)
    budget = (2 * min_budget(graph).nbytes + noremat_peak_nbytes(graph)) // 3
    deadline, seen = Deadline(), list[float]()
    deadline.on_progress = lambda progress: seen.append(progress.lower_bound_s)
    bound_s = tight_bound(graph, budget, deadline, known_s=2 * graph.time_s)
    assert seen == sorted(set(seen))
    assert seen[-1] == bound_s > lower_bound(graph, budget)
    passed = Deadline(1e-9)
    assert passed.reached()
    assert tight_bound(graph, budget, passed) < bound_s


def test_where_nothing_fits_and_where_everything_does() -> None:
    """Below the floor no schedule is fast enough; with memory for all, the fastest runs of all ops are."""
    graph = with_random_switches(random_graph(3, 12), 3, most=5)
    floor_nbytes = DecidedBound(graph, 0, Deadline()).floor_nbytes
    assert tight_bound(graph, floor_nbytes - 1) == float("inf")
    assert tight_bound(graph, 2 * noremat_peak_nbytes(graph)) <= graph.time_s


def test_a_proof_ends_when_it_is_one() -> None:
    """Whatever the other switches are: dividing them would take 2^10 parts."""
    graph = chain(4, seed=0, skips=2)
    ops = [
        attrs.evolve(
            op,
            implementations=(*op.implementations, op.first),
            alternatives=(Alternative(switch=f"same.{i}", first=1, again=1),),
        )
        for i, op in enumerate(graph.ops)
    ]
    open_ = attrs.evolve(graph, ops=tuple(ops))
    budget = min_budget(graph).nbytes
    known_s = get_solver("auto").solve(Problem(graph, budget)).time_s
    assert known_s is not None
    for each in (graph, open_):
        bound = DecidedBound(each, budget, Deadline())
        bound.prove(known_s, Deadline())
        assert bound.lower_s == pytest.approx(known_s, rel=1e-4)
        assert len(bound._parts) == 1


def test_a_program_that_fails_is_not_solved_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound stays that by cuts, and the search ends without a deadline."""
    graph = chain(12, seed=3, skips=4)
    budget = (2 * min_budget(graph).nbytes + noremat_peak_nbytes(graph)) // 3
    failed = ProgramResult(found=None, bound=-float("inf"), ended=False)
    monkeypatch.setattr(MixedIntegerProgram, "minimize", lambda *_, **__: failed)
    assert tight_bound(graph, budget, known_s=2 * graph.time_s) == lower_bound(graph, budget)
