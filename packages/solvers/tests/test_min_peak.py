"""The search for a small peak."""

from typing import Any

import pytest

from remat_graph import noremat_peak_nbytes
from remat_solvers import Deadline, min_budget
from remat_solvers.bounds import budget_floor
from remat_solvers.evaluation.arrays import Evaluation, Ints, evaluate, flatten
from remat_solvers.local_search.anneal import AnnealingWalk
from remat_solvers.local_search.min_peak import FIRST_STEP, KINDS, Descent, minimize_peak
from remat_solvers.testing import random_graph


def test_a_walk_that_misses_its_target_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all walks miss, the smallest peak where one ended counts; on some graphs it is below greedy's."""
    reach, gains = AnnealingWalk.reach, 0
    ends: list[Evaluation] = []

    def missed(self: AnnealingWalk, *args: Any) -> Ints | None:
        reach(self, *args)
        ends.append(evaluate(self.arrays, self.now))
        return None

    monkeypatch.setattr(AnnealingWalk, "reach", missed)
    for seed in range(8):
        graph = random_graph(seed, ops=40)
        arrays, floor = flatten(graph), budget_floor(graph).nbytes
        ends.clear()
        greedy = evaluate(arrays, minimize_peak(arrays, 0, floor, Deadline(), moves=0)).peak_nbytes
        found = evaluate(arrays, minimize_peak(arrays, 0, floor, Deadline()))
        assert found.valid
        assert found.peak_nbytes <= min([greedy, *(end.peak_nbytes for end in ends if end.valid)])
        gains += found.peak_nbytes < greedy
    assert gains > 0


@pytest.mark.parametrize("seed", range(8))
def test_a_goal_ends_the_same_search(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks until then are those of a search for the floor, so what was reached is reached again."""
    graph = random_graph(seed, ops=40)
    arrays, floor = flatten(graph), budget_floor(graph).nbytes
    begin, walks = AnnealingWalk.__init__, []

    def counted(self: AnnealingWalk, arrays: Any, order: Ints, target: int, *args: Any, **named: Any) -> None:
        walks.append((order.tobytes(), target, *args))
        begin(self, arrays, order, target, *args, **named)

    monkeypatch.setattr(AnnealingWalk, "__init__", counted)
    smallest = evaluate(arrays, minimize_peak(arrays, 0, floor, Deadline())).peak_nbytes
    whole = walks.copy()
    for goal in (smallest, (smallest + noremat_peak_nbytes(graph)) // 2):
        walks.clear()
        assert evaluate(arrays, minimize_peak(arrays, goal, floor, Deadline())).peak_nbytes <= goal
        assert walks == whole[: len(walks)]


def test_targets_come_nearer_only_where_nothing_is_gained() -> None:
    """A kind of walk that gains goes on; after all kinds without a gain, the step is halved."""
    descent = Descent(0)
    for _ in range(10):
        descent.learn([False, False], 0.1)
    assert (descent.step, descent.missed) == (FIRST_STEP, 0)
    for _ in KINDS:
        descent.learn([False, False], 0.001)
    assert (descent.step, descent.missed) == (FIRST_STEP**0.5, 0)
    descent.learn([False, True], 0.0)
    assert descent.step == FIRST_STEP**0.25
    descent.learn([True, True], 0.0)
    assert descent.step == FIRST_STEP**0.25


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_budget_is_between_its_floor_and_the_unplanned_peak(seed: int) -> None:
    """The same search twice gives the same bytes."""
    graph = random_graph(seed, ops=40)
    found = min_budget(graph)
    assert found.floor_nbytes <= found.nbytes <= noremat_peak_nbytes(graph)
    assert found.nbytes == min_budget(graph).nbytes
