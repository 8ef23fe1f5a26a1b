"""Transfers run concurrently with compute, each direction on its own lane."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Schedule,
    Start,
    Transfer,
    Value,
    Wait,
    simulate,
)
from remat_graph.testing.random_schedules import random_moves
from remat_graph.testing.strategies import schedules

SLOW = Links(to_host_nbytes_per_s=10, to_device_nbytes_per_s=20)


def graph() -> Graph:
    """`a` (100 bytes, 10 s away, 5 s back) is made, three ops of 4 s follow, and the last reads it."""
    values = [
        Value(name="a", nbytes=100, chunk_of="tensor"),
        *(Value(name=f"b{i}", nbytes=60) for i in range(3)),
        Value(name="end", nbytes=0),
    ]
    ways = [((), (0,)), ((), (1,)), ((1,), (2,)), ((2,), (3,)), ((0, 3), (4,))]
    ops = [
        Op(name=f"f{i}", target="f", implementations=(Implementation(inputs=r, outputs=m, time_s=4),))
        for i, (r, m) in enumerate(ways)
    ]
    return Graph(name="moving", values=values, ops=ops)


AWAY, BACK = Transfer(0, Lane.TO_HOST), Transfer(0, Lane.TO_DEVICE)
MOVED = [
    Compute(0),
    Start(AWAY),  # 4 to 14 s, beside f1 and f2
    Compute(1),
    Compute(2),
    Free(1),
    Wait(AWAY),  # from 12 to 14 s
    Free(0),
    Compute(3),  # to 18 s
    Free(2),
    Start(BACK),  # 18 to 23 s
    Wait(BACK),
    FreeHost(0),
    Compute(4),
    Free(0),
    Free(3),
    Free(4),
]


def replay(steps, links=SLOW):
    return simulate(graph(), Schedule(steps, len(steps)), links=links)


def test_lanes_overlap_and_waits_hold_the_compute_lane():
    """A transfer takes bytes over bandwidth; each lane has its own busy time."""
    timeline = replay(MOVED)
    assert 27.0 == timeline.time_s
    lanes = {Lane.COMPUTE: 20.0, Lane.TO_HOST: 10.0, Lane.TO_DEVICE: 5.0, Lane.CPU_OPTIMIZER: 0.0}
    assert lanes == timeline.lane_s
    assert 0.0 == timeline.recomputed_s


def test_a_fast_link_hides_the_transfers():
    """Then the time is the compute time."""
    links = Links(to_host_nbytes_per_s=1e9, to_device_nbytes_per_s=1e12)
    assert replay(MOVED, links).time_s == pytest.approx(20.0, abs=1e-6)


def test_bytes_are_held_at_both_ends_while_they_move():
    """The source until it is freed, the destination from the start on; the host has its own peak."""
    timeline = replay(MOVED)
    assert 100 == timeline.host_peak_nbytes
    assert 100 + 60 + 60 == timeline.peak_nbytes  # f2, or f3's output while `a` comes back
    at = {repr(step): nbytes for step, nbytes in zip(MOVED, timeline.live_nbytes, strict=True)}
    assert 160 == at[repr(Start(BACK))]
    assert 60 == at[repr(Free(2))]


def test_the_same_lane_takes_one_transfer_after_another():
    """Two copies in one direction run one after the other."""
    other = Transfer(1, Lane.TO_HOST)
    steps = [Compute(0), Compute(1), Start(AWAY), Start(other), Wait(other), Wait(AWAY)]
    steps += [Compute(2), Compute(3), Compute(4)]
    timeline = replay(steps)
    assert 8 + 16 + 12 == timeline.time_s
    assert 160 == timeline.host_peak_nbytes


def test_a_fetch_waits_for_the_copy_that_it_fetches():
    """Lanes of opposite directions are independent, except for the same value."""
    steps = [Compute(0), Compute(1), Compute(2), Compute(3), Start(AWAY), Wait(AWAY), Free(0)]
    steps += [Start(BACK), Wait(BACK), Compute(4)]
    assert 16 + 10 + 5 + 4 == replay(steps).time_s


@pytest.mark.parametrize(
    ("steps", "step", "problem"),
    [
        ([Compute(0), Start(AWAY), Free(0)], 2, "a is freed while its transfer is pending"),
        ([Compute(0), Start(AWAY), Start(AWAY)], 2, "a has a pending transfer in that direction already"),
        ([Compute(0), Wait(AWAY)], 1, "a wait for a, which has no pending transfer"),
        ([Start(AWAY)], 0, "not there"),
        ([Compute(0), Start(BACK)], 1, "not there"),
        ([Compute(0), Start(AWAY), Wait(AWAY), Start(BACK)], 3, "on the device already"),
        ([Compute(0), Start(AWAY), Wait(AWAY), Start(AWAY)], 3, "has a host copy already"),
        ([Compute(0), Start(AWAY), FreeHost(0)], 2, "on the host while its transfer is pending"),
        ([Compute(0), FreeHost(0)], 1, "freed on the host but is not there"),
        ([*MOVED[:8], Compute(4)], 8, "f4 reads a, which is not live"),
        ([*MOVED[:10], Compute(4)], 10, "f4 reads a, whose transfer was not waited for"),
        ([*MOVED[:10], Free(0)], 10, "a is freed while its transfer is pending"),
        ([*MOVED[:10], FreeHost(0)], 10, "on the host while its transfer is pending"),
        ([*MOVED[:10], Start(AWAY)], 10, "while it arrives"),
        (
            [*MOVED[:8], Start(BACK), Wait(BACK), Compute(4), Start(Transfer(4, Lane.TO_HOST))],
            12,
            "never waited",
        ),
    ],
)
def test_each_race_is_named(steps, step, problem):
    """A value with a pending transfer may not be freed or changed."""
    with pytest.raises(InvalidSchedule, match=problem) as caught:
        replay(steps)
    assert step == caught.value.step


def test_a_transfer_has_two_directions():
    """Compute is not a direction."""
    with pytest.raises(ValueError, match="lane"):
        Transfer(0, Lane.COMPUTE)


def test_one_chunk_of_a_tensor_moves_by_itself():
    """The other chunk stays."""
    values = [Value(name=f"part{i}", nbytes=50, chunk_of="whole") for i in range(2)]
    values.append(Value(name="end", nbytes=0))
    ways = [((), (0, 1)), ((0, 1), (2,))]
    ops = [
        Op(name=f"f{i}", target="f", implementations=(Implementation(inputs=r, outputs=m),))
        for i, (r, m) in enumerate(ways)
    ]
    chunks = Graph(name="chunks", values=values, ops=ops)
    steps = [Compute(0), Start(AWAY), Wait(AWAY), Free(0), Start(BACK), Wait(BACK), Compute(1)]
    timeline = simulate(chunks, Schedule(steps, 7), links=SLOW)
    assert (50, 50) == (timeline.host_peak_nbytes, timeline.live_nbytes[3])


@settings(deadline=None)
@given(schedules(), st.integers(0, 2**32 - 1))
def test_moving_changes_no_compute(case, seed):
    """Swaps keep a schedule valid and its compute time unchanged, and count host bytes."""
    graph, schedule = case
    moved = random_moves(graph, schedule, seed)
    before, after = simulate(graph, schedule), simulate(graph, moved)
    assert schedule.order == moved.order
    assert before.lane_s[Lane.COMPUTE] == after.lane_s[Lane.COMPUTE]
    assert before.time_s <= after.time_s
    assert before.live_nbytes[-1:] == after.live_nbytes[-1:]
    moved_nbytes = sum(graph.values[s.transfer.value].nbytes for s in moved.steps if isinstance(s, Start))
    assert after.host_peak_nbytes <= moved_nbytes / 2
