"""Two implementations are tied by their inputs: a backward reads what only its forward makes."""

import pytest

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Graph,
    Implementation,
    InvalidSchedule,
    Op,
    Schedule,
    Value,
    simulate,
)


def relu() -> Graph:
    """Implementation 0 keeps the input for the backward, 1 keeps a packed mask and is slower."""
    values = [
        Value(name="x", nbytes=800),
        Value(name="y", nbytes=800, role="output"),
        Value(name="mask", nbytes=25),
        Value(name="t", nbytes=800, role="tangent", of=1),
        Value(name="g", nbytes=800, role="grad"),
    ]
    make = Implementation(inputs=(), outputs=(0,), time_s=1)
    forward = (
        Implementation(inputs=(0,), outputs=(1,), time_s=1),
        Implementation(inputs=(0,), outputs=(1, 2), time_s=2),
    )
    backward = (
        Implementation(inputs=(0, 3), outputs=(4,), time_s=1),
        Implementation(inputs=(2, 3), outputs=(4,), time_s=1, workspace_nbytes=3),
    )
    ops = [
        Op(name="make", target="f", implementations=(make,)),
        Op(name="relu", target="relu", implementations=forward, rerun=1),
        Op(name="relu_backward", target="relu_backward", implementations=backward, backward=True),
    ]
    return Graph(name="relu", values=values, ops=ops)


def test_the_mask_lets_the_input_go():
    """Implementation 1 on both sides holds 25 bytes instead of 800 across the boundary."""
    plain = Schedule.from_order(relu(), range(3))
    masked = [Compute(0), Compute(1, 1), Free(0), Compute(2, 1), Free(2), Free(3), Deliver(4)]
    assert 4 * 800 == simulate(relu(), plain).peak_nbytes
    timeline = simulate(relu(), Schedule(masked, 3))
    assert 3 * 800 + 25 + 3 == timeline.peak_nbytes
    assert (4.0, 0.0) == (timeline.time_s, timeline.recomputed_s)


def test_ways_do_not_mix():
    """A backward that reads the mask needs the forward that makes it."""
    steps = [Compute(0), Compute(1, 0), Compute(2, 1)]
    with pytest.raises(InvalidSchedule, match="relu_backward reads mask, which is not live"):
        simulate(relu(), Schedule(steps, 2))


def test_a_repeat_uses_the_way_for_repeats():
    """Here it is the one with the mask, and its time counts as recomputed."""
    steps = [Compute(0), Compute(1), Compute(1, 1), Free(0), Compute(2, 1), Free(2), Free(3), Deliver(4)]
    assert 2.0 == simulate(relu(), Schedule(steps, 4)).recomputed_s
    steps[2] = Compute(1, 0)
    with pytest.raises(InvalidSchedule, match="relu repeats implementation 0; only 1 may repeat"):
        simulate(relu(), Schedule(steps, 4))
