"""What the coarse program sees: gradients computed early, orders that states force, fractions that add up."""

import random
from collections.abc import Callable
from itertools import chain as flattened
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from remat_graph import Graph, Implementation, Op, Role, Schedule, Value, noremat_peak_nbytes, simulate
from remat_solvers import Deadline
from remat_solvers.bounds import budget_floor, lower_bound, tight_bound
from remat_solvers.bounds.coarse_program import CoarseProgram, Moment
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
        firsts = sorted(rng.sample(range(len(graph.ops)), rng.randint(1, 3)))
        if any(not reach.ancestors[then] >> first & 1 for first, then in pairwise(firsts)):
            continue
        moments = tuple(map(Moment, firsts))
        program = CoarseProgram(graph, reach, budget, moments, 1.0, np.inf)
        found = program.rows.minimize(gap=0.0, enough=np.inf, deadline=Deadline()).found
        if found is None:
            continue
        for late in (False, True):
            order = [*flattened.from_iterable(program.sequence(found, late=late))]
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
        all_of_them = CoarseProgram(graph, reach, budget, tuple(map(Moment, moments)), 1.0, np.inf)
        least = least_in_fractions(all_of_them)
        for moment in moments:
            alone = CoarseProgram(graph, reach, budget, (Moment(moment),), 1.0, np.inf)
            assert least >= least_in_fractions(alone) - 1e-7


def test_a_repeat_among_the_moments_bounds_every_schedule() -> None:
    """Also those that lack the repeat; where memory binds at it, the bound is higher than without."""
    raised = 0
    for seed in range(6):
        graph = chain(4, seed=seed, skips=2)
        reach, floor_nbytes = reachability(graph), budget_floor(graph).nbytes
        budget = floor_nbytes + (noremat_peak_nbytes(graph) - floor_nbytes) // 5
        least_s = oracle.fastest_s(graph, budget) - graph.time_s
        for begin, end in pairwise(i for i, op in enumerate(graph.ops) if op.backward):
            if not reach.ancestors[end] >> begin & 1:
                continue
            without = least_cost(graph, budget, Moment(begin), Moment(end))
            for op in range(begin):
                if reach.ancestors[begin] >> op & 1:
                    repeat = Moment(op, again=True)
                    with_repeat = least_cost(graph, budget, Moment(begin), repeat, Moment(end))
                    assert without - 1e-6 <= with_repeat <= least_s + 1e-6
                    raised += with_repeat > without + 1e-3
    assert raised >= 5


def least_cost(graph: Graph, budget_nbytes: int, *moments: Moment) -> float:
    program = CoarseProgram(graph, reachability(graph), budget_nbytes, moments, 1.0, np.inf)
    return program.rows.minimize(gap=0.0, enough=np.inf, deadline=Deadline()).bound + program.constant


def test_an_op_after_the_boundary_comes_after_the_whole_forward() -> None:
    """Whose last op is in a later interval than the tangent's reader would be: there is no such solution."""
    values = [
        Value(name="a", nbytes=10),
        Value(name="loss", nbytes=10, role=Role.OUTPUT),
        Value(name="t", nbytes=0, role=Role.TANGENT, of=1),
        Value(name="scale", nbytes=50, role=Role.ACTIVATION),
        Value(name="g", nbytes=10, role=Role.ACTIVATION),
        Value(name="grad", nbytes=10, role=Role.GRAD),
    ]
    ops = [
        run("f", [], [0], 1.0),
        run("f_loss", [0], [1], 1.0),
        run("b_scale", [], [3], 1.0),  # reads neither a tangent nor the forward
        run("b", [2], [4], 1.0),
        run("b_last", [0, 3, 4], [5], 1.0),
    ]
    graph = Graph(name="boundary", values=values, ops=ops)
    program = CoarseProgram(graph, reachability(graph), 1000, (Moment(2),), 1.0, np.inf)
    for cost in (1.0, -1.0):  # the tangent's reader early, and late
        program.rows.cost[program.runs[0][3]] = cost
        program.rows.cost[program.runs[0][1]] = 2.0  # the loss late
        found = program.rows.minimize(gap=0.0, enough=np.inf, deadline=Deadline()).found
        assert found is not None
        order = [*flattened.from_iterable(program.sequence(found, late=False))]
        assert simulate(graph, Schedule.from_order(graph, order)).time_s == graph.time_s
