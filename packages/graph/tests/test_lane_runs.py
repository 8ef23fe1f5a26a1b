"""The work of the lanes in time is that of the referee's timeline."""

from collections import defaultdict
from itertools import pairwise

import attrs
import pytest

from remat_graph import Compute, Lane, Links, Schedule, simulate
from remat_graph.simulator.lane_runs import lane_runs
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.random_training import random_links


@pytest.mark.parametrize("seed", range(40))
def test_the_runs_are_those_of_the_timeline(seed: int) -> None:
    """The last end is the time of the step, lanes are as busy, and no lane does two things at once."""
    graph = random_graph(seed, forward_ops=1 + seed % 12)
    schedule = Schedule.from_order(graph, random_order(graph, seed))
    schedule = random_moves(graph, schedule, seed, moves=seed % 5)
    links = random_links(graph, seed)
    timeline = simulate(graph, schedule, links=links)
    by_lane = defaultdict(list)
    for run in lane_runs(graph, schedule, links=links):
        by_lane[run.lane].append(run)
    assert timeline.time_s == pytest.approx(max(run.end_s for runs in by_lane.values() for run in runs))
    for lane in Lane:
        runs = by_lane[lane]
        assert timeline.lane_s[lane] == pytest.approx(sum(run.end_s - run.begin_s for run in runs))
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in pairwise(runs))
    computed = [at for at, step in enumerate(schedule.steps) if isinstance(step, Compute)]
    assert computed == [run.step for run in by_lane[Lane.COMPUTE]]


def test_ops_of_no_time_are_there_too() -> None:
    """Without times, each op still has its run."""
    graph = random_graph(2, forward_ops=6)
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(i, time_s=0.0) for i in op.implementations])
        for op in graph.ops
    ]
    schedule = Schedule.unplanned(graph)
    runs = lane_runs(attrs.evolve(graph, ops=ops), schedule)
    assert len(schedule.order) == len(runs)
    assert {(0.0, 0.0)} == {(run.begin_s, run.end_s) for run in runs}


def test_waits_leave_the_compute_lane_idle() -> None:
    """With a slow link, a wait for a copy is a pause between two ops; without moves there is none."""
    graph = random_graph(4, forward_ops=8)
    plain = Schedule.from_order(graph, random_order(graph, 4))
    moved = random_moves(graph, plain, 4, moves=4)
    slow = Links(to_host_nbytes_per_s=1e-3, to_device_nbytes_per_s=1e-3)
    for schedule, pauses in ((plain, False), (moved, True)):
        runs = [run for run in lane_runs(graph, schedule, links=slow) if run.lane is Lane.COMPUTE]
        idle_s = sum(b.begin_s - a.end_s for a, b in pairwise(runs))
        assert pauses is (idle_s > 1.0)
