"""The cost of flipped switches is that of the state derived for them; flipping back restores the state."""

from collections import Counter
from typing import Any

import numba

from remat_graph import noremat_peak_nbytes, specialize
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import Deadline
from remat_solvers.evaluation.search_state import State
from remat_solvers.evaluation.switch_arrays import SwitchArrays
from remat_solvers.kernels import derived, switch
from remat_solvers.local_search.anneal import AnnealingWalk


@numba.njit
def flip(S: Any) -> Any:
    """Flip some switches."""
    switch.flip(S)


@numba.njit
def flip_back(S: Any) -> Any:
    """Undo it."""
    switch.flip_back(S)


@numba.njit
def cost(S: Any, budget: Any) -> Any:
    """Whether the sequence is valid, its seconds and its excess."""
    return switch.cost_of_switches(S, budget)


@numba.njit
def rebuild(S: Any, budget: Any) -> Any:
    """The same from a state that is derived for the switches."""
    seconds, excess = derived.rebuild(S, budget)
    return S.meta.broken == 0, seconds, excess


def contents(state: State) -> list[Any]:
    """All of a state but what flips note, and numbers drawn."""
    names = [name for name in state.val.dtype.names if not name.startswith("tried")]
    switches = state.switches["on"].tolist()
    return [state.meta["count"], state.pos.tolist(), state.val[names].tolist(), state.ops.tolist(), switches]


def flipped(seed: int) -> Counter[str]:
    """Compare some flips of a random sequence with repeats; what kinds of flips they were."""
    graph = with_random_switches(random_graph(seed, 10), seed, most=8)
    choice = SwitchArrays.of(graph)
    assert choice.names
    order = choice.widen(specialize(graph, ()), random_order(specialize(graph, ()).graph, seed))
    budget = noremat_peak_nbytes(graph) * (1 + seed % 2) // 2
    walk = AnnealingWalk(choice.arrays, order, budget, seed, choice=choice)
    walk.anneal(400, 1.0, 0.1, Deadline())  # the sequence gets repeats, and some switches are on
    if seed % 3 == 0:  # no way of a switch may be repeated, which the random graphs allow
        walk.state.var["runs_once"][walk.state.changes["row"] + 1] = 1
    kinds = Counter[str]()
    for _ in range(60):
        rebuild(walk.state, budget)
        before = contents(walk.state)
        flip(walk.state)
        valid, seconds, excess = cost(walk.state, budget)
        assert not walk.state.diff.any()
        derived_valid, *derived_cost = rebuild(State(*(array.copy() for array in walk.state)), budget)
        assert valid == derived_valid
        assert not valid or [seconds, excess] == derived_cost
        kinds[("above the budget" if excess else "within it") if valid else "not valid"] += 1
        flip_back(walk.state)
        assert before == contents(walk.state)
    return kinds


def test_a_flip_costs_what_the_derived_state_costs() -> None:
    """Whether the sequence is valid after the flip or not, within the budget and above."""
    kinds = sum(map(flipped, range(40)), Counter[str]())
    assert {"above the budget", "within it", "not valid"} == kinds.keys()
