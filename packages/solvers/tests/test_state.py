"""A change: its evaluation and the state after it are those of the changed sequence."""

import random
from typing import Any

import numba
import numpy as np
import pytest

from remat_graph import Graph, Implementation, Op, Value
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.evaluation.search_state import EXTRAS, State, get_order, make_state
from remat_solvers.kernels import derived
from remat_solvers.kernels import incremental as kernels
from remat_solvers.kernels.anneal import anneal
from remat_solvers.local_search.anneal import WEIGHTS, AnnealingWalk
from remat_solvers.testing import random_graph


@numba.njit
def change_and_apply(S: Any, budget: Any, positions: Any, gaps: Any, ops: Any) -> Any:
    """Describe a change, evaluate it, forget it; do that again and carry it out."""
    clean = True
    for again in range(2):
        kernels.begin(S)
        for p in positions:
            kernels.delete(S, p)
        for i in range(len(gaps)):
            kernels.insert(S, gaps[i], ops[i])
        possible, change, excess = kernels.evaluate_change(S, budget, np.inf)
        if again:
            after = derived.apply(S, budget)
        else:
            kernels.forget(S)
        clean = clean and not S.diff.any() and S.meta.touched == 0
    return possible, change, excess, clean, after


@numba.njit
def rebuild(S: Any, budget: Any) -> Any:
    """Derive everything."""
    return derived.rebuild(S, budget)


def derived_so_far(state: State) -> dict[str, Any]:
    """All that is derived from the sequence."""
    meta, pos, val = state.meta, state.pos, state.val
    count = int(meta["count"])
    found = {name: int(meta[name]) for name in ("count", "boundary", "repeats")}
    found |= {name: pos[name][:count].tolist() for name in ("order", "variant", "own", "excess")}
    found["latest"] = state.latest.tolist()
    found["load"] = state.load[:count].tolist()
    found["held"] = pos["held"][: count + 1].tolist()
    found["repeated"] = pos["repeats"][: found["repeats"]].tolist()
    found["first"] = state.ops["first"].tolist()
    rows = zip(val["ev_ptr"].tolist(), val["ev_end"].tolist(), strict=True)
    return found | {"of values": [state.events[start:stop].tolist() for start, stop in rows]}


def derived_anew(state: State, budget: int) -> dict[str, Any]:
    """The same, of the sequence alone."""
    fresh = State(*(array.copy() for array in state))
    rebuild(fresh, budget)
    return derived_so_far(fresh)


@pytest.mark.parametrize("seed", range(30))
def test_annealing_keeps_the_state_of_its_sequence(seed: int) -> None:
    """Whatever moves were accepted, those of first runs too, the state is that of the sequence."""
    rng = random.Random(seed)
    graph = random_graph(seed, ops=rng.randint(4, 24), fancy=seed % 3 > 0)
    arrays = flatten(graph)
    budget = int(evaluate(arrays, range(len(graph.ops))).peak_nbytes * rng.choice([0.4, 0.6, 0.8]))
    walk = AnnealingWalk(arrays, np.arange(len(graph.ops)), budget, seed)
    for _ in range(20):
        anneal(walk.state, budget, 50, 1.0, 0.1, WEIGHTS, 1.05, 0.0)
        assert derived_anew(walk.state, budget) == derived_so_far(walk.state)


@pytest.mark.parametrize("seed", range(10))
def test_no_event_is_written_outside_of_its_array(seed: int) -> None:
    """Where there is little space for events, changes are refused; what is behind it stays."""
    graph = random_graph(seed, ops=20, fancy=seed % 3 > 0)
    arrays = flatten(graph)
    budget = int(evaluate(arrays, range(len(graph.ops))).peak_nbytes * 0.5)
    state = make_state(arrays, np.arange(len(graph.ops)), seed)
    rebuild(state, budget)
    space = int(state.meta["events"]) + 4 * len(state.val) + 20 * (seed + 1)
    behind = np.full(space + 500, -7)
    state = state._replace(events=behind[:space])
    for _ in range(20):
        anneal(state, budget, 200, 1.0, 0.1, WEIGHTS, 1.05, 0.0)
        assert derived_anew(state, budget) == derived_so_far(state)
        assert int(state.meta["events"]) <= space
        assert (behind[space:] == -7).all()


def test_runs_with_thousands_of_values_stay_within_their_array() -> None:
    """What the events of a change have no space for is refused; those of one run always have."""
    values = [Value(name="x", nbytes=1, external=True)]
    ops: list[Op] = []

    def run(inputs: list[int], outputs: int) -> list[int]:
        made = list(range(len(values), len(values) + outputs))
        values.extend(Value(name=f"v{i}", nbytes=1) for i in made)
        way = Implementation(inputs=inputs, outputs=made, time_s=1.0)
        ops.append(Op(name=f"op{len(ops)}", target="op", backward=len(ops) > 2, implementations=[way]))
        return made

    parts = run([0], EXTRAS)
    [first], [second] = run(parts, 1), run([0], 1)
    [third] = run([first, second], 1)
    run([*parts, third], 1)
    state = make_state(flatten(Graph(name="wide", values=values, ops=ops)), np.arange(len(ops)), 0)
    behind = np.zeros(len(state.extra) + 2 * EXTRAS, state.extra.dtype)
    space = len(state.extra)
    state = state._replace(extra=behind[:space])
    for _ in range(5):
        anneal(state, EXTRAS, 200, 1.0, 0.1, WEIGHTS, 1.05, 0.0)
        assert derived_anew(state, EXTRAS) == derived_so_far(state)
    assert int(state.meta["tried"]) > 0
    assert not behind[space:].tobytes().strip(b"\0")


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
        possible, change, excess, clean, after_excess = change_and_apply(state, budget, *lists)
        assert possible
        assert clean
        after = float(state.var["time"][state.pos["variant"][: int(state.meta["count"])]].sum())
        assert after == pytest.approx(seconds + change, abs=1e-9)
        assert after_excess == pytest.approx(excess, rel=1e-9, abs=1e-6)
        seconds = after
        assert derived_anew(state, budget) == derived_so_far(state)
        exact = evaluate(arrays, get_order(state))
        assert exact.valid
        profile = (state.pos["held"] + state.pos["own"])[: state.meta["count"]]
        assert (profile >= exact.profile).all()
