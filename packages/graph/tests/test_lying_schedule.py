"""The simulation refuses every wrong schedule; it trusts no step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Graph,
    Implementation,
    InvalidSchedule,
    Lane,
    Op,
    OptimizerStep,
    Schedule,
    Start,
    Transfer,
    Value,
    Wait,
    simulate,
)
from remat_graph.testing.strategies import schedules


@settings(deadline=None, max_examples=150)
@given(schedules(), st.data())
def test_a_missing_compute_is_caught(case, data):
    """Without any one run, some value is unread, some free fails, or an op never runs."""
    graph, schedule = case
    runs = [i for i, step in enumerate(schedule.steps) if isinstance(step, Compute)]
    position = data.draw(st.sampled_from(runs))
    run = schedule.steps[position]
    way = graph.ops[run.op].implementations[run.implementation]
    again = run in schedule.steps[:position] or run.op in [
        c.op for c in schedule.steps[:position:] if isinstance(c, Compute)
    ]
    made = [v for v in way.outputs if not graph.values[v].external and not graph.values[v].pinned]
    steps = schedule.steps[:position] + schedule.steps[position + 1 :]
    boundary = schedule.boundary - (position < schedule.boundary)
    if again and not made:
        return  # the repeat made nothing that anything could miss
    with pytest.raises(InvalidSchedule):
        simulate(graph, Schedule(steps, boundary))


@settings(deadline=None, max_examples=150)
@given(schedules(), st.data())
def test_a_free_that_comes_too_early_is_caught(case, data):
    """A value is freed right before its last reader."""
    graph, schedule = case
    steps = list(schedule.steps)
    reads = [
        (i, free)
        for i, step in enumerate(steps)
        if isinstance(step, Compute)
        for free in _frees_after(steps, i)
        if free.value in graph.ops[step.op].implementations[step.implementation].inputs
    ]
    if not reads:
        return
    position, free = data.draw(st.sampled_from(reads))
    steps.remove(free) if steps.count(free) == 1 else steps.pop(steps.index(free, position))
    steps.insert(position, free)
    with pytest.raises(InvalidSchedule, match=r"is not live|freed but not live"):
        simulate(graph, Schedule(steps, schedule.boundary))


def _frees_after(steps, position):
    frees = []
    for step in steps[position + 1 :]:
        if not isinstance(step, Free):
            break
        frees.append(step)
    return frees


def pair() -> Graph:
    ops = [
        Op(name="make", target="f", implementations=(Implementation(inputs=(), outputs=(0,)),)),
        Op(name="use", target="f", implementations=(Implementation(inputs=(0,), outputs=(1,)),)),
        Op(
            name="back",
            target="f",
            backward=True,
            implementations=(Implementation(inputs=(1,), outputs=(2,)),),
        ),
    ]
    values = [Value(name="a", nbytes=4), Value(name="b", nbytes=4), Value(name="g", nbytes=4, role="grad")]
    return Graph(name="pair", values=values, ops=ops)


GOOD = [Compute(0), Compute(1), Free(0), Compute(2), Free(1), Deliver(2)]


def test_the_good_one_is_good():
    """The cases below change this schedule."""
    simulate(pair(), Schedule(GOOD, 3))


@pytest.mark.parametrize(
    ("steps", "boundary", "step", "problem"),
    [
        ([*GOOD[:2], Compute(1), *GOOD[2:]], 4, 2, "use makes b, which is still live"),
        ([Compute(1), *GOOD], 4, 0, "use reads a, which is not live"),
        (GOOD[:3], 3, 3, "back never runs"),
        (GOOD[:5], 3, 5, "gradient g is never delivered"),
        ([*GOOD, Deliver(2)], 3, 6, "not a live gradient"),
        ([*GOOD[:4], Deliver(1), *GOOD[4:]], 3, 4, "not a live gradient"),
        ([*GOOD[:5], Free(2)], 3, 5, "freed before it is delivered"),
        ([*GOOD, Free(1)], 3, 6, "b is freed but not live"),
        ([*GOOD, Free(9)], 3, 6, "no value 9"),
        ([*GOOD, Free(-1)], 3, 6, "no value -1"),
        ([*GOOD, Deliver(9)], 3, 6, "no value 9"),
        ([*GOOD, FreeHost(9)], 3, 6, "no value 9"),
        ([*GOOD, Start(Transfer(9, Lane.TO_HOST))], 3, 6, "no value 9"),
        ([*GOOD, Wait(Transfer(9, Lane.TO_HOST))], 3, 6, "no value 9"),
        ([*GOOD, OptimizerStep(9, Lane.COMPUTE)], 3, 6, "no value 9"),
        ([*GOOD, Compute(9)], 3, 6, "no op 9"),
        ([*GOOD, Compute(-1)], 3, 6, "no op -1"),
        ([*GOOD, Compute(0, 1)], 3, 6, "no implementation 1"),
        ([*GOOD, "free 1"], 3, 6, "is not a step"),
        (GOOD, 1, 1, "runs first after the boundary"),
        (GOOD, 7, 0, "boundary 7 lies outside"),
        (GOOD, -1, 0, "boundary -1 lies outside"),
    ],
)
def test_each_lie_is_named_with_its_step(steps, boundary, step, problem):
    """The error says which step cannot be carried out, and why."""
    with pytest.raises(InvalidSchedule, match=problem) as caught:
        simulate(pair(), Schedule(steps, boundary))
    assert step == caught.value.step
    assert "\n" not in str(caught.value)
