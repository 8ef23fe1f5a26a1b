"""Optimizer steps run on the device or on the CPU; stale and partly copied values are refused."""

import pytest

from remat_graph import (
    Compute,
    Deliver,
    Free,
    FreeHost,
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
    Transfer,
    Update,
    Value,
    Wait,
    simulate,
)

LINKS = Links(to_host_nbytes_per_s=10, to_device_nbytes_per_s=20)


def graph(placement: Placement) -> Graph:
    """Forward reads a parameter of 40 bytes, backward makes its gradient and reads it again."""
    values = [
        Value(name="w", nbytes=40, role=Role.PARAM, placement=placement),
        Value(name="m", nbytes=80, role=Role.OPTIMIZER_STATE, placement=placement, of=0),
        Value(name="y", nbytes=10, role=Role.OUTPUT),
        Value(name="g", nbytes=40, role=Role.GRAD, of=0),
    ]
    ways = [((0,), (2,), False), ((0,), (3,), True)]
    ops = [
        Op(
            name=f"f{i}",
            target="f",
            backward=b,
            implementations=(Implementation(inputs=r, outputs=m, time_s=1),),
        )
        for i, (r, m, b) in enumerate(ways)
    ]
    update = Update(param=0, grad=3, states=(1,), device_time_s=2, cpu_time_s=30)
    return Graph(name="trained", values=values, ops=ops, updates=(update,))


W, W_BACK, G, M_BACK, M = (
    Transfer(0, Lane.TO_DEVICE),
    Transfer(0, Lane.TO_HOST),
    Transfer(3, Lane.TO_HOST),
    Transfer(1, Lane.TO_HOST),
    Transfer(1, Lane.TO_DEVICE),
)
ON_CPU = OptimizerStep(0, Lane.CPU_OPTIMIZER)
ON_DEVICE = OptimizerStep(0, Lane.COMPUTE)
FETCH = [Start(W), Wait(W)]
STEP = [*FETCH, Compute(0), Compute(1)]


def replay(placement, steps):
    return simulate(graph(placement), Schedule(steps, min(len(steps), steps.index(Compute(1)))), links=LINKS)


def test_an_update_on_the_device():
    """It takes its time on the compute lane; then the gradient may be freed."""
    timeline = replay(Placement.DEVICE, [Compute(0), Compute(1), ON_DEVICE, Free(3)])
    assert 4.0 == timeline.time_s == timeline.lane_s[Lane.COMPUTE]
    assert 40 + 80 + 10 + 40 == timeline.peak_nbytes
    assert 40 + 80 + 10 == timeline.live_nbytes[-1]


def test_an_update_on_the_cpu_overlaps():
    """The gradient is copied, and the CPU updates while the device computes."""
    steps = [*STEP, Start(G), Wait(G), Free(3), ON_CPU, Free(0)]
    timeline = replay(Placement.HOST, steps)
    assert 2 + 2 + 4 + 30 == timeline.time_s  # fetch w, compute, send g, update
    assert 30.0 == timeline.lane_s[Lane.CPU_OPTIMIZER]
    assert 40 + 80 + 40 == timeline.host_peak_nbytes
    assert 40 + 10 + 40 == timeline.peak_nbytes


def test_a_copy_back_waits_for_the_update():
    """The new parameter is copied after the CPU has made it."""
    steps = [*STEP, Start(G), Wait(G), Free(3), ON_CPU, Free(0), *FETCH, Free(0)]
    assert 2 + 2 + 4 + 30 + 2 == replay(Placement.HOST, steps).time_s


def test_the_cpu_waits_for_the_gradient():
    """The update may be queued while the copy of the gradient is pending."""
    steps = [*STEP, Start(G), ON_CPU, Wait(G), Free(3), Free(0)]
    assert 2 + 2 + 4 + 30 == replay(Placement.HOST, steps).time_s


def test_host_bytes_wait_for_the_cpu():
    """A gradient on the host is freed only after the update that reads it."""
    steps = [*STEP, Start(G), Wait(G), Free(3), ON_CPU, FreeHost(3)]
    timeline = replay(Placement.HOST, [*steps, Free(0)])
    assert 38.0 == timeline.time_s
    # What the compute lane does next comes after the update.
    state_first = [*steps, Free(0), Start(W), Wait(W), Free(0)]
    assert 40.0 == replay(Placement.HOST, state_first).time_s


def test_a_stale_device_copy_still_serves_the_step():
    """A repeat after the CPU's update needs the old parameter, which is still on the device."""
    steps = [*STEP, Start(G), Wait(G), Free(3), ON_CPU, Compute(0), Free(0)]
    assert 1.0 == replay(Placement.HOST, steps).recomputed_s


@pytest.mark.parametrize(
    ("placement", "steps", "problem"),
    [
        (
            Placement.DEVICE,
            [Compute(0), Compute(1), ON_DEVICE, Compute(0)],
            "w, which the optimizer has already",
        ),
        (Placement.HOST, [*STEP, Start(G), Wait(G), ON_CPU, Free(0), *FETCH, Compute(0)], "already changed"),
        (Placement.DEVICE, [Compute(0), Compute(1), ON_DEVICE, ON_DEVICE], "w is updated twice"),
        (Placement.DEVICE, [Compute(0), Compute(1), ON_CPU], "needs w on the host"),
        (Placement.HOST, [*STEP, ON_CPU], "needs g on the host"),
        (Placement.HOST, [*STEP, ON_DEVICE], "needs m on the device"),
        (Placement.HOST, [*STEP, Start(M), ON_DEVICE], "reads m while it arrives"),
        (
            Placement.DEVICE,
            [Compute(0), Compute(1), Start(W_BACK), ON_DEVICE],
            "changes w while it is copied",
        ),
        (Placement.HOST, [*STEP, Start(G), Free(0), Start(W), ON_CPU], "changes w while it is copied"),
        (
            Placement.DEVICE,
            [Compute(0), Compute(1), OptimizerStep(3, Lane.COMPUTE)],
            "no optimizer update for g",
        ),
        (Placement.DEVICE, [Compute(0), Compute(1)], "gradient g is never delivered"),
        (Placement.DEVICE, [Compute(0), Compute(1), Start(G), Deliver(3)], "delivered while its transfer"),
        (Placement.HOST, [*STEP, Start(G), Wait(G), Free(3)], "gradient g is never delivered"),
    ],
)
def test_each_mistake_is_named(placement, steps, problem):
    """Races, stale copies and missing steps."""
    with pytest.raises(InvalidSchedule, match=problem):
        replay(placement, steps)


def test_what_persists_ends_at_home_and_up_to_date():
    """A parameter placed on the host is written back after an update on the device."""
    begin = [*STEP, Start(M), Wait(M), ON_DEVICE, Free(3)]
    with pytest.raises(InvalidSchedule, match="w must end up to date on the host"):
        replay(Placement.HOST, [*begin, Free(0), Free(1)])
    write_back = [FreeHost(0), FreeHost(1), Start(W_BACK), Start(M_BACK), Wait(W_BACK), Wait(M_BACK)]
    assert 2 + 2 + 4 + 2 + 4 + 8 == replay(Placement.HOST, [*begin, *write_back, Free(0), Free(1)]).time_s
    with pytest.raises(InvalidSchedule, match="m must end up to date on the host"):
        replay(Placement.HOST, [*begin, *write_back[:1], *write_back[2:3], write_back[4], Free(0), Free(1)])


def test_a_device_copy_that_is_gone_is_missed_at_home():
    """A persistent value is freed without a copy back."""
    with pytest.raises(InvalidSchedule, match="m must end up to date on the device"):
        replay(Placement.DEVICE, [Compute(0), Compute(1), ON_DEVICE, Free(3), Free(1)])


def test_a_delivered_gradient_leaves_the_update_to_the_user():
    """Then the schedule need not contain the updates of the graph."""
    assert 2.0 == replay(Placement.DEVICE, [Compute(0), Compute(1), Deliver(3)]).time_s
