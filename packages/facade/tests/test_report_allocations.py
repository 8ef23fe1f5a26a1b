"""Blocks that are allocated and freed add up to what the referee counts, step by step."""

import pytest

from remat_facade.report.allocations import Cause, allocations
from remat_graph import Grads, Graph, Schedule, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.random_training import random_training


def bytes_by_step(graph: Graph, schedule: Schedule, grads: Grads) -> tuple[list[int], list[int]]:
    """Bytes after each step, and the most of them within it."""
    found = allocations(graph, schedule, grads)
    after, during = [0] * len(schedule.steps), [0] * len(schedule.steps)
    held, events = 0, iter([*found.events, None])
    event = next(events)
    for step in range(-1, len(schedule.steps)):
        highest = held
        while event is not None and event.step == step:
            held += (-1 if event.freed else 1) * found.blocks[event.block].nbytes
            highest = max(highest, held)
            event = next(events)
        if step >= 0:
            after[step], during[step] = held, highest
    return after, during


@pytest.mark.parametrize("grads", [Grads.NEW, Grads.PRESENT])
@pytest.mark.parametrize("seed", range(40))
def test_they_add_up_to_the_referees_bytes(seed: int, grads: Grads) -> None:
    """Repeats, moves, reuses and rounding included."""
    graph = random_graph(seed, forward_ops=1 + seed % 12)
    schedule = Schedule.from_order(graph, random_order(graph, seed))
    schedule = random_moves(graph, schedule, seed, moves=seed % 4)
    timeline = simulate(graph, schedule, grads=grads)
    after, during = bytes_by_step(graph, schedule, grads)
    assert list(timeline.live_nbytes) == after
    assert list(timeline.during_nbytes) == during


def test_persistent_values_come_first() -> None:
    """Parameters and states on the device are there before the first step, and stay."""
    graph = random_training(3, 4)
    found = allocations(graph, Schedule.unplanned(graph))
    first = [found.blocks[event.block] for event in found.events if event.step == -1]
    assert {Cause.PERSISTENT} == {block.cause for block in first}
    placed = sum(graph.allocated_nbytes(v) for v, value in enumerate(graph.values) if value.placement)
    assert placed == sum(block.nbytes for block in first)
