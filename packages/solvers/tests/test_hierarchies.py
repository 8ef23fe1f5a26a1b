"""`rockmate`, `hilp` and `hiremate`: equal groups are solved once, tight budgets are met, time is kept."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest

from remat_graph import (
    Graph,
    Implementation,
    Op,
    Role,
    Schedule,
    Value,
    load_graph,
    noremat_peak_nbytes,
    simulate,
)
from remat_graph.partition import at_articulations, cut
from remat_solvers import Deadline, Problem, Solution, get_solver
from remat_solvers.chain.block_options import OptionTable, with_turn, without_turn
from remat_solvers.evaluation.arrays import evaluate, flatten
from remat_solvers.local_search.repair import repair_orders
from remat_solvers.methods.checkmate import Checkmate
from remat_solvers.methods.hilp import Hilp
from remat_solvers.methods.hiremate import HiremateSolver
from remat_solvers.methods.rockmate import RockmateSolver
from remat_solvers.testing import chain as network
from remat_solvers.testing import random_graph

from .corpus import GRAPHS

HangLimit = Callable[[int], AbstractContextManager[None]]


def layers(count: int) -> Graph:
    """Equal layers of five forward ops, each with a residual that crosses it, and their backward."""
    values = [Value(name="x", nbytes=8)]
    ops = [
        Op(name="embed", target="embed", implementations=[Implementation(inputs=[], outputs=[0], time_s=1)])
    ]
    back: list[tuple[str, int, int]] = []

    def add(
        name: str, inputs: list[int], nbytes: int, *, backward: bool = False, role: str = "activation"
    ) -> int:
        values.append(Value(name=name, nbytes=nbytes, role=Role(role)))
        way = Implementation(inputs=inputs, outputs=[len(values) - 1], time_s=2.0)
        ops.append(Op(name=f"op {name}", target="t", backward=backward, implementations=[way]))
        return len(values) - 1

    x = 0
    for layer in range(count):
        inside = [x]
        for depth in range(4):
            inside.append(add(f"a{layer}.{depth}", [inside[-1]], 16))
        x = add(f"x{layer}", [x, inside[-1]], 8)
        back += [(f"{layer}.{depth}", inside[depth], inside[depth + 1]) for depth in range(4)]
    gradient = add("g", [x], 8, backward=True)
    for name, first, second in reversed(back):
        gradient = add(f"g{name}", [gradient, first, second], 8, backward=True)
        add(f"w{name}", [gradient], 0, backward=True, role="grad")
    return Graph(name="layers", values=values, ops=ops)


@pytest.mark.parametrize(
    "method",
    [
        RockmateSolver(levels=2),
        pytest.param(Hilp(levels=2, segments=6, leaf=20), marks=pytest.mark.full),
        Hilp(levels=2, segments=3, leaf=8),  # two levels of groups
        HiremateSolver(levels=2, leaf=20, moves=500),
        HiremateSolver(levels=2, leaf=8, moves=500, segments=3),
    ],
    ids=["rockmate", "hilp", "hilp-deep", "hiremate", "hiremate-deep"],
)
def test_nothing_is_solved_twice(
    method: RockmateSolver | Hilp | HiremateSolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve equal layers are a few distinct groups, each asked about once at each pair of budgets."""
    asked: list[tuple[object, ...]] = []
    solve = Checkmate.solve

    def counted(self: Checkmate, problem: Problem, deadline: Deadline | None = None) -> Solution:
        values = tuple((v.nbytes, v.role, v.external) for v in problem.graph.values)
        ops = tuple((op.backward, op.rerun, op.implementations) for op in problem.graph.ops)
        asked.append((values, ops, problem.budget_nbytes))
        return solve(self, problem, deadline)

    monkeypatch.setattr(Checkmate, "solve", counted)
    graph = layers(12)
    solution = method.solve(Problem(graph, int(0.6 * noremat_peak_nbytes(graph))))
    assert solution.feasible
    assert asked
    assert len(set(asked)) == len(asked)
    assert int(solution.stats["distinct"]) <= 16  # on all levels; there are 12 layers of 13 ops
    assert len(asked) <= int(solution.stats["solves"]) <= 4 * int(solution.stats["distinct"])


def test_one_menu_serves_all_levels() -> None:
    """Groups that are known are not solved again, neither by the same nor by another partition."""
    graph = layers(8)
    option_table = OptionTable(levels=2)
    asked: list[Graph] = []

    def solve(problem: Problem, deadline: Deadline) -> Solution:
        asked.append(problem.graph)
        return Checkmate().solve(problem, deadline)

    groups = at_articulations(graph, 100)
    options = option_table.options(groups, solve, Deadline())
    keys = {subgraph.key for subgraph in groups.subgraphs}
    assert len(groups) >= 8
    assert len(keys) < len(groups)
    assert option_table.distinct <= len(keys)
    assert option_table.solves == len(asked)
    assert any(len(found) > 1 for found in options)
    before = len(asked)
    assert option_table.options(groups, solve, Deadline()) == options
    assert len(asked) == before
    halves = cut(graph, [sum(map(len, groups.forward[:4]))])
    assert [len(found) for found in option_table.options(halves, solve, Deadline(0.0))] == [1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_the_turn_says_what_may_be_kept(seed: int) -> None:
    """With it a schedule peaks at what it holds between forward and backward, and there is a way back."""
    graph = random_graph(seed, ops=10)
    order = range(len(graph.ops) + 1)
    workspace = 10 * noremat_peak_nbytes(graph)
    turned = with_turn(graph, workspace)
    held = simulate(turned, Schedule.from_order(turned, order)).peak_nbytes - workspace
    assert 0 <= held <= noremat_peak_nbytes(graph)
    assert without_turn(graph, order) == tuple(range(len(graph.ops)))
    repeat = [*order, len(graph.ops)]
    assert without_turn(graph, repeat) == (*range(len(graph.ops)), len(graph.ops) - 1)


@pytest.mark.parametrize(
    ("name", "graph", "fraction", "most_pct"),
    [
        ("rockmate", "unet", 0.3, 40.0),
        ("rockmate", "unet", 0.5, 13.0),
        ("rockmate", "vgg16", 0.5, 11.0),
        ("hiremate", "vgg16", 0.5, 11.0),
    ],
)
def test_tight_budgets_of_the_corpus(name: str, graph: str, fraction: float, most_pct: float) -> None:
    """Where these methods once found nothing."""
    loaded = load_graph(GRAPHS / f"{graph}.json")
    solution = get_solver(name).solve(
        Problem(loaded, int(fraction * noremat_peak_nbytes(loaded))), Deadline(60)
    )
    assert solution.overhead is not None
    assert 100 * solution.overhead <= most_pct


@pytest.mark.full
@pytest.mark.parametrize("name", ["rockmate", "hilp", "hiremate"])
@pytest.mark.parametrize(
    ("graph", "fraction"), [("unet", 0.3), ("vgg16", 0.5), ("gpt2_nohead", 0.3), ("resnet50", 0.3)]
)
def test_all_tight_budgets_of_the_corpus(
    name: str, graph: str, fraction: float, hang_limit: HangLimit
) -> None:
    """A schedule in a minute, no slower than running the whole forward twice."""
    loaded = load_graph(GRAPHS / f"{graph}.json")
    problem = Problem(loaded, int(fraction * noremat_peak_nbytes(loaded)))
    with hang_limit(90):
        solution = get_solver(name).solve(problem, Deadline(60))
    assert solution.overhead is not None
    assert solution.overhead < 0.34


@pytest.mark.parametrize("name", ["rockmate", "hilp", "hiremate"])
def test_a_deadline_is_kept(name: str, hang_limit: HangLimit) -> None:
    """A graph of 500 ops and three seconds, programs that are being written included."""
    graph = load_graph(GRAPHS / "resnet50.json")
    deadline = Deadline(3.0)
    with hang_limit(12):  # with room for a busy machine
        get_solver(name).solve(Problem(graph, int(0.5 * noremat_peak_nbytes(graph))), deadline)
    assert deadline.hit


def test_repair_makes_plans_fit_or_says_that_it_cannot() -> None:
    """Evicted where it oversteps, brought down where that is not enough, nothing below the floor."""
    graph = network(24, skips=4)
    arrays, peak = flatten(graph), noremat_peak_nbytes(graph)
    trace = np.arange(len(graph.ops), dtype=np.int64)
    for fraction in (0.8, 0.6):
        found = repair_orders(arrays, [trace], int(fraction * peak), Deadline())
        assert found is not None
        assert evaluate(arrays, found).peak_nbytes <= int(fraction * peak)
    assert repair_orders(arrays, [trace], 1, Deadline(), moves=1000) is None
    assert repair_orders(arrays, [], peak, Deadline()) is None
