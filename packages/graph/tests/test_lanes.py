"""Lanes slow each other through links and memory, and pending work continues during the next step."""

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import (
    Compute,
    Free,
    Graph,
    Lane,
    Links,
    OptimizerStep,
    Placement,
    Role,
    Schedule,
    Start,
    Step,
    Transfer,
    Update,
    Value,
    Wait,
    simulate,
)
from remat_graph.simulator.lanes import LaneJob, finish_times
from remat_graph.testing.small_graphs import small_graph

OUT, BACK, CPU, COMPUTE = Lane.TO_HOST, Lane.TO_DEVICE, Lane.CPU_OPTIMIZER, Lane.COMPUTE


def test_two_directions_share_a_link() -> None:
    """Both run at half speed while both are busy; then the other one runs at full speed."""
    links = Links(
        to_host_nbytes_per_s=10,
        to_device_nbytes_per_s=10,
        to_host_duplex_nbytes_per_s=5,
        to_device_duplex_nbytes_per_s=5,
    )
    assert [4.0, 6.0] == finish_times([LaneJob(OUT, 2.0), LaneJob(BACK, 4.0)], links)


def test_copies_take_the_optimizers_memory() -> None:
    """One direction takes a quarter of the host's bandwidth, two take half of it."""
    links = Links(to_host_nbytes_per_s=25, to_device_nbytes_per_s=25, host_nbytes_per_s=100)
    assert [3.0, 4.0] == finish_times([LaneJob(OUT, 3.0), LaneJob(CPU, 3.25)], links)
    assert [2.0, 2.0, 2.0] == finish_times([LaneJob(OUT, 2.0), LaneJob(BACK, 2.0), LaneJob(CPU, 1.0)], links)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Lane)), st.integers(0, 8), st.sets(st.integers(0, 30), max_size=3)),
        max_size=30,
    )
)
def test_without_contention_each_job_begins_when_it_can(drawn: list[Any]) -> None:
    """Compared with the recursion: after the last job of its lane and after its dependencies."""
    jobs = [
        LaneJob(lane, eighths / 8, tuple(sorted(a for a in after if a < place)))
        for place, (lane, eighths, after) in enumerate(drawn)
    ]
    ends: list[float] = []
    last = dict.fromkeys(Lane, 0.0)
    for job in jobs:
        begin = max([last[job.lane], *(ends[a] for a in job.after)])
        ends.append(begin + job.alone_s)
        last[job.lane] = ends[-1]
    assert ends == pytest.approx(finish_times(jobs, Links()))


def streaming(compute_s: int, update_s: int) -> tuple[Graph, Schedule]:
    """A weight is fetched, used forward and backward, its gradient is copied, and the CPU updates it."""
    values = [
        Value(name="w", nbytes=10, role=Role.PARAM, placement=Placement.HOST),
        Value(name="y", nbytes=1, role=Role.OUTPUT),
        Value(name="g", nbytes=10, role=Role.GRAD, of=0),
    ]
    ops, updates = [((0,), (1,)), ((0,), (2,))], [Update(param=0, grad=2, cpu_time_s=update_s)]
    graph = small_graph("s", values, ops, forward=1, time_s=compute_s / 2, updates=updates)
    fetch, send = Transfer(0, BACK), Transfer(2, OUT)
    steps: list[Step] = [
        Start(fetch),
        Wait(fetch),
        Compute(0),
        Compute(1),
        Free(0),
        Start(send),
        Wait(send),
        Free(2),
    ]
    return graph, Schedule([*steps, OptimizerStep(0, CPU)], 3)


def test_what_a_step_leaves_goes_on_beside_the_next() -> None:
    """The next fetch of the weight waits for its update; other work continues."""
    graph, schedule = streaming(compute_s=6, update_s=4)
    links = Links(to_host_nbytes_per_s=10, to_device_nbytes_per_s=10)
    once = simulate(graph, schedule, links=links)
    assert 1 + 6 + 1 + 4 == once.time_s
    again = simulate(graph, schedule, links=links, periods=4)
    assert 1 + 6 + 1 + 4 == again.time_s  # one weight: nothing to hide behind
    assert {COMPUTE: 6.0, OUT: 1.0, BACK: 1.0, CPU: 4.0} == again.lane_s
    assert once.peak_nbytes == again.peak_nbytes


@pytest.mark.parametrize("rate", [0.0, -1.0, 5e-324, 1e-13, 2e18, float("inf"), float("nan")])
def test_bandwidths_that_nothing_has(rate: float) -> None:
    """The seconds of a copy over them could not be added to others."""
    for field in attrs.fields(Links):
        if field.name == "start_s":
            continue
        with pytest.raises(ValueError, match=field.name):
            Links(**{field.name: rate})


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_copy_that_takes_no_time_to_start(seconds: float) -> None:
    with pytest.raises(ValueError, match="start_s"):
        Links(start_s=seconds)


def test_the_host_starts_copies_while_the_device_computes() -> None:
    """In the optimizer's call the device has nothing else to do, so each copy there takes the host's time."""
    values = [
        Value(name="w", nbytes=10, role=Role.PARAM, placement=Placement.DEVICE),
        Value(name="m", nbytes=10, role=Role.OPTIMIZER_STATE, of=0, placement=Placement.HOST),
        Value(name="y", nbytes=1, role=Role.OUTPUT),
        Value(name="g", nbytes=10, role=Role.GRAD, of=0),
    ]
    update = Update(param=0, grad=3, states=(1,), device_time_s=2.0, cpu_time_s=9.0)
    ops = [((0,), (2,)), ((0,), (3,))]
    graph = small_graph("s", values, ops, forward=1, time_s=4.0, updates=[update])
    fetch, send = Transfer(1, BACK), Transfer(1, OUT)
    fetched: list[Step] = [Start(fetch), Wait(fetch)]
    updated: list[Step] = [OptimizerStep(0, COMPUTE), Start(send), Wait(send), Free(1)]
    late = Schedule([Compute(0), Compute(1), *fetched, *updated], 1, 2)
    early = Schedule([*fetched, Compute(0), Compute(1), *updated], 3, 4)
    rates = {"to_host_nbytes_per_s": 10, "to_device_nbytes_per_s": 10}
    for schedule, copies in ((late, 2), (early, 1)):
        at_once = simulate(graph, schedule, links=Links(**rates))
        assert at_once.time_s == 1 + 8 + 2 + 1
        started = simulate(graph, schedule, links=Links(**rates, start_s=0.25))
        assert started.time_s == at_once.time_s + 0.25 * copies
        assert started.lane_s == at_once.lane_s
