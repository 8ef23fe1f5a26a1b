"""Methods for chains: closed forms, brute force over their own plans, and what they are beside each other."""

import json
import random
from functools import cache

import pytest

from remat_graph import Graph, Implementation, Op, Value, noremat_peak_nbytes, simulate
from remat_graph.partition import articulation_places, at_articulations
from remat_solvers import Problem, TableTooLarge
from remat_solvers.chain import table
from remat_solvers.chain.table import GroupRun, keep_all, order_of_runs
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.methods.chen import CheckpointAP, ChenGreedy, ChenGreedyLinear, ChenSqrt, ChenSqrtLinear
from remat_solvers.methods.griewank import Griewank, advances, reversal
from remat_solvers.methods.hilp import Hilp
from remat_solvers.methods.hiremate import HiremateSolver
from remat_solvers.methods.mincut import MinCut
from remat_solvers.methods.rockmate import RockmateSolver
from remat_solvers.methods.rotor import Rotor
from remat_solvers.methods.twremat import TreeDecomposition, TwRemat
from remat_solvers.testing import layer_graph, random_graph

from .corpus import ORACLES


def layers(name: str) -> Graph:
    """A layer-level graph of the oracles."""
    return layer_graph(json.loads((ORACLES / f"{name}.json").read_text()))


def chain(seed: int, length: int) -> Graph:
    """Heterogeneous stages: each makes an activation and something only its own backward reads."""
    rng = random.Random(seed)
    values: list[Value] = []
    ops: list[Op] = []

    def value(nbytes: int) -> int:
        values.append(Value(name=f"v{len(values)}", nbytes=nbytes))
        return len(values) - 1

    def op(inputs: list[int], outputs: list[int], backward: bool) -> None:
        way = Implementation(inputs=inputs, outputs=outputs, time_s=rng.randint(1, 9))
        ops.append(Op(name=f"o{len(ops)}", target="t", backward=backward, implementations=[way]))

    made: list[tuple[int, int]] = []
    for i in range(length):
        made.append((value(rng.randint(1, 4)), value(rng.randint(0, 4))))
        op([made[i - 1][0]] if i else [], list(made[i]), False)
    gradient: list[int] = []
    for i in range(length - 1, -1, -1):
        below = [made[i - 1][0]] if i else []
        inputs = [*made[i], *below, *gradient]
        gradient = [value(values[below[0]].nbytes if below else 0)]
        op(inputs, gradient, True)
    return Graph(name="chain", values=values, ops=ops)


@pytest.mark.parametrize("snapshots", range(6))
def test_binomial_checkpointing_has_the_fewest_runs(snapshots: int) -> None:
    """The closed form, the recursion that it solves, and the plan itself agree."""

    @cache
    def least(steps: int, free: int) -> int:
        if steps == 1:
            return 0
        if free == 0:
            return steps * (steps - 1) // 2
        return min(m + least(steps - m, free - 1) + least(m, free) for m in range(1, steps))

    for steps in range(1, 26):
        assert advances(steps, snapshots) == least(steps, snapshots)
        forward = [step for kind, step in reversal(steps, snapshots) if kind == "forward"]
        assert len(forward) - steps == least(steps, snapshots)


def _plans(i: int, j: int) -> list[list[GroupRun]]:
    """Every plan of rotor's form for stages i to j - 1."""
    if i == j:
        return [[]]
    found = [[("forward", i, 0), *inner, ("backward", i, 0)] for inner in _plans(i + 1, j)]
    for k in range(i + 1, j):
        there: list[GroupRun] = [("forward", s, 0) for s in range(i, k)]
        found += [there + right + left for right in _plans(k, j) for left in _plans(i, k)]
    return found


def test_a_table_that_fits_no_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a byte of it is taken: one line with both numbers."""
    monkeypatch.setattr(table, "MOST_TABLE_NBYTES", 10_000)
    graph = chain(0, 24)
    with pytest.raises(TableTooLarge, match=r"^a table of 24 stages and 60 slots needs .*: set fewer"):
        Rotor(slots=500).solve(Problem(graph, noremat_peak_nbytes(graph) // 2 + 1))


@pytest.mark.parametrize("seed", range(10))
def test_rotor_equals_brute_force_on_a_chain(seed: int) -> None:
    """Over all plans of its form, with their simulated peaks."""
    graph = chain(seed, 5)
    arrays, peak = flatten(graph), noremat_peak_nbytes(graph)
    groups = at_articulations(graph, 64)
    options = [[keep_all(groups, s)] for s in range(len(groups))]
    results = [evaluate(arrays, order_of_runs(groups, options, runs)) for runs in _plans(0, len(groups))]
    for fraction in (0.5, 0.6, 0.7, 0.8, 0.9):
        budget = int(fraction * peak)
        least = min((r.time_s for r in results if r.peak_nbytes <= budget), default=None)
        assert Rotor().solve(Problem(graph, budget)).time_s == least


@pytest.mark.parametrize(
    "method",
    [
        *(CheckpointAP(), ChenSqrt(), ChenSqrtLinear(), ChenGreedy(), ChenGreedyLinear(), Griewank()),
        *(
            MinCut(),
            TwRemat(),
            Rotor(),
            RockmateSolver(levels=2),
            HiremateSolver(leaf=4, levels=2, moves=500),
        ),
        Hilp(leaf=4, levels=2, segments=3),
    ],
    ids=lambda method: method.name,
)
def test_every_method_keeps_the_budget_on_any_graph(method: object) -> None:
    """Whatever the shape, what comes back is valid and fits, or nothing comes back."""
    for seed in range(12):
        graph = random_graph(seed, ops=10)
        peak = noremat_peak_nbytes(graph)
        for fraction in (0.6, 0.8):
            budget = int(fraction * peak)
            solution = method.solve(Problem(graph, budget))  # type: ignore[attr-defined]
            if solution.schedule is not None:
                assert simulate(graph, solution.schedule).peak_nbytes <= budget


@pytest.mark.parametrize("seed", range(8))
def test_the_bags_are_a_tree_decomposition(seed: int) -> None:
    """Every op and every dependency is in some bag."""
    parts = TreeDecomposition(random_graph(seed, ops=14))
    for op, near in enumerate(parts.neighbors):
        for other in near:
            assert any({op, other} <= bag for bag in parts.bags)
        assert any(op in bag for bag in parts.bags)


def test_chen_sqrt_costs_what_checkmate_published() -> None:
    """VGG19 in Checkmate's own costs: 72,512,667,648 with a checkpoint after every fifth layer."""
    graph = layers("VGG19_flops_b1")
    budget = noremat_peak_nbytes(graph) - 1
    for method in (ChenSqrt(), ChenSqrtLinear()):
        assert method.solve(Problem(graph, budget)).time_s == 72_512_667_648


def test_cuts_are_where_one_value_crosses() -> None:
    """On a chain everywhere."""
    graph = chain(0, 7)
    assert articulation_places(graph) == list(range(1, 7))


def test_the_methods_are_themselves() -> None:
    """On one chain each keeps another set, and none is the portfolio's."""
    graph = chain(3, 16)
    budget = int(0.6 * noremat_peak_nbytes(graph))
    times = {
        m.name: m.solve(Problem(graph, budget)).time_s for m in (ChenSqrt(), Griewank(), Rotor(), MinCut())
    }
    assert None not in times.values()
    assert len(set(times.values())) >= 3, times
    assert times["rotor"] <= times["griewank"], times
    assert times["rotor"] <= times["chen_sqrt"], times
