"""What the coarse program sees: gradients computed early, orders that states force, fractions that add up."""

import random
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from remat_graph import Graph, Implementation, Op, Role, Schedule, Value, noremat_peak_nbytes, simulate
from remat_solvers import Deadline
from remat_solvers.bounds import budget_floor, lower_bound, tight_bound
from remat_solvers.bounds.coarse_program import CoarseProgram
from remat_solvers.bounds.reachability import reachability
from remat_solvers.testing import chain, random_graph

from . import oracle
from .test_bounds import run


def test_a_gradient_that_nothing_follows_is_held_or_needs_its_input() -> None:
    """The op with scratch may run before or after the weight's gradient: 1 s is lost either way."""
    values = [
        Value(name="a", nbytes=100),
        Value(name="loss", nbytes=0, role=Role.OUTPUT),
        Value(name="t", nbytes=0, role=Role.TANGENT, of=1),
        Value(name="weight_grad", nbytes=60, role=Role.GRAD),
        Value(name="input_grad", nbytes=10, role=Role.GRAD),
    ]
    ops = [
        run("f", [], [0], 1.0),
        run("f_loss", [0], [1], 1.0),
        run("b_weight", [0, 2], [3], 1.0),
        run("b_input", [2], [4], 1.0, scratch=150),
    ]
    graph = Graph(name="early", values=values, ops=ops)
    assert oracle.fastest_s(graph, 200) == 5.0
    assert lower_bound(graph, 200) > graph.time_s
    assert tight_bound(graph, 200) == pytest.approx(5.0)
    assert lower_bound(graph, 220) == tight_bound(graph, 220) == oracle.fastest_s(graph, 220) == graph.time_s


def dropouts(seed: int, *, weights: bool = True) -> Graph:
    """Layers with dropout: a generator's state is saved before the first draw, and repeats draw from that."""
    rng = random.Random(seed)
    values = [Value(name="state0", nbytes=0, role=Role.RNG, external=True)]
    ops: list[Op] = []

    def value(name: str, nbytes: int, **more: Any) -> int:
        values.append(Value(name=name, nbytes=nbytes, **more))
        return len(values) - 1

    layer: list[int] = []
    saved: list[int] = []
    state = 0
    for i in range(4):
        made = value(f"a{i}", rng.randint(5, 30))
        ops.append(run(f"f{i}", layer[-1:], [made], 1.0))
        saved.append(value(f"saved{i}", 2))
        read = Implementation(inputs=[state], outputs=[saved[-1]], time_s=0.1)
        ops.append(Op(name=f"f_read{i}", target="read", implementations=[read], rerun=None))
        after = value(f"state{i + 1}", 0, role=Role.RNG, external=True, replaces=state)
        layer.append(value(f"d{i}", rng.randint(5, 30)))
        first = Implementation(inputs=[state, made], outputs=[layer[-1], after], time_s=1.0)
        again = Implementation(inputs=[saved[-1], made], outputs=[layer[-1]], time_s=1.0)
        ops.append(Op(name=f"f_drop{i}", target="drop", implementations=[first, again], rerun=1))
        state = after
    loss = value("loss", 0, role=Role.OUTPUT)
    ops.append(run("f_loss", layer[-1:], [loss], 1.0))
    upstream = value("t", rng.randint(0, 9), role=Role.TANGENT, of=loss)
    for i in reversed(range(4)):
        grad = value(f"g{i}", rng.randint(5, 20), role=Role.ACTIVATION if i else Role.GRAD)
        inputs = sorted({upstream, layer[i], *rng.choice([(), (saved[i],)])})
        ops.append(run(f"b{i}", inputs, [grad], 1.0, rng.randint(0, 20)))
        if weights:
            weight = value(f"w{i}", rng.randint(1, 20), role=Role.GRAD)
            ops.append(run(f"b_weight{i}", sorted({grad, *layer[max(0, i - 1) : i]}), [weight], 1.0))
        upstream = grad
    return Graph(name=f"dropouts{seed}", values=values, ops=ops)


def test_what_overwrites_a_state_comes_after_all_that_read_it() -> None:
    """In both directions, and never the other way round."""
    graph = dropouts(0)
    reach = reachability(graph)
    named = {op.name: i for i, op in enumerate(graph.ops)}
    for i in range(4):
        reader, writer = named[f"f_read{i}"], named[f"f_drop{i}"]
        assert reach.ancestors[writer] >> reader & 1
        assert reach.descendants[reader] >> writer & 1
        assert not reach.ancestors[reader] >> writer & 1
        assert not reach.descendants[writer] >> reader & 1
    assert reach.ancestors[named["b3"]] >> named["f_read0"] & 1


def skipping(seed: int) -> Graph:
    """Layers in a row with additions."""
    return chain(6, seed=seed, skips=2)


@pytest.mark.parametrize("family", [dropouts, skipping, random_graph])
@pytest.mark.parametrize("seed", range(12))
def test_every_solution_is_a_sequence_that_runs(seed: int, family: Callable[[int], Graph]) -> None:
    """With buffers, draws of a generator, ops that run once, and moments on both sides of the boundary."""
    graph = family(seed)
    floor_nbytes = budget_floor(graph).nbytes
    budget = floor_nbytes + 3 * (noremat_peak_nbytes(graph) - floor_nbytes) // 10
    reach, rng = reachability(graph), random.Random(seed)
    solved = 0
    for _ in range(30):
        moments = tuple(sorted(rng.sample(range(len(graph.ops)), rng.randint(1, 3))))
        if any(not reach.ancestors[then] >> first & 1 for first, then in pairwise(moments)):
            continue
        program = CoarseProgram(graph, reach, budget, moments, 1.0, np.inf)
        found = program.rows.minimize(gap=0.0, enough=np.inf, deadline=Deadline()).found
        if found is None:
            continue
        for late in (False, True):
            order = program.order(found, late=late)
            assert simulate(graph, Schedule.from_order(graph, order)).time_s >= graph.time_s
        solved += 1
    assert solved >= 3


def least_in_fractions(program: CoarseProgram) -> float:
    """The least cost if variables may be fractions; infinite if there is none."""
    import highspy

    highs = highspy.Highs()
    highs.silent()
    model = program.rows._model(highspy)
    model.integrality_ = []
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return float("inf")
    return float(highs.getInfo().objective_function_value) + program.constant


@pytest.mark.parametrize("seed", range(15))
def test_in_fractions_too_a_moment_never_lowers_the_bound(seed: int) -> None:
    """Half a run in each of two intervals would need half the inputs; every op has its interval here."""
    graph = dropouts(seed, weights=False)
    reach = reachability(graph)
    budget = (budget_floor(graph, reach).nbytes + noremat_peak_nbytes(graph)) // 2
    backward = [i for i, op in enumerate(graph.ops) if op.backward]
    chosen = backward[:: max(1, len(backward) // 4)]
    ordered = [
        (i, j, k)
        for i, j, k in combinations(chosen, 3)
        if reach.ancestors[j] >> i & 1 and reach.ancestors[k] >> j & 1
    ]
    assert ordered
    for moments in ordered:
        with_all = least_in_fractions(CoarseProgram(graph, reach, budget, moments, 1.0, np.inf))
        for moment in moments:
            alone = least_in_fractions(CoarseProgram(graph, reach, budget, (moment,), 1.0, np.inf))
            assert with_all >= alone - 1e-7
