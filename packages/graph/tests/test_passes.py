"""Several forwards and backwards for one step of the optimizer, with gradients accumulated where they are."""

import pytest

from remat_graph import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Grads,
    Graph,
    Implementation,
    InvalidSchedule,
    Lane,
    Links,
    Op,
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
from remat_graph.testing.small_graphs import small_graph
from remat_graph.training import accumulating, with_placement

LINKS = Links(to_host_nbytes_per_s=10, to_device_nbytes_per_s=20, host_nbytes_per_s=40)
W, G, M, M_BACK = (
    Transfer(0, Lane.TO_DEVICE),
    Transfer(3, Lane.TO_HOST),
    Transfer(1, Lane.TO_DEVICE),
    Transfer(1, Lane.TO_HOST),
)
ON_CPU, ON_DEVICE = OptimizerStep(0, Lane.CPU_OPTIMIZER), OptimizerStep(0, Lane.COMPUTE)
FETCH: tuple[Step, ...] = (Start(W), Wait(W), Compute(0))
SEND: tuple[Step, ...] = (Compute(1), Free(0), Start(G), Wait(G), Free(3), ON_CPU)
UPDATED_ON_HOST = Schedule([*FETCH, *SEND, FreeHost(3)], 3)
"""The parameter is fetched, its gradient is copied to the host, and the CPU updates it there."""


def graph(*on_host: int) -> Graph:
    """Forward reads a parameter of 40 bytes, backward makes its gradient; a state of 80, a second each."""
    values = [
        Value(name="w", nbytes=40, role=Role.PARAM, placement=Placement.DEVICE),
        Value(name="m", nbytes=80, role=Role.OPTIMIZER_STATE, placement=Placement.DEVICE, of=0),
        Value(name="y", nbytes=10, role=Role.OUTPUT),
        Value(name="g", nbytes=40, role=Role.GRAD, of=0),
    ]
    ops = [((0,), (2,)), ((0,), (3,))]
    update = Update(param=0, grad=3, states=(1,), device_time_s=2, cpu_time_s=3)
    made = small_graph("passes", values, ops, forward=1, time_s=1, updates=[update])
    return with_placement(made, on_host)


def test_the_optimizer_steps_once() -> None:
    """Three passes of two seconds, and one update of two."""
    schedule = Schedule([Compute(0), Compute(1), ON_DEVICE, Free(3)], 1)
    for passes in (1, 3):
        timeline = simulate(graph(), schedule, passes=passes)
        assert 2.0 * passes + 2.0 == timeline.time_s
    assert 2 * 8.0 == 2 * simulate(graph(), schedule, passes=3, periods=2).time_s


def test_its_own_call_comes_once() -> None:
    """Steps after the end of the schedule run in the last pass only."""
    schedule = Schedule([Compute(0), Compute(1), Deliver(3), ON_DEVICE], 1, 3)
    timeline = simulate(accumulating(graph()), schedule, grads=Grads.ACCUMULATE, passes=4)
    assert 4 * 2.0 + 2.0 == timeline.time_s
    assert 40 + 80 + 40 + 10 + 40 == timeline.peak_nbytes


def test_streamed_states_stay_at_home_until_then() -> None:
    """They pass through the device in the last pass only."""
    steps: list[Step] = [
        Compute(0),
        Compute(1),
        Start(M),
        Wait(M),
        ON_DEVICE,
        Free(3),
        Start(M_BACK),
        Wait(M_BACK),
        Free(1),
    ]
    timeline = simulate(graph(1), Schedule(steps, 1), links=LINKS, passes=3)
    assert {Lane.TO_DEVICE: 4.0, Lane.TO_HOST: 8.0} == {
        lane: timeline.lane_s[lane] for lane in (Lane.TO_DEVICE, Lane.TO_HOST)
    }
    assert 3 * 2.0 + 4.0 + 2.0 + 8.0 == timeline.time_s


def test_adding_on_the_host_takes_the_cpu() -> None:
    """Two gradients are read and one is written; the first pass has none to add to."""
    schedule, whole = UPDATED_ON_HOST, accumulating(graph(0, 1))
    for passes, added in ((1, 1), (2, 1), (4, 3)):
        timeline = simulate(whole, schedule, grads=Grads.ACCUMULATE, links=LINKS, passes=passes)
        assert 3.0 + added * 3 * 40 / 40 == timeline.lane_s[Lane.CPU_OPTIMIZER]
    assert 3.0 == simulate(graph(0, 1), schedule, links=LINKS).lane_s[Lane.CPU_OPTIMIZER]
    free = Links(to_host_nbytes_per_s=10, to_device_nbytes_per_s=20)
    assert 3.0 == simulate(whole, schedule, grads=Grads.ACCUMULATE, links=free).lane_s[Lane.CPU_OPTIMIZER]


def test_gradients_that_the_cpu_has_yet_to_read() -> None:
    """They are on the host while the next forward begins and sends other values there."""
    values = list(graph(0, 1).values)
    schedule = Schedule([*FETCH, *SEND], 3)
    assert 120 + 40 == simulate(graph(0, 1), schedule, links=LINKS, periods=2).host_peak_nbytes
    values.append(Value(name="a", nbytes=30))
    ops = list(graph().ops)
    ops[0] = Op(
        name="f0", target="f", implementations=[Implementation(inputs=(0,), outputs=(2, 4), time_s=1)]
    )
    held = Graph(name="held", values=values, ops=ops, updates=graph().updates)
    away, back = Transfer(4, Lane.TO_HOST), Transfer(4, Lane.TO_DEVICE)
    swaps: list[Step] = [Start(away), Wait(away), Free(4), Start(back), Wait(back), FreeHost(4), Free(4)]
    schedule = Schedule([*FETCH, *swaps, *SEND], 10)
    assert 120 + 40 == simulate(held, schedule, links=LINKS).host_peak_nbytes
    assert 120 + 40 + 30 == simulate(held, schedule, links=LINKS, periods=2).host_peak_nbytes


def test_what_computing_waits_for() -> None:
    """Seconds by lane: two for the fetch of the weight, four for the copy of the gradient."""
    waited_s = simulate(graph(0, 1), UPDATED_ON_HOST, links=LINKS).waited_s
    assert 2.0 == waited_s[Lane.TO_DEVICE]
    assert 4.0 == waited_s[Lane.TO_HOST]
    assert 3.0 == waited_s[Lane.CPU_OPTIMIZER]


def test_a_pass_without_its_gradient_is_refused() -> None:
    """This holds for each pass, not only for the last."""
    with pytest.raises(InvalidSchedule, match="never delivered"):
        simulate(graph(), Schedule([Compute(0), Compute(1)], 1), passes=2)
