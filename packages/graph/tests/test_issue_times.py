"""A step takes the longer of its lanes and of the host's issuing; plans and files say so."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from remat_graph import (
    Graph,
    Measured,
    OpCost,
    Plan,
    Schedule,
    load_graph,
    load_plan,
    load_platform,
    save_graph,
    save_plan,
    save_platform,
    simulate,
    with_platform,
)
from remat_graph.platforms.base import Flops
from remat_graph.platforms.measured import Measurement
from remat_graph.serialization.graphs import graph_to_data
from remat_graph.serialization.plans import plan_to_data
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order


def issued(issue_s: float, graph: Graph | None = None) -> Graph:
    """A graph whose ops each need the same time of the host."""
    graph = random_graph(4) if graph is None else graph
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(r, issue_s=issue_s) for r in op.implementations])
        for op in graph.ops
    ]
    return attrs.evolve(graph, ops=ops)


SCHEDULE = Schedule.from_order(random_graph(4), random_order(random_graph(4), 1))
RUNS = len(SCHEDULE.order)


def plan_of(graph: Graph) -> Plan:
    """The plan of one schedule that repeats ops."""
    peak_nbytes = simulate(graph, SCHEDULE).peak_nbytes
    return Plan.from_schedule(
        graph, SCHEDULE, budget_nbytes=peak_nbytes, lower_bound_s=graph.time_s, solver="tester"
    )


def test_the_schedule_repeats_ops() -> None:
    """Or the tests below would not see that repeats are issued too."""
    assert RUNS > len(random_graph(4).ops)


def test_the_longer_sum_is_the_step() -> None:
    """All runs count, repeats included; recomputation and its bound stay those of the ops' own time."""
    plain = plan_of(random_graph(4))
    for issue_s in (0.0, 1e-9, 0.9 * plain.time_s / RUNS, 3 * plain.time_s / RUNS, 1e3):
        plan = plan_of(issued(issue_s))
        assert plan.issue_s == pytest.approx(RUNS * issue_s)
        assert plan.time_s == pytest.approx(max(plain.time_s, RUNS * issue_s))
        assert plan.noremat_issue_s == pytest.approx(len(random_graph(4).ops) * issue_s)
        assert plan.noremat_step_s == max(plain.noremat_time_s, plan.noremat_issue_s)
        same = ("overhead", "lower_bound_overhead", "gap", "recomputed_s", "lower_bound_s", "noremat_time_s")
        assert [getattr(plain, name) for name in same] == [getattr(plan, name) for name in same]


def test_a_launch_bound_plan_says_so() -> None:
    """One line with the share of the step in which the device waits; none where the device is the longer."""
    plain = plan_of(random_graph(4))
    assert "launch-bound" not in plain.summary()
    assert "launch-bound" not in plan_of(issued(0.9 * plain.time_s / RUNS)).summary()
    plan = plan_of(issued(4 * plain.time_s / RUNS))
    assert plan.waits_for_host == pytest.approx(0.75)
    (line,) = [line for line in plan.summary().splitlines() if "launch-bound" in line]
    assert "75% of the step; CUDA graphs or larger batches help" in line


def test_lanes_that_take_longest_are_no_launches() -> None:
    """A step that waits for copies is not helped by CUDA graphs."""
    plan = plan_of(issued(4 * plan_of(random_graph(4)).time_s / RUNS))
    assert attrs.evolve(plan, time_s=2 * plan.issue_s).waits_for_host == 0.0


def test_files(tmp_path: Path) -> None:
    """Graphs and plans with times of issuing come back; without, their files have no such key."""
    graph = issued(1e-3)
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").ops == graph.ops
    save_plan(plan_of(graph), tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan_of(graph) == load_plan(tmp_path / "plan.json", graph)
    assert "issue_s" not in str(graph_to_data(random_graph(4)))
    assert "issue_s" not in str(plan_to_data(plan_of(random_graph(4))))


def test_a_plan_on_a_graph_that_is_issued_otherwise(tmp_path: Path) -> None:
    """The referee takes the times of the graph; the bound stays valid, since it is of the ops' own time."""
    save_plan(plan_of(issued(1e3)), tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", random_graph(4)) == plan_of(random_graph(4))


def test_platforms(tmp_path: Path) -> None:
    """A measured device gives times of issuing, the median for unknown operators; a platform need not."""
    costs = [OpCost(flops=1.0, read_nbytes=8, written_nbytes=8, key=f"mm({size})") for size in range(3)]
    device = Measured(
        device="abacus",
        date="2026-11-23",
        measurements=[
            Measurement(cost=cost, time_s=1e-5, workspace_nbytes=0, issue_s=1e-6 * i)
            for i, cost in enumerate(costs)
        ],
    )
    save_platform(device, tmp_path / "platform.json")
    read = load_platform(tmp_path / "platform.json")
    assert [0.0, 1e-6, 2e-6] == [read.issue_s(cost) for cost in costs]
    assert 1e-6 == read.issue_s(OpCost(flops=1.0, key="mm(7)"))
    assert 0.0 == Measured(device="none", date="2026-11-23", measurements=[]).issue_s(costs[0])
    graph = issued(7.0)
    on_device = with_platform(graph, {(0, 0): costs[2]}, read)
    assert (2e-6, 7.0) == (on_device.ops[0].first.issue_s, on_device.ops[1].first.issue_s)
    assert 0.0 == with_platform(graph, {(0, 0): costs[2]}, Flops()).ops[0].first.issue_s
