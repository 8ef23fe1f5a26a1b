"""The lower bounds and the portfolio's claims where they are easy to get wrong."""

import random
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from remat_graph import Graph, Implementation, Op, Role, Schedule, Value, noremat_peak_nbytes, simulate
from remat_graph.testing.random_training import random_training
from remat_solvers import Deadline, Problem, SolverWarning, Status, get_solver, min_budget
from remat_solvers.bounds import budget_floor, lower_bound, tight_bound
from remat_solvers.bounds.coarse_time_bound import CoarseBound
from remat_solvers.bounds.reachability import reachability, with_order
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.portfolio import auto
from remat_solvers.testing import chain, dense, mobile, random_graph, unet

from . import oracle


def run(name: str, inputs: list[int], outputs: list[int], time_s: float, scratch: int = 0) -> Op:
    """An op whose name says by its first letter whether it is a backward one."""
    way = Implementation(inputs=inputs, outputs=outputs, time_s=time_s, workspace_nbytes=scratch)
    return Op(name=name, target=name, backward=name[0] == "b", implementations=[way])


def layers(seed: int) -> Graph:
    """Three or four layers with scratch and a tangent that weighs as much as anything else."""
    rng = random.Random(seed)
    count = rng.randint(3, 4)
    sizes = [rng.randint(1, 20) for _ in range(count)]
    values = [
        Value(name=f"a{i}", nbytes=size, role=Role.OUTPUT if i == count - 1 else Role.ACTIVATION)
        for i, size in enumerate(sizes)
    ]
    values.append(Value(name="t", nbytes=rng.randint(1, 30), role=Role.TANGENT, of=count - 1))
    ops = [
        run(f"f{i}", [i - 1] if i else [], [i], rng.randint(1, 9), rng.choice([0, 0, 10, 50]))
        for i in range(count)
    ]
    upstream = count
    for i in reversed(range(count)):
        inputs = sorted({upstream, rng.randrange(count), max(0, i - 1)})
        values.append(
            Value(name=f"g{i}", nbytes=rng.randint(1, 9), role=Role.GRAD if i == 0 else Role.ACTIVATION)
        )
        upstream = len(values) - 1
        ops.append(run(f"b{i}", inputs, [upstream], rng.randint(1, 9)))
    return Graph(name=f"layers{seed}", values=values, ops=ops)


def leaves(seed: int) -> Graph:
    """Layers whose backward has two ops: one that goes on, and one that nothing follows, as for a weight.

    Nothing says when the second kind runs, and it weighs and scratches more than the other.
    """
    rng = random.Random(seed)
    values = [Value(name=f"a{i}", nbytes=rng.randint(1, 12)) for i in range(3)]
    ops = [run(f"f{i}", [i - 1] if i else [], [i], rng.randint(1, 9)) for i in range(3)]
    upstream = 2
    for i in reversed(range(3)):
        inputs = sorted({upstream, max(0, i - 1)})
        for kind, role in (("w", Role.GRAD), ("x", Role.GRAD if i == 0 else Role.ACTIVATION)):
            nbytes, scratch = rng.randint(1, 9), rng.choice([0, 10, 20]) if kind == "w" else 0
            values.append(Value(name=f"{kind}{i}", nbytes=nbytes, role=role))
            ops.append(run(f"b{kind}{i}", inputs, [len(values) - 1], rng.randint(1, 9), scratch))
        upstream = len(values) - 1
    return Graph(name=f"leaves{seed}", values=values, ops=ops)


@pytest.mark.parametrize("family", [layers, leaves])
@pytest.mark.parametrize("seed", range(30))
def test_no_bound_is_above_a_brute_force(seed: int, family: Callable[[int], Graph]) -> None:
    """With tangents and scratch, at budgets from the floor on; nor is a claim of the portfolio false."""
    graph = family(seed)
    peak = noremat_peak_nbytes(graph)
    floor = budget_floor(graph).nbytes
    for budget in {floor, (floor + peak) // 2, peak - 1}:
        least = oracle.fastest_s(graph, budget)
        assert lower_bound(graph, budget) <= least + 1e-9
        tight = tight_bound(graph, budget)
        assert tight <= least + 1e-9
        if least < np.inf:
            assert min(tight, least) - 1e-4 * least <= tight_bound(graph, budget, known_s=least) <= least
        solution = get_solver("auto", moves=1000).solve(Problem(graph, budget))
        assert solution.lower_bound_s <= least + 1e-9
        assert solution.status is not Status.INFEASIBLE or least == float("inf")
        assert solution.status is not Status.OPTIMAL or solution.time_s == pytest.approx(least)


@pytest.mark.parametrize("seed", range(10))
def test_the_cut_bound_finds_the_best_price(seed: int) -> None:
    """Of few ops, all of which it looks at: no price of a fine grid gives more at any of them."""
    graph = leaves(seed)
    budget = (budget_floor(graph).nbytes + noremat_peak_nbytes(graph)) // 2
    bound, other = CutBound(graph), CutBound(graph)
    extra_s = bound.extra_s(budget, Deadline())
    ticks = max(
        other._bound(int(op), budget, float(price))[0]
        for op in other.candidates
        for price in np.geomspace(1e4, 1e11, 600)
    )
    assert max(0.0, ticks) * bound.tick_s <= extra_s * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_no_cut_bound_is_above_a_tangent(seed: int) -> None:
    """Which is why an op whose tangent is below the best bound need not be tried at the new price."""
    graph = random_training(seed, layers=5)
    budget = (budget_floor(graph).nbytes + noremat_peak_nbytes(graph)) // 2
    bound = CutBound(graph)
    for op in bound.candidates.tolist():
        prices = np.geomspace(1e3, 1e10, 15).tolist()
        found = [bound._bound(op, budget, price) for price in prices]
        for price, (ticks, slope) in zip(prices, found, strict=True):
            for at, (other, _) in zip(prices, found, strict=True):
                assert other <= ticks + slope * (at - price) + len(graph.values) + 2 + 1e-9 * abs(slope) * at


def test_the_bound_branches_over_orders_that_no_dependency_decides() -> None:
    """Seen from each order alone, more is certain: the lowest of them is above what all have in common."""
    met = 0
    for seed in range(20):
        graph = leaves(seed)
        budget = (2 * budget_floor(graph).nbytes + noremat_peak_nbytes(graph)) // 3
        least, reach = oracle.fastest_s(graph, budget), reachability(graph)
        assert graph.time_s <= tight_bound(graph, budget) <= least + 1e-9
        met += lower_bound(graph, budget) < tight_bound(graph, budget) == pytest.approx(least)
        first, then = 3, 5  # the gradients of the last two weights: neither needs the other
        orders = [with_order(reach, first, then), with_order(reach, then, first)]
        assert [each.ancestors[then] >> first & 1 for each in (reach, *orders)] == [0, 1, 0]
        assert [each.descendants[then] >> first & 1 for each in (reach, *orders)] == [0, 0, 1]
    assert met >= 5


def test_a_moment_in_the_forward_knows_no_tangent_yet() -> None:
    """The binding moment lies before the boundary, where the tangent's 27 bytes are not live."""
    names = [("a0", 5), ("a1", 20), ("a2", 15), ("a3", 19), ("t", 27), ("g3", 4), ("g2", 4), ("g1", 1)]
    roles = {"a3": Role.OUTPUT, "t": Role.TANGENT, "g1": Role.GRAD}
    values = [
        Value(name=name, nbytes=size, role=roles.get(name, Role.ACTIVATION), of=3 if name == "t" else None)
        for name, size in names
    ]
    ops = [run("f0", [], [0], 1, 41), run("f1", [0], [1], 5, 12), run("f2", [1], [2], 3, 48)]
    ops += [run("f3", [2], [3], 2), run("b3", [0, 2, 4], [5], 2), run("b2", [1, 5], [6], 6)]
    graph = Graph(name="early", values=values, ops=[*ops, run("b1", [0, 6], [7], 9)])
    for budget in (83, 84, 86):
        least = oracle.fastest_s(graph, budget)
        assert least < float("inf")
        solution = get_solver("auto").solve(Problem(graph, budget))
        assert solution.time_s == pytest.approx(least)
        assert tight_bound(graph, budget) <= least + 1e-9


def test_a_tangent_that_the_caller_holds_may_be_read_early() -> None:
    """It is there before the boundary, so its reader may run before the rest of the forward."""
    values = [
        Value(name="a0", nbytes=10),
        Value(name="a1", nbytes=10, role=Role.OUTPUT),
        Value(name="t", nbytes=4, role=Role.TANGENT, external=True, of=1),
        Value(name="g", nbytes=1, role=Role.GRAD),
    ]
    graph = Graph(
        name="early",
        values=values,
        ops=[run("f0", [], [0], 1), run("f1", [], [1], 1), run("b0", [0, 2], [3], 1, 15)],
    )
    early = simulate(graph, Schedule.from_order(graph, [0, 2, 1])).peak_nbytes
    assert budget_floor(graph).nbytes <= early


@pytest.mark.parametrize("seed", range(20, 32))
def test_one_op_that_dwarfs_the_others_hides_no_difference(seed: int) -> None:
    """A first op of 1e7 s: optimal still means optimal among repeats of a second and less."""
    rng = random.Random(seed)
    small = random_graph(seed, 9, fancy=False)
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(op.first, time_s=rng.randint(1, 99) / 100)])
        for op in small.ops
    ]
    values = [*small.values, Value(name="big", nbytes=10**6, role=Role.OUTPUT)]
    big = attrs.evolve(run("fbig", [], [len(values) - 1], 1e7), rerun=None)
    graph = attrs.evolve(small, values=values, ops=[big, *ops])
    peak = noremat_peak_nbytes(graph)
    floor = budget_floor(graph).nbytes
    for budget in {floor, (floor + peak) // 2, peak - 1}:
        least = oracle.fastest_s(graph, budget)
        solution = get_solver("auto", gap=0.0, moves=1000).solve(Problem(graph, budget))
        assert solution.lower_bound_s <= least + 1e-6
        if solution.status is Status.OPTIMAL:
            assert solution.time_s == pytest.approx(least, abs=1e-6, rel=0)


def test_one_op_that_dwarfs_the_others_leaves_a_bound() -> None:
    """The price of a byte comes from what usual ops cost."""
    for plain in (unet(3), dense(2), mobile(4)):
        values = [*plain.values, Value(name="big", nbytes=1, role=Role.OUTPUT)]
        big = attrs.evolve(run("fbig", [], [len(values) - 1], 1e7), rerun=None)
        graph = attrs.evolve(plain, values=values, ops=[big, *plain.ops])
        peak = noremat_peak_nbytes(graph)
        budget = (budget_floor(graph).nbytes + peak) // 2
        alone = lower_bound(plain, budget - 1) - plain.time_s
        assert alone > 0
        assert lower_bound(graph, budget) - graph.time_s > 0.9 * alone


def test_a_repeat_that_takes_ages_breaks_nothing() -> None:
    """1e12 times its first run."""
    plain = chain(6)
    ops = []
    for op in plain.ops:
        again = attrs.evolve(op.first, time_s=1e12)
        ops.append(attrs.evolve(op, implementations=[op.first, again], rerun=1))
    graph = attrs.evolve(plain, ops=ops)
    peak = noremat_peak_nbytes(graph)
    solution = get_solver("auto", moves=1000).solve(Problem(graph, peak - 1))
    assert solution.lower_bound_s <= (solution.time_s or float("inf"))


@pytest.mark.parametrize("part", ["evict", "keep_only", "plan", "cheapest", "CoarseBound.round"])
def test_a_part_that_fails_loses_its_place(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parts still give a result, with a warning that names the failed part."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    graph = unet(4)
    peak = noremat_peak_nbytes(graph)
    if part == "CoarseBound.round":
        monkeypatch.setattr(CoarseBound, "round", fail)
    else:
        monkeypatch.setattr(auto, part, fail)
    with pytest.warns(SolverWarning, match="out of order"):
        solution = get_solver("auto", moves=2000, gap=0.0).solve(Problem(graph, int(0.75 * peak)))
    assert solution.feasible


def test_a_plan_near_the_bound_needs_no_coarse_program() -> None:
    """Near is a multiple of the wanted gap; with none, the program runs."""
    graph = unet(4)
    problem = Problem(graph, int(0.75 * noremat_peak_nbytes(graph)))
    solution = get_solver("auto", moves=2000, gap=0.0).solve(problem)
    assert solution.stats["rounds"]
    assert solution.time_s is not None
    walked = get_solver("auto", moves=2000, gap=0.0, proofs=False).solve(problem)
    assert walked.time_s is not None
    away = (walked.time_s - walked.lower_bound_s) / graph.time_s
    assert away > 0
    for share, runs in ((0.5, False), (0.1, True)):
        found = get_solver("auto", moves=2000, gap=share * away).solve(problem)
        assert runs == bool(found.stats["rounds"])


def test_starts_that_cannot_be_carried_out_are_left_out() -> None:
    """Unknown ops, or an invalid order: one warning each, and a result."""
    graph = unet(3)
    peak = noremat_peak_nbytes(graph)
    starts = ((10**6,), (-1,), tuple(range(len(graph.ops)))[::-1])
    with pytest.warns(SolverWarning, match="a start is not a valid order") as caught:
        solution = get_solver("auto", starts=starts, moves=1000).solve(Problem(graph, int(0.8 * peak)))
    assert len([w for w in caught if "start" in str(w.message)]) == 3
    assert solution.feasible


def test_the_bound_of_a_program_that_claims_too_much_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known schedule refutes the bound."""
    plain = CoarseBound.round

    def boast(self: CoarseBound, *args: object, **options: object) -> object:
        return attrs.evolve(plain(self, *args, **options), extra_s=np.inf)

    monkeypatch.setattr(CoarseBound, "round", boast)
    graph = unet(4)
    peak = noremat_peak_nbytes(graph)
    with pytest.warns(SolverWarning, match="bound above the time of a known schedule"):
        solution = get_solver("auto", moves=2000, gap=0.0).solve(Problem(graph, int(0.75 * peak)))
    assert solution.feasible
    assert solution.lower_bound_s < float("inf")


def certainly_live(graph: Graph, *, last: bool = False) -> dict[int, set[int]]:
    """Per op the values that are live in every schedule while the op first runs: all states, one by one.

    If `last`, in every schedule in which no other op first runs later.
    """
    forward = {i for i, op in enumerate(graph.ops) if not op.backward}
    tangents = frozenset(graph.tangents)
    start = (frozenset[int](), frozenset[int]())
    found: dict[int, set[int]] = {}
    waiting, seen = [start], {start}
    while waiting:
        ran, live = waiting.pop()
        follow = [(ran, live - {v}) for v in live if not graph.values[v].pinned]
        for i, op in enumerate(graph.ops):
            fresh = set(op.first.outputs) - {v for v in live if graph.values[v].pinned}
            if not live.issuperset(op.first.inputs) or not live.isdisjoint(fresh):
                continue
            if i not in ran and (not last or len(ran) == len(graph.ops) - 1):
                found[i] = found.get(i, {*live, *op.first.outputs}) & {*live, *op.first.outputs}
            begins = not forward <= ran and forward <= ran | {i}
            follow.append((ran | {i}, live.union(op.first.outputs, tangents if begins else ())))
        waiting += (new := set(follow) - seen)
        seen |= new
    return found


@pytest.mark.parametrize("family", [layers, leaves])
@pytest.mark.parametrize("seed", range(8))
def test_the_floor_names_what_every_schedule_holds(seed: int, family: Callable[[int], Graph]) -> None:
    """By brute force over all states: the op that binds, its values, and their bytes."""
    graph = family(seed)

    def sized(live: dict[int, set[int]]) -> list[tuple[int, int, set[int]]]:
        needed = {i: sum(graph.values[v].nbytes for v in held) for i, held in live.items()}
        return [(n + graph.ops[i].first.workspace_nbytes, -i, live[i]) for i, n in needed.items()]

    largest = max(sized(certainly_live(graph)), key=lambda each: each[:2])
    ending = min(sized(certainly_live(graph, last=True)), key=lambda each: (each[0], -each[1]))
    nbytes, binding, held = max(largest, ending, key=lambda each: each[0])
    floor = budget_floor(graph)
    assert (graph.ops[-binding].name, nbytes) == (floor.op, floor.nbytes)
    assert held == floor.held.keys()
    assert graph.ops[-binding].first.workspace_nbytes == floor.workspace_nbytes
    assert floor.nbytes == sum(floor.held.values()) + floor.workspace_nbytes


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_a_floor_add_up(seed: int) -> None:
    """Also with outputs that take over storage, rounding and persistent values."""
    for graph in (random_graph(seed, ops=8, fancy=True), random_training(seed, layers=4)):
        floor = budget_floor(graph)
        assert floor.nbytes == sum(floor.held.values()) + floor.workspace_nbytes


def test_when_the_last_op_runs_all_gradients_are_live() -> None:
    """Nothing follows those of weights: each may be the first, but all are there in the end."""
    values = [
        Value(name="a", nbytes=10),
        Value(name="loss", nbytes=0, role=Role.OUTPUT),
        Value(name="t", nbytes=0, role=Role.TANGENT, of=1),
        *(Value(name=f"g{i}", nbytes=100 + i, role=Role.GRAD) for i in range(3)),
    ]
    ops = [run("f", [], [0], 1.0), run("loss", [0], [1], 1.0)]
    ops += [run(f"b{i}", [0, 2], [3 + i], 1.0, scratch=(50, 0, 70)[i]) for i in range(3)]
    graph = Graph(name="leaves", values=values, ops=ops)
    floor = budget_floor(graph)
    assert (floor.nbytes, floor.op, floor.op_nbytes) == (10 + 100 + 101 + 102, "b1", 111)
    assert sum(floor.held.values()) + floor.workspace_nbytes == floor.nbytes
    assert oracle.fastest_s(graph, floor.nbytes) == graph.time_s
    assert oracle.fastest_s(graph, floor.nbytes - 1) == float("inf")
    told = str(min_budget(graph).as_error(1, graph))
    assert "needs 111 B while 202 B of gradients, outputs and other values must be live" in told
