"""Blocks that are allocated and freed add up to what the referee counts, step by step."""

import pytest

from remat_facade.report.allocations import Cause, allocations
from remat_facade.report.chrome_trace import chrome_trace
from remat_graph import Grads, Graph, Links, Plan, Schedule, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.random_training import random_links, random_training
from remat_graph.training import with_placement
from remat_solvers import Problem
from remat_solvers.offload.solver import Offload


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


@pytest.fixture(scope="module", params=range(3))
def training(request: pytest.FixtureRequest) -> tuple[Graph, Schedule, Links]:
    """A training step whose parameters and states move, and are updated on both sides."""
    graph = random_training(request.param, 5)
    links = random_links(graph, request.param)
    held = sum(value.nbytes for value in graph.values if not value.external)
    solution = Offload().solve(Problem(graph, held // 2, links))
    assert solution.schedule is not None
    return with_placement(graph, solution.on_host), solution.schedule, links


@pytest.mark.parametrize("grads", [Grads.NEW, Grads.ACCUMULATE])
def test_steps_of_the_optimizer_add_up_too(training: tuple[Graph, Schedule, Links], grads: Grads) -> None:
    """Parameters that are swapped in, updates with a workspace, gradients that are moved."""
    graph, schedule, _ = training
    timeline = simulate(graph, schedule, grads=grads)
    after, during = bytes_by_step(graph, schedule, grads)
    assert list(timeline.live_nbytes) == after
    assert list(timeline.during_nbytes) == during


def test_the_trace_of_a_training_step_is_as_long_as_the_plan(
    training: tuple[Graph, Schedule, Links],
) -> None:
    """Updates are on a track, and the last event ends with the step."""
    graph, schedule, links = training
    peak = simulate(graph, schedule).peak_nbytes
    plan = Plan.from_schedule(
        graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="offload", links=links
    )
    works = [e for e in chrome_trace(graph, plan)["traceEvents"] if e["ph"] == "X"]
    assert plan.time_s == pytest.approx(max(e["ts"] + e["dur"] for e in works) / 1e6)
    assert len(graph.updates) == sum(e["cat"] == "update" for e in works)
