"""The incremental evaluation of a change says what evaluating the changed sequence says."""

import random
from typing import Any

import numba
import numpy as np
import pytest

from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.search_state import get_order, make_state
from remat_solvers.kernels import incremental as kernels
from remat_solvers.testing import random_graph


@numba.njit
def change_and_apply(S: Any, budget: Any, positions: Any, gaps: Any, ops: Any) -> Any:
    """Describe a change, evaluate it, carry it out."""
    kernels.begin(S)
    for p in positions:
        kernels.delete(S, p)
    for i in range(len(gaps)):
        kernels.insert(S, gaps[i], ops[i])
    possible, change, excess = kernels.evaluate_change(S, budget)
    return possible, change, excess, S.pos.diff.any(), kernels.apply(S, budget)


@numba.njit
def rebuild(S: Any, budget: Any) -> Any:
    """Derive everything."""
    return kernels.rebuild(S, budget)


@pytest.mark.parametrize("seed", range(30))
def test_a_trial_equals_its_application(seed: int) -> None:
    """Seconds and excess agree, and the memory profile is never below the true one."""
    rng = random.Random(seed)
    graph = random_graph(seed, ops=rng.randint(2, 24), fancy=seed % 3 > 0)
    arrays = flatten(graph)
    state = make_state(arrays, np.arange(len(graph.ops)), seed)
    budget = int(evaluate(arrays, range(len(graph.ops))).peak_nbytes * rng.choice([0.3, 0.6, 0.8]))
    seconds, _ = rebuild(state, budget)
    for _ in range(40):
        count, repeats = state.meta["count"], state.meta["repeats"]
        chosen = state.pos["repeats"][:repeats]
        deleted = rng.sample(chosen.tolist(), min(len(chosen), rng.randint(0, 3)))
        gaps, ops = [], []
        for _ in range(rng.randint(0, 4)):
            op = rng.randrange(len(graph.ops))
            guarded = arrays.guard_ptr[2 * op + 1] < arrays.guard_ptr[2 * op + 2]
            if arrays.can_rerun[op] and not guarded and count < 150:
                gaps.append(rng.randint(state.ops["first"][op] + 1, count))
                ops.append(op)
        lists = (np.array(row, np.int64) for row in (deleted, gaps, ops))
        possible, change, excess, dirty, (after, after_excess) = change_and_apply(state, budget, *lists)
        assert possible
        assert not dirty
        assert after == pytest.approx(seconds + change, abs=1e-9)
        assert after_excess == pytest.approx(excess, rel=1e-9, abs=1e-6)
        seconds = after
        exact = evaluate(arrays, get_order(state))
        assert exact.valid
        profile = (state.pos["held"] + state.pos["own"])[: state.meta["count"]]
        assert (profile >= exact.profile).all()
