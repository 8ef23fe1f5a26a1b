"""The search for a small peak."""

from typing import Any

import numpy as np
import pytest

from remat_graph import noremat_peak_nbytes
from remat_solvers import Deadline, min_budget
from remat_solvers.bounds import budget_floor
from remat_solvers.evaluation.arrays import Ints, evaluate, flatten
from remat_solvers.local_search.anneal import AnnealingWalk
from remat_solvers.local_search.min_peak import FIRST_STEP, KINDS, Descent, minimize_peak
from remat_solvers.testing import random_graph


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_that_misses_its_target_is_not_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all walks miss, the smallest peak where one ended counts after each round of kinds."""
    arrays = flatten(random_graph(seed, ops=40))
    floor = budget_floor(random_graph(seed, ops=40)).nbytes
    greedy = evaluate(arrays, minimize_peak(arrays, 0, floor, Deadline(), moves=0)).peak_nbytes
    reach, ends = AnnealingWalk.reach, []

    def missed(self: AnnealingWalk, *args: Any) -> Ints | None:
        reach(self, *args)
        ends.append(evaluate(arrays, self.now))
        return None

    monkeypatch.setattr(AnnealingWalk, "reach", missed)
    found = evaluate(arrays, minimize_peak(arrays, 0, floor, Deadline()))
    whole = len(ends) - len(ends) % (2 * len(KINDS))
    assert found.valid
    assert found.peak_nbytes == min([greedy, *(end.peak_nbytes for end in ends[:whole] if end.valid)])


def test_some_missed_walks_gain() -> None:
    """What the test above is about happens: a walk ends below its start and above its target."""
    gains = 0
    for seed in range(6):
        arrays = flatten(random_graph(seed, ops=40))
        start = np.arange(40, dtype=np.int64)
        peak = evaluate(arrays, start).peak_nbytes
        walk = AnnealingWalk(arrays, start, peak // 4, seed, 30.0)
        assert walk.reach(4000, 1.0, 0.1, Deadline()) is None
        gains += evaluate(arrays, walk.now).peak_nbytes < peak
    assert gains >= 4


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
