"""Transfers are placed where they hide behind compute, and never where memory has no room for them."""

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from remat_graph import (
    Compute,
    Free,
    FreeHost,
    Graph,
    Implementation,
    InvalidSchedule,
    Lane,
    Links,
    Op,
    Placement,
    Schedule,
    Start,
    Step,
    Transfer,
    Value,
    Wait,
    simulate,
    verify,
)
from remat_graph.testing.random_graphs import random_chain, random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_training import random_links, streamed
from remat_solvers import NoIdleInterval
from remat_solvers.transfers.idle_intervals import IdleInterval, idle_intervals
from remat_solvers.transfers.placement import schedule_transfers

Made = tuple[Graph, list[int], list[IdleInterval], Links]


def naive(graph: Graph, order: list[int], moves: list[IdleInterval]) -> Schedule:
    """Every copy is made on the spot and waited for."""
    leaves, comes = defaultdict[int, list[Step]](list), defaultdict[int, list[Step]](list)
    for value, after, before in sorted((move.value, move.after, move.before) for move in moves):
        out, back = Transfer(value, Lane.TO_HOST), Transfer(value, Lane.TO_DEVICE)
        on_host = graph.values[value].placement is Placement.HOST
        leaves[after] += [Free(value)] if on_host else [Start(out), Wait(out), Free(value)]
        comes[before] += [Start(back), Wait(back)] if on_host else [Start(back), Wait(back), FreeHost(value)]
    plain = Schedule.from_order(graph, order)
    reads = [graph.ops[run.op].implementations[run.implementation].inputs for run in plain.computes()]
    for value, stored in enumerate(graph.values):
        uses = [position for position, inputs in enumerate(reads) if value in inputs]
        if stored.placement is Placement.HOST and uses:
            back = Transfer(value, Lane.TO_DEVICE)
            comes[uses[0]] += [Start(back), Wait(back)]
            leaves[uses[-1]].append(Free(value))
    steps: list[Step] = []
    position, boundary = -1, None
    for index, step in enumerate(plain.steps):
        if isinstance(step, Compute):
            position += 1
            steps += leaves[position - 1] + comes[position]
            boundary = len(steps) if index == plain.boundary else boundary
        steps.append(step)
    steps += leaves[position]
    return Schedule(steps, len(steps) if boundary is None else boundary)


def case(seed: int) -> Made:
    """A random step with repeats and moves; every other one has weights on the host."""
    rng = random.Random(seed)
    graph = random_graph(seed, rng.randint(2, 20)) if seed % 3 else random_chain(seed, rng.randint(2, 12))
    graph = streamed(graph, seed) if seed % 2 else graph
    verify(graph)
    order = random_order(graph, seed, forget=rng.choice((0.0, 0.1, 0.3)))
    share = rng.choice((0.2, 0.6, 1.0))
    moves = [interval for interval in idle_intervals(graph, order) if rng.random() < share]
    return graph, order, moves, random_links(graph, seed)


@pytest.mark.parametrize("seed", range(60))
def test_no_worse_than_waiting_for_every_copy(seed: int) -> None:
    """Within what the naive placement needs, and in its time at most; with more room never slower."""
    graph, order, moves, links = case(seed)
    before = simulate(graph, naive(graph, order, moves), links=links)
    for capacity in (0, 500, 2000, 10_000):
        budget = before.peak_nbytes + capacity
        found = simulate(graph, schedule_transfers(graph, order, moves, budget, links), links=links)
        assert found.peak_nbytes <= budget
        assert found.time_s <= before.time_s * (1 + 1e-9)
        assert found.recomputed_s == before.recomputed_s


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_that_cannot_be_kept_is_overstepped_no_further_than_it_must(seed: int) -> None:
    """The schedule comes back valid all the same."""
    graph, order, moves, links = case(seed)
    least = simulate(graph, naive(graph, order, moves), links=links).peak_nbytes
    found = simulate(graph, schedule_transfers(graph, order, moves, least // 2, links), links=links)
    assert found.peak_nbytes <= least


def test_what_memory_never_asks_for_stays() -> None:
    """If everything fits no value is swapped out, and weights are fetched once."""
    for seed in range(20):
        graph, order, moves, links = case(seed)
        schedule = schedule_transfers(graph, order, moves, 10**9, links)
        assert all(step.transfer.lane is Lane.TO_DEVICE for step in schedule.steps if isinstance(step, Start))
        weights = {v for v, value in enumerate(graph.values) if value.placement is Placement.HOST}
        read = {v for op in order for way in graph.ops[op].implementations for v in way.inputs}
        assert len(weights & read) >= sum(isinstance(step, Start) for step in schedule.steps)


def test_gaps_are_where_a_value_waits() -> None:
    """Between uses of one computation of it; not what the caller holds, not what is used again at once."""
    ways = [((), (0,)), ((0,), (1,)), ((1,), (2,)), ((0, 2), (3,))]
    ops = [
        Op(name=f"f{i}", target="f", implementations=[Implementation(inputs=reads, outputs=makes, time_s=1)])
        for i, (reads, makes) in enumerate(ways)
    ]
    graph = Graph(name="small", values=[Value(name=f"v{i}", nbytes=8) for i in range(4)], ops=ops)
    assert [IdleInterval(0, 1, 3)] == idle_intervals(graph, range(4))
    assert [IdleInterval(2, 2, 4)] == idle_intervals(graph, [0, 1, 2, 0, 3])  # 0 is recomputed


def line(nbytes: int = 100) -> tuple[Graph, list[int]]:
    """`a` is computed first and read at the end, with six ops of 4 s and 60 bytes between."""
    names = ["a", *(f"b{i}" for i in range(6)), "end"]
    values = [Value(name=name, nbytes=nbytes if name == "a" else 60) for name in names]
    reads = [(), (), *((i,) for i in range(1, 6)), (0, 6)]
    ops = [
        Op(name=f"f{i}", target="f", implementations=[Implementation(inputs=r, outputs=(i,), time_s=4)])
        for i, r in enumerate(reads)
    ]
    return Graph(name="line", values=values, ops=ops), list(range(8))


def test_copies_run_beside_compute() -> None:
    """Out while nothing needs the room, back as soon as it is there again: no second is lost."""
    graph, order = line()
    values = [*graph.values]
    values[3] = Value(name="b2", nbytes=150)  # 60 + 150 and 150 + 60 have no room for `a`
    graph = Graph(name="bulge", values=values, ops=graph.ops)
    links = Links(to_host_nbytes_per_s=15, to_device_nbytes_per_s=15)
    schedule = schedule_transfers(graph, order, [IdleInterval(0, 0, 7)], 220, links)
    timeline = simulate(graph, schedule, links=links)
    assert 220 == timeline.peak_nbytes
    assert 32.0 == timeline.time_s
    back = schedule.steps.index(Start(Transfer(0, Lane.TO_DEVICE)))
    assert 5 == len([step for step in schedule.steps[:back] if isinstance(step, Compute)])


def test_a_copy_that_comes_too_late_is_waited_for() -> None:
    """10 s and 60 s for copies where 8 s and 8 s are free."""
    graph, order = line()
    values = [*graph.values]
    values[3] = Value(name="b2", nbytes=150)
    graph = Graph(name="bulge", values=values, ops=graph.ops)
    links = Links(to_host_nbytes_per_s=10, to_device_nbytes_per_s=100 / 60)
    timeline = simulate(
        graph, schedule_transfers(graph, order, [IdleInterval(0, 0, 7)], 220, links), links=links
    )
    assert 220 == timeline.peak_nbytes
    assert 4 + 10 + 8 + 60 + 4 == timeline.time_s


def test_weights_are_fetched_ahead_of_their_use() -> None:
    """Two at a time fit: the next one comes while the one before it is used."""
    values = [
        *(Value(name=f"w{i}", nbytes=100, placement="host") for i in range(4)),
        *(Value(name=f"y{i}", nbytes=0) for i in range(8)),
    ]
    use = [*range(4), *reversed(range(4))]
    ops = [
        Op(
            name=f"f{i}",
            target="f",
            backward=i >= 4,
            implementations=[Implementation(inputs=[weight], outputs=[4 + i], time_s=2)],
        )
        for i, weight in enumerate(use)
    ]
    graph = Graph(name="streamed", values=values, ops=ops)
    moves = idle_intervals(graph, range(8))
    links = Links(to_host_nbytes_per_s=50, to_device_nbytes_per_s=50)
    timeline = simulate(graph, schedule_transfers(graph, range(8), moves, 200, links), links=links)
    assert 200 == timeline.peak_nbytes
    assert 2 + 16 == timeline.time_s
    assert 4 * 2 + 2 * 2 == timeline.lane_s[Lane.TO_DEVICE]  # two of them are still there on the way back
    assert 0 == timeline.lane_s[Lane.TO_HOST]
    alone = simulate(graph, schedule_transfers(graph, range(8), moves, 100, links), links=links)
    assert 100 == alone.peak_nbytes
    assert 7 * 2 + 16 == alone.time_s


def swapped(interval: IdleInterval) -> IdleInterval:
    return IdleInterval(interval.value, interval.before, interval.after)


def shorter(interval: IdleInterval) -> IdleInterval:
    return IdleInterval(interval.value, interval.after + 1, interval.before)


@pytest.mark.parametrize("change", [swapped, shorter])
def test_a_move_that_is_no_idle_interval_is_refused(change: Callable[[IdleInterval], IdleInterval]) -> None:
    """By name of the value and its place."""
    graph, order = line()
    move = change(idle_intervals(graph, order)[0])
    with pytest.raises(
        NoIdleInterval, match=f"value 0 cannot be swapped out between runs {move.after} and {move.before}"
    ):
        schedule_transfers(graph, order, [move], 1000, Links())


def test_an_order_that_is_not_valid_is_refused() -> None:
    """By the referee."""
    graph, order = line()
    with pytest.raises(InvalidSchedule):
        schedule_transfers(graph, order[1:], [], 1000, Links())


def test_twice_the_same() -> None:
    """Step by step, whatever order the moves come in."""
    graph, order, moves, links = case(5)
    budget = simulate(graph, naive(graph, order, moves), links=links).peak_nbytes + 500
    assert schedule_transfers(graph, order, moves, budget, links) == schedule_transfers(
        graph, order, moves[::-1], budget, links
    )
