"""Each named method is itself: not the portfolio under another name, and worth what its own rule is worth.

What it has to find is worked out here without it: a closed form, a few lines of arithmetic, or a brute force
over the plans of its form. Seconds and bytes are small whole numbers. Any two methods that change places, and
any method in whose place the portfolio stands, make a test of this file fail.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, product

import pytest

from remat_graph import Graph, Implementation, Op, Schedule, Value, simulate
from remat_graph.partition import at_articulations, at_narrow_places, grouped
from remat_solvers import Problem, Solution, get_solver
from remat_solvers.evaluation.linear_order import without_useless
from remat_solvers.methods.twremat import TreeDecomposition
from remat_solvers.testing import random_graph

from . import oracle, plan_oracle, stage_oracle

Line = tuple[str, str, int, float, int]  # an op: what it makes, what it reads, bytes, seconds, scratch
Item = tuple[str, int, float]  # a value: name, bytes, seconds to make it


def step(name: str, forward: Iterable[Line], backward: Iterable[Line]) -> Graph:
    values: list[Value] = []
    ops: list[Op] = []
    index: dict[str, int] = {}
    for part, back in ((forward, False), (backward, True)):
        for made, reads, nbytes, time_s, scratch in part:
            index[made] = len(values)
            way = Implementation(
                inputs=[index[read] for read in reads.split()],
                outputs=[index[made]],
                time_s=time_s,
                workspace_nbytes=scratch,
            )
            values.append(Value(name=made, nbytes=nbytes))
            ops.append(Op(name=made, target="t", backward=back, implementations=[way]))
    return Graph(name=name, values=values, ops=ops)


def line(length: int) -> Graph:
    """Unit steps in a row; the backward of one reads what it reads and makes, and the gradient behind it."""
    forward = [(f"v{i}", f"v{i - 1}" if i else "", 1, 1.0, 0) for i in range(length)]
    backward = [
        (f"g{i}", f"v{i} {f'v{i - 1}' if i else ''} {f'g{i + 1}' if i < length - 1 else ''}", 1, 1.0, 0)
        for i in reversed(range(length))
    ]
    return step("line", forward, backward)


def blocks(count: int, wide: int, time_s: float) -> Graph:
    """x -> a (wide) -> the next x, which reads both: only an x is alone where it crosses."""
    forward: list[Line] = [("x0", "", 1, 1.0, 0)]
    backward: list[Line] = []
    for i in range(count):
        forward += [(f"a{i}", f"x{i}", wide, time_s, 0), (f"x{i + 1}", f"a{i} x{i}", 1, 1.0, 0)]
        behind = f"g{i + 1}" if i < count - 1 else ""
        backward += [
            (f"g{i}", f"h{i} a{i} x{i}", 1, 1.0, 0),
            (f"h{i}", f"{behind} x{i + 1} a{i} x{i}", 1, 1.0, 0),
        ]
    return step("blocks", forward, backward[::-1])


def gifts(items: Sequence[Item]) -> Graph:
    """Values that all wait for their own reader while one op with much scratch runs."""
    names = [name for name, _, _ in items]
    forward = [
        *((name, "", nbytes, time_s, 0) for name, nbytes, time_s in items),
        ("L", " ".join(names), 0, 1.0, 0),
    ]
    return step(
        "gifts", forward, [("P", "L", 0, 1.0, 100), *((f"u{name}", f"P {name}", 0, 1.0, 0) for name in names)]
    )


def pressure() -> Graph:
    """S is read after each of two ops with much scratch, D after the second one only."""
    forward = [
        *(("S", "", 10, 1.0, 0), ("D", "", 10, 5.0, 0), ("P1", "", 0, 1.0, 100)),
        *(("a", "P1 S", 0, 1.0, 0), ("P2", "a", 0, 1.0, 100)),
    ]
    return step("pressure", forward, [("u", "P2 S", 0, 1.0, 0), ("w", "u D", 0, 1.0, 0)])


def peak_of(graph: Graph, order: Iterable[int] | None = None) -> int:
    found = range(len(graph.ops)) if order is None else order
    return simulate(graph, Schedule.from_order(graph, found)).peak_nbytes


def asked(name: str, graph: Graph, budget: int, **parameters: object) -> Solution:
    return get_solver(name, **parameters).solve(Problem(graph, budget))


def extra_s(solution: Solution) -> float | None:
    """Seconds of what runs again."""
    return None if solution.time_s is None else round(solution.time_s - solution.base_s, 6)


def own(name: str, graph: Graph, budget: int, **parameters: object) -> float | None:
    """Seconds of what a method runs again, after a look at the portfolio's order: it is another."""
    solution = asked(name, graph, budget, **parameters)
    assert solution.order != asked("auto", graph, budget, moves=2000).order
    return extra_s(solution)


def test_noremat() -> None:
    """Every op once in trace order, or nothing; the portfolio goes on."""
    graph = line(6)
    peak = peak_of(graph)
    assert asked("noremat", graph, peak).order == tuple(range(12))
    assert own("noremat", graph, peak - 1) is None


# Chen's methods: what crosses a cut is kept, all else runs again, but for the last segment.


def segmented(graph: Graph, cuts: Sequence[int]) -> tuple[float, int]:
    """Extra seconds and peak when each segment of the forward runs again before its backward."""
    count = sum(not op.backward for op in graph.ops)
    segments = [range(a, b) for a, b in pairwise([0, *cuts, count])]
    segment_of = {op: s for s, segment in enumerate(segments) for op in segment}
    kept = {
        v for op in range(count) for v in graph.ops[op].first.inputs if segment_of[v] < segment_of[op]
    }  # op i makes value i
    order, there, extra = list(range(count)), {len(segments) - 1}, 0.0
    for op in range(count, len(graph.ops)):
        for v in sorted(graph.ops[op].first.inputs, reverse=True):
            if v < count and v not in kept and segment_of[v] not in there:
                there.add(segment_of[v])
                again = [i for i in segments[segment_of[v]] if i not in kept]
                order += again
                extra += sum(graph.ops[i].first.time_s for i in again)
        order.append(op)
    return extra, peak_of(graph, order)


def filled(graph: Graph, places: Sequence[int], limit: int) -> list[int]:
    """Algorithm 3 of the paper: a segment ends where it first holds more than the limit."""
    found, begin = [], 0
    for place in places:
        if sum(graph.values[v].nbytes for v in range(begin, place)) > limit:
            found.append(place)
            begin = place
    return found


@pytest.mark.parametrize("budget", [31, 19])
@pytest.mark.parametrize(
    ("name", "variant"),
    [("checkpoint_ap", ""), *product(["chen_sqrt", "chen_greedy"], ["", "_linear"])],
)
def test_chen(name: str, variant: str, budget: int) -> None:
    """Nine blocks: 19 forward ops, cuts before op 1, 3, ..., 17 where an x is alone, or anywhere."""
    graph = blocks(9, 3, 2.0)
    places = list(range(1, 19)) if variant else list(range(1, 18, 2))
    every = 4 if variant else 3  # the roots of 18 and of 9
    plans = {
        "checkpoint_ap": [places],
        "chen_sqrt": [places[every - 1 :: every]],
        "chen_greedy": [filled(graph, places, limit) for limit in range(1, 38)],  # it makes 37 bytes
    }
    found = [segmented(graph, cuts) for cuts in plans[name]]
    least = min((extra for extra, peak in found if peak <= budget), default=None)
    assert least == own(name + variant, graph, budget)


def test_chen_by_hand() -> None:
    """The same in numbers, of which no two methods have the same ones."""
    # checkpoint_ap: the a of all blocks but the last, 8 * 2. chen_sqrt: x2, x5 and x8 are kept; x0, a0, x1
    # and a1 are 6, an a, x, a, x, a is 8, twice. chen_sqrt_linear: x and a of every other block are kept,
    # those before run again: 4 * 3. The greedy ones as the brute force above has them.
    expected = {
        "checkpoint_ap": (16, 16),
        "chen_sqrt": (22, 22),
        "chen_sqrt_linear": (12, None),
        "chen_greedy": (12, 17),
        "chen_greedy_linear": (12, 15),
    }
    graph = blocks(9, 3, 2.0)
    for name, times in expected.items():
        assert times == tuple(extra_s(asked(name, graph, budget)) for budget in (31, 19))


@pytest.mark.parametrize("budget", [8, 10, 12])
def test_griewank(budget: int) -> None:
    """The fewest advances with as many snapshots as fit beside what the backward of one step holds."""

    @cache
    def advances(steps: int, free: int) -> int:
        if steps == 1:
            return 0
        if free == 0:
            return steps * (steps - 1) // 2
        return min(m + advances(steps - m, free - 1) + advances(m, free) for m in range(1, steps))

    # That is what the step makes and two gradients: 3 bytes. What the step reads is a snapshot.
    assert advances(12, budget - 3) == own("griewank", line(12), budget)


# One moment, and values to give up: what each rule gives up can be worked out on the back of an envelope.

FIRST = [("A", 10, 60.0), ("B", 6, 30.0), ("C", 6, 42.0)], 10
SECOND = [("G", 40, 70.0), ("B", 6, 30.0), ("C", 6, 48.0), ("E", 12, 65.0)], 12


def evicted(items: Sequence[Item], excess: int) -> float:
    """Least seconds per byte of excess removed, one after the other."""
    left, spent = list(items), 0.0
    while excess > 0:
        chosen = min(left, key=lambda item: item[2] / min(item[1], excess))
        left.remove(chosen)
        excess -= chosen[1]
        spent += chosen[2]
    return spent


def by_rate(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: item[2] / item[1])


def cut_and_evicted(items: Sequence[Item], excess: int) -> float:
    """At every price those cheaper per byte are remade; then as above. The best price counts."""
    return min(
        sum(time_s for _, _, time_s in by_rate(items)[:count])
        + evicted(by_rate(items)[count:], excess - sum(nbytes for _, nbytes, _ in by_rate(items)[:count]))
        for count in range(len(items) + 1)
    )


def relaxed(items: Sequence[Item], excess: int) -> tuple[float, float]:
    """The stage program's relaxation, and its rounding: a value that is partly dropped is dropped.

    A knapsack's relaxation at half price: by running L, of one second, to a share of x / 2 as P's stage
    begins, a program in fractions frees x of a value of which only x / 2 is missing there and made again.
    """
    spent = rounded = most = 0.0
    for _, nbytes, time_s in by_rate(items):
        if excess > 0:
            share = min(1.0, excess / nbytes)
            spent += time_s * share
            most = max(most, share)
            rounded += time_s
            excess -= nbytes
    return (spent + most) / 2, rounded


@pytest.mark.parametrize(("items", "excess", "found"), [(*FIRST, (72, 72, 90)), (*SECOND, (78, 70, 70))])
def test_greedy_mincut_and_the_relaxation(
    items: list[Item], excess: int, found: tuple[float, float, float]
) -> None:
    """Of the first, greedy gives up B (5 s a byte) and then C, the relaxation B and part of A, the best is A.

    Of the second, greedy gives up B (5 s a byte; G is 70 / 12, as only 12 bytes count) and then C, a cut at
    any price below 5 s a byte gives up G (1.75), the best is E.
    """
    graph = gifts(items)
    budget = peak_of(graph) - excess
    assert found == (evicted(items, excess), cut_and_evicted(items, excess), relaxed(items, excess)[1])
    names = ("greedy", "mincut", "checkmate_lp")
    assert found == tuple(own(name, graph, budget) for name in names)
    assert relaxed(items, excess)[0] == pytest.approx(
        float(asked("checkmate_lp", graph, budget).stats["relaxation_s"])
    )
    least = min(
        sum(time_s for _, _, time_s in chosen)
        for count in range(len(items) + 1)
        for chosen in combinations(items, count)
        if sum(nbytes for _, nbytes, _ in chosen) >= excess
    )
    assert least == extra_s(asked("auto", graph, budget, moves=2000)) < min(found)


@pytest.mark.parametrize("seed", [24, 40])
def test_checkmate_and_search(seed: int) -> None:
    """Brute force over stages, and over any order, which is less: an op need not wait for its stage."""
    graph = random_graph(seed, ops=7, fancy=False)
    budget = int(0.85 * peak_of(graph))
    stages, anything = stage_oracle.fastest_s(graph, budget), oracle.fastest_s(graph, budget)
    assert anything < stages
    assert stages - graph.time_s == own("checkmate", graph, budget)
    assert anything == asked("search", graph, budget, moves=20_000).time_s


def test_search_is_not_the_portfolio() -> None:
    """As fast as can be on a line, in another order."""
    graph = line(12)
    assert own("search", graph, 10, moves=4000) == 3  # a byte less is an op of a second more: 13 - 10


@pytest.mark.parametrize(("computations", "extra"), [(1, None), (2, 5), (3, 2)])
def test_moccasin(computations: int, extra: float | None) -> None:
    """S given up twice costs 2 and is three computations; with two it is D, once for both: 5."""
    graph = pressure()
    assert extra == extra_s(asked("moccasin", graph, 110, computations=computations))
    if computations == 2:
        assert extra == own("moccasin", graph, 110)
        assert extra_s(asked("checkmate", graph, 110)) == 2


def test_twremat() -> None:
    """The paper's recursion, with the bags of one decomposition as separators."""
    graph = line(6)
    parts = TreeDecomposition(graph)
    before = [set(op.first.inputs) for op in graph.ops]  # op i makes value i

    def needed(wanted: set[int], part: set[int]) -> set[int]:
        found = set(wanted)
        while more := {p for op in found for p in before[op] & part} - found:
            found |= more
        return found

    def pieces(ops: set[int]) -> list[set[int]]:
        found: list[set[int]] = []
        for op in sorted(ops):
            near = [piece for piece in found if any(p in before[op] or op in before[p] for p in piece)]
            found = [piece for piece in found if piece not in near] + [{op}.union(*near)]
        return sorted(found, key=min)

    def plan(part: set[int], wanted: set[int], leaf: int) -> Iterator[int]:
        ops = needed(wanted, part)
        if len(ops) <= leaf:
            yield from sorted(ops)
            return
        bags = [bag & ops for bag in parts.bags if bag & ops]
        bag = min(bags, key=lambda bag: (max(map(len, pieces(ops - bag)), default=0), len(bag)))
        rest = pieces(ops - bag)
        for op in sorted(bag):
            for piece in rest:
                if before[op] & piece:
                    yield from plan(piece, before[op] & piece, leaf)
            yield op
        for piece in rest:
            if wanted & piece:
                yield from plan(piece, wanted & piece, leaf)

    everything = set(range(12))
    found = []
    for leaf in (6, 4, 3):
        order = without_useless(graph, [*range(6), *plan(everything, set(range(6, 12)), leaf)])
        found.append((peak_of(graph, order), len(order) - 12.0))
        assert own("twremat", graph, found[-1][0], leaves=(leaf,)) == found[-1][1]
    assert min((extra for peak, extra in found if peak <= 6), default=None) == extra_s(
        asked("twremat", graph, 6, leaves=(6, 4, 3))
    )


@pytest.mark.parametrize("budget", [17, 18, 19])
def test_rotor_and_interval_dp(budget: int) -> None:
    """Whole groups; interval_dp then removes useless repeats from the fastest plan."""
    graph = blocks(3, 5, 3.0)
    chain, narrow = at_articulations(graph, 64), at_narrow_places(graph, 36)
    kept = plan_oracle.orders(chain, plan_oracle.chain_plans(0, len(chain)), plan_oracle.whole(chain))
    assert plan_oracle.fastest(graph, kept, budget) == own("rotor", graph, budget)
    kept = plan_oracle.orders(narrow, plan_oracle.chain_plans(0, len(narrow)), plan_oracle.whole(narrow))
    least = plan_oracle.fastest(graph, kept, budget)
    kept = {order for order in kept if plan_oracle.fastest(graph, [order], budget) == least}
    assert plan_oracle.fastest(graph, kept, budget, trim=True) == own("interval_dp", graph, budget)


@pytest.mark.parametrize(
    ("name", "parameters", "counted"),
    [
        ("rockmate", {}, {"stages"}),
        ("hilp", {"leaf": 4, "segments": 3}, {"segments", "proven"}),
        ("hiremate", {"leaf": 4, "exact": 6, "moves": 200}, {"segments"}),
    ],
)
def test_rockmate_hilp_and_hiremate(name: str, parameters: dict[str, object], counted: set[str]) -> None:
    """Groups run as wholes, each backward in its best way: S is not made again amid the forward, for 2.

    The three forms meet here; but rockmate counts stages, and hilp alone has a program on top.
    """
    graph, budget = pressure(), 110
    groups = grouped(graph, 3) if name == "hilp" else at_articulations(graph, 32)
    count = len(groups)
    plans = plan_oracle.stage_plans(count) if name == "hilp" else plan_oracle.chain_plans(0, count)
    every = plan_oracle.orders(groups, plans, [plan_oracle.ways(groups, s) for s in range(count)])
    assert plan_oracle.fastest(graph, every, budget) == own(name, graph, budget, **parameters) == 5
    stats = asked(name, graph, budget, **parameters).stats
    assert counted == {"stages", "segments", "proven"} & set(stats)
    assert count == stats["stages" if name == "rockmate" else "segments"]
