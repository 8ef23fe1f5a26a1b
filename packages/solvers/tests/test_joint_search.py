"""Decisions of switches and sequences are searched together, and the referee accepts whatever is found."""

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import attrs
import numpy as np
import pytest

from remat_graph import (
    Graph,
    Schedule,
    noremat_peak_nbytes,
    relaxed,
    simulate,
    specialize,
    switches_on,
    verify,
)
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import (
    Deadline,
    Problem,
    Solution,
    SolverWarning,
    get_solver,
    min_budget,
    pareto,
    solve_switches,
)
from remat_solvers.bounds import budget_floor
from remat_solvers.bounds.decisions import DecidedBound, combinations_of, time_bound_s
from remat_solvers.bounds.graph_bound import GraphBound
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.switch_arrays import SwitchArrays
from remat_solvers.local_search.anneal import AnnealingWalk
from remat_solvers.local_search.joint import JointSearch, Walk
from remat_solvers.switching import solving

AUTO = get_solver("auto", moves=2000)


def switched(seed: int, ops: int = 8, most: int = 8) -> Graph:
    """A random graph with more switches than are combined."""
    return with_random_switches(random_graph(seed, ops), seed, most=most)


def decisions(graph: Graph) -> list[frozenset[str]]:
    """All of a small graph."""
    found = conflicts(graph)
    subsets = chain.from_iterable(combinations(graph.switches, n) for n in range(len(graph.switches) + 1))
    return [frozenset(on) for on in subsets if compatible(found, on) == set(on)]


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("seed", range(40))
def test_a_walk_ends_in_what_the_referee_accepts(seed: int, share: float) -> None:
    """From a random order of a random decision; its seconds are the referee's, its bytes at most as many."""
    graph = switched(seed)
    choice, found = SwitchArrays.of(graph), decisions(graph)
    start = specialize(graph, found[seed % len(found)])
    order = choice.widen(start, random_order(start.graph, seed))
    budget = int(share * noremat_peak_nbytes(graph))
    walk = AnnealingWalk(choice.arrays, order, budget, seed, choice=choice, on=start.on)
    best = walk.anneal(4000, 1.0, 0.01, Deadline())
    if best is None:
        return
    made, narrow = choice.narrow(walk.best_on, best)
    verify(made.graph)
    schedule = made.restore(Schedule.from_order(made.graph, narrow.tolist()))
    timeline = simulate(graph, schedule)
    assert walk.best_on == switches_on(graph, schedule)
    assert float(walk.state.meta["best_seconds"]) == timeline.time_s
    assert timeline.peak_nbytes <= budget


def test_walks_flip_switches_and_find_conflicting_ones() -> None:
    """Else the test above would show little."""
    ends: set[int] = set()
    conflicting = 0
    for seed in range(120):
        graph = switched(seed)
        choice = SwitchArrays.of(graph)
        conflicting += any(choice.conflicts.values())
        base = specialize(graph, ())
        budget = int(0.8 * noremat_peak_nbytes(graph))
        order = choice.widen(base, range(len(base.graph.ops)))
        walk = AnnealingWalk(choice.arrays, order, budget, seed, choice=choice)
        if walk.anneal(4000, 1.0, 0.01, Deadline()) is not None:
            ends.add(len(walk.best_on))
    assert {1, 2, 3, 4, 5} <= ends
    assert conflicting >= 5


@pytest.mark.parametrize("seed", range(20))
def test_sequences_widen_and_narrow(seed: int) -> None:
    """There and back; a wide sequence holds every op."""
    graph = switched(seed)
    choice = SwitchArrays.of(graph)
    for on in decisions(graph)[:40]:
        made = specialize(graph, on)
        order = random_order(made.graph, seed)
        wide = choice.widen(made, order)
        assert set(range(len(graph.ops))) == set(wide.tolist())
        again, narrow = choice.narrow(on, wide)
        assert order == narrow.tolist()
        assert made.ops == again.ops


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("seed", range(10))
def test_the_joint_choice_is_no_worse_than_whole_families(seed: int, share: float) -> None:
    """With the same work for each; its bound is below every decision's time."""
    graph = switched(seed, ops=6, most=6)
    budget = int(share * noremat_peak_nbytes(graph))
    found = solve_switches(AUTO, Problem(graph, budget))
    each = [AUTO.solve(Problem(specialize(graph, on).graph, budget)) for on in combinations_of(graph)[0]]
    times = [solution.time_s for solution in each if solution.time_s is not None]
    if found.schedule is None or found.time_s is None:
        assert not times
        return
    assert not times or found.time_s <= min(times)
    timeline = simulate(graph, found.schedule)
    assert (found.time_s, found.peak_nbytes) == (timeline.time_s, timeline.peak_nbytes)
    assert timeline.peak_nbytes <= budget
    assert found.lower_bound_s <= found.time_s
    assert found.stats["switched"] == ", ".join(sorted(switches_on(graph, found.schedule)))


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_does_not_lose_to_none(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On graphs whose whole families are not planned one by one."""
    monkeypatch.setattr(solving, "SMALL_OPS", 0)
    graph = switched(seed, ops=16)
    off = specialize(graph, ()).graph
    budget = (min_budget(off).nbytes + noremat_peak_nbytes(off)) // 2
    none = AUTO.solve(Problem(off, budget))
    assert none.time_s is not None
    found = solve_switches(AUTO, Problem(graph, budget))
    assert found.time_s is not None
    assert found.time_s <= none.time_s
    assert found.lower_bound_s <= found.time_s


@pytest.mark.parametrize("seed", range(8))
def test_all_off_is_planned_where_no_other_decision_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice finds a plan where none finds one, even if no cheap plan fits."""
    solve = solving._Decisions.solve_decided
    tried: list[frozenset[str]] = []
    needs: dict[int, int] = {}

    def of_off_alone(self: Any, one: Any, *rest: Any) -> Any:
        tried.append(one.made.on)
        solution = solve(self, one, *rest)
        return attrs.evolve(solution, schedule=None, time_s=None) if one.made.on else solution

    def unplanned(self: JointSearch, *decisions: Any, deadline: Deadline) -> None:
        for on in decisions:
            made = specialize(self.graph, on)
            self.add(made, np.arange(len(made.graph.ops)), deadline)
            needs[id(made.graph)] = 0 if made.on else 1

    def floor(graph: Graph) -> Any:
        """All off seems to need the most memory."""
        found = budget_floor(graph)
        return attrs.evolve(found, nbytes=found.nbytes + needs.get(id(graph), 0) * found.nbytes)

    def not_smaller(graph: Graph, *args: Any, **options: Any) -> Schedule:
        made = specialize(graph, ())
        return made.restore(Schedule.from_order(made.graph, range(len(made.graph.ops))))

    monkeypatch.setattr(solving._Decisions, "solve_decided", of_off_alone)
    monkeypatch.setattr(JointSearch, "quick", unplanned)
    monkeypatch.setattr(JointSearch, "divide", lambda *_, deadline: None)
    monkeypatch.setattr(solving, "SMALL_OPS", 0)
    monkeypatch.setattr(solving, "smallest_peak", not_smaller)
    monkeypatch.setattr(solving, "budget_floor", floor)
    graph = switched(seed, ops=16)
    off = specialize(graph, ()).graph
    budget = (min_budget(off).nbytes + noremat_peak_nbytes(off)) // 2
    assert solve_switches(AUTO, Problem(graph, budget)).feasible
    assert frozenset() in tried


def test_whole_families_are_planned_where_the_bound_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some, and none where the plan is near its bound."""
    monkeypatch.setattr(solving, "SMALL_OPS", 0)
    solved: list[tuple[frozenset[str], bool]] = []
    decided = solving._Decisions.decided

    def counted(self: Any, *ones: Any, **options: Any) -> Any:
        solved.extend((one.made.on, one in options.get("afresh", ())) for one in ones)
        return decided(self, *ones, **options)

    monkeypatch.setattr(solving._Decisions, "decided", counted)
    most = 0
    for seed in range(4):
        graph = switched(seed, ops=16)
        off = specialize(graph, ()).graph
        budget = (min_budget(off).nbytes + noremat_peak_nbytes(off)) // 2
        for wide in (float("inf"), 0.0):
            monkeypatch.setattr(solving, "NEAR", wide)
            solved.clear()
            solve_switches(AUTO, Problem(graph, budget))
            assert len(solved) == len(set(solved))
            others = [on for on, _ in solved if on]  # than all off, which is planned as well or ruled out
            assert len(others) <= (2 if wide else 2 + solving.MOST_FAMILIES)
            most = max(most, len(solved))
    assert most > 1


def test_a_family_is_planned_where_all_off_cannot_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place beside the best decision; all off is never planned if its bound rules it out."""
    monkeypatch.setattr(solving, "SMALL_OPS", 0)
    monkeypatch.setattr(solving, "WORTH", -1.0)  # the best decision is always planned
    monkeypatch.setattr(solving, "NEAR", float("inf"))  # and no family later
    pairs: list[list[frozenset[str]]] = []
    decided, may_be_better = solving._Decisions.decided, solving._Decisions.open

    def ruled_out(self: Any, one: Any) -> bool:
        """Whether its bound is below the best plan, as if that of all off were not."""
        return bool(one.made.on) and may_be_better(self, one)

    def noted(self: Any, *ones: Any, **options: Any) -> Any:
        pairs.append([one.made.on for one in ones])
        return decided(self, *ones, **options)

    monkeypatch.setattr(solving._Decisions, "open", ruled_out)
    monkeypatch.setattr(solving._Decisions, "decided", noted)
    for seed in range(6):
        graph = switched(seed, ops=16)
        base = specialize(graph, ()).graph
        budget = (min_budget(base).nbytes + noremat_peak_nbytes(base)) // 2
        assert solve_switches(AUTO, Problem(graph, budget)).feasible
    assert pairs
    assert all(frozenset() not in pair[1:] for pair in pairs)
    assert any(len(pair) == 2 for pair in pairs)


@pytest.mark.parametrize("seed", range(10))
def test_no_switch_is_on_that_saves_nothing(seed: int) -> None:
    """Where every way takes as long as another and everything fits, from all that can be on."""
    graph = switched(seed, ops=12)
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(each, time_s=1.0) for each in op.implementations])
        for op in graph.ops
    ]
    graph = attrs.evolve(graph, ops=ops)
    budget = max(noremat_peak_nbytes(specialize(graph, on).graph) for on in combinations_of(graph)[0])
    search, every = JointSearch(graph, budget), combinations_of(graph)[0][1]
    search.quick(every, deadline=Deadline())
    search.flip_greedily(search.found[every], Deadline())
    on = search.fitting[0].made.on
    for name in on:
        assert specialize(graph, on - {name}).graph.time_s > search.fitting[0].time_s


@pytest.mark.parametrize("seed", range(10))
def test_the_relaxed_graph_bounds_every_decision(seed: int) -> None:
    """Its time, its floor, and its bound within a budget; all decisions are solved."""
    graph = switched(seed, ops=5, most=5)
    least = relaxed(graph)
    verify(least)
    budget = int(0.7 * noremat_peak_nbytes(graph))
    bound_s = time_bound_s(least, budget, Deadline())
    for on in decisions(graph):
        decided = specialize(graph, on).graph
        assert least.time_s <= decided.time_s
        assert budget_floor(least).nbytes <= budget_floor(decided).nbytes
        assert noremat_peak_nbytes(least) <= noremat_peak_nbytes(decided)
        solution = AUTO.solve(Problem(decided, budget))
        assert solution.time_s is None or bound_s <= solution.time_s


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_budget_is_no_larger_than_that_of_whole_families(seed: int) -> None:
    """With more switches than are combined."""
    graph = switched(seed, ops=6, most=6)
    found = min_budget(graph)
    each = [min_budget(specialize(graph, on).graph) for on in combinations_of(graph)[0]]
    assert found.nbytes <= min(one.nbytes for one in each)
    assert found.floor_nbytes <= min(one.floor_nbytes for one in each)
    assert found.nbytes == simulate(graph, found.schedule).peak_nbytes


def test_the_plan_of_a_smaller_budget_is_a_start() -> None:
    """A curve never rises with the budget."""
    for seed in range(6):
        graph = switched(seed, ops=6, most=6)
        low, high = min_budget(graph).nbytes, noremat_peak_nbytes(graph)
        points = pareto(graph, [low, (low + high) // 2, high], moves=200)
        times = [point.solution.time_s or 0.0 for point in points]
        assert all(point.solution.feasible for point in points)
        assert times == sorted(times, reverse=True)


def test_the_same_seed_decides_the_same() -> None:
    """Twice."""
    graph = switched(3, ops=20, most=8)
    problem = Problem(graph, int(0.6 * noremat_peak_nbytes(graph)))
    one, two = (solve_switches(AUTO, problem) for _ in range(2))
    assert one.schedule == two.schedule
    assert one.stats == two.stats


def test_a_deadline_that_has_passed_ends_every_search() -> None:
    """With what was found by then."""
    graph = switched(3, ops=20, most=8)
    deadline = Deadline(1.0, clock=iter(np.arange(0.0, 1e9, 100.0).tolist()).__next__)
    budget = noremat_peak_nbytes(graph)
    found = solve_switches(AUTO, Problem(graph, budget), deadline)
    assert deadline.hit
    assert found.schedule is not None


@pytest.mark.parametrize("seed", range(8))
def test_a_search_keeps_the_best_of_each_decision(seed: int) -> None:
    """As evaluated on its own graph."""
    graph = switched(seed)
    budget = int(0.7 * noremat_peak_nbytes(graph))
    search = JointSearch(graph, budget)
    for on in combinations_of(graph)[0]:
        search.quick(on, deadline=Deadline())
    assert search.smallest is not None
    search.shrink(budget, budget_floor(relaxed(graph)).nbytes, 4000, Deadline())
    walks = [Walk(start=best, moves=4000, hot=1.0, price=0.02) for best in search.fitting[:2]]
    search.anneal(walks, Deadline())
    search.anneal_sequences(walks, Deadline())
    times = [one.time_s for one in search.fitting]
    assert times == sorted(times)
    for on, one in search.found.items():
        result = evaluate(flatten(one.made.graph), one.order)
        assert (on, True) == (one.made.on, result.valid)
        assert (one.time_s, one.peak_nbytes) == (result.time_s, result.peak_nbytes)
        simulate(graph, one.schedule)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_plan_far_from_the_bound_has_parts_bounded(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whether a cheap plan fits or only the solver finds one."""
    branched, branch = list[float](), DecidedBound.branch

    def counted(self: DecidedBound, enough_s: float, deadline: Deadline) -> None:
        branched.append(enough_s)
        branch(self, enough_s, deadline)

    monkeypatch.setattr(DecidedBound, "branch", counted)
    far = 0
    for seed in range(8):
        graph = switched(seed, ops=16)
        branched.clear()
        smallest = min_budget(graph).nbytes
        budget = smallest + int(share * (noremat_peak_nbytes(graph) - smallest))
        found = solve_switches(AUTO, Problem(graph, budget))
        if found.time_s is not None and found.time_s - found.lower_bound_s > solving.WORTH * graph.time_s:
            far += 1
            assert len(branched) == 1
    assert far


def with_round(monkeypatch: pytest.MonkeyPatch, bound: Callable[..., float]) -> Solution:
    """A solution of a graph where rounds of the relaxed graph give this bound."""
    monkeypatch.setattr(GraphBound, "rounds_s", bound)
    graph = switched(3, ops=16)
    off = specialize(graph, ()).graph
    budget = (min_budget(off).nbytes + noremat_peak_nbytes(off)) // 2
    return solve_switches(AUTO, Problem(graph, budget))


def test_rounds_of_the_relaxed_graph_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for the whole; nothing is lost where the program fails."""

    def broken(*_: object) -> float:
        raise ValueError("broken")

    with pytest.warns(SolverWarning, match=r"the coarse program failed \(ValueError: broken\)"):
        without = with_round(monkeypatch, broken)
    assert without.feasible
    raised = with_round(monkeypatch, lambda _, known_s, deadline: known_s * (1 - 1e-6))
    assert without.lower_bound_s < raised.lower_bound_s <= raised.time_s


def test_a_family_that_is_far_behind_is_not_planned() -> None:
    """Further than the solver has gained over annealing, or above the budget where another plan fits."""
    graph = switched(1, ops=16)
    search = solving._Decisions(AUTO, Problem(graph, noremat_peak_nbytes(graph)), Deadline())
    search.search.quick((), deadline=Deadline())
    best = search.search.fitting[0]
    search.solver_gain_s = 0.2 * graph.time_s
    for behind, planned in ((0.0, True), (0.15, True), (0.25, False)):
        one = attrs.evolve(best, time_s=best.time_s + behind * graph.time_s)
        assert search.within_reach(one) == planned, behind
    above = attrs.evolve(best, peak_nbytes=search.budget_nbytes + 1)
    assert not search.within_reach(above)
    search.solver_gain_s = float("inf")  # nothing fitted before the solver
    assert search.within_reach(above)
