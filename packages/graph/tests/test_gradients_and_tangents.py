"""Tangents become live at the boundary; delivered gradients stay counted or are freed."""

import pytest
from hypothesis import given, settings

from remat_graph import (
    Compute,
    Deliver,
    Grads,
    Graph,
    Implementation,
    InvalidSchedule,
    Op,
    Role,
    Schedule,
    Value,
    simulate,
)
from remat_graph.testing.small_graphs import small_graph
from remat_graph.testing.strategies import schedules


def step() -> Graph:
    """One parameter used twice in the backward: y = f(x), g = back(t), and late reads the parameter again."""
    values = [
        Value(name="w", nbytes=100, external=True, role=Role.PARAM),
        Value(name="y", nbytes=7, role=Role.OUTPUT),
        Value(name="t", nbytes=7, role=Role.TANGENT, of=1),
        Value(name="g", nbytes=100, role=Role.GRAD, of=0),
        Value(name="h", nbytes=100, role=Role.GRAD),
    ]
    ops = [((0,), (1,)), ((2,), (3,)), ((0, 2), (4,))]
    return small_graph("step", values, ops, names=("f", "back", "late"), forward=1)


def test_tangents_come_at_the_boundary_and_outputs_stay() -> None:
    """Both are counted; outputs stay until the end."""
    schedule = Schedule.from_order(step(), range(3))
    timeline = simulate(step(), schedule)
    assert 1 == schedule.boundary
    assert 7 == timeline.live_nbytes[0]
    assert 7 + 7 + 200 == timeline.peak_nbytes
    assert 7 + 200 == timeline.live_nbytes[-1]


def test_a_gradient_waits_for_the_last_reader_of_its_parameter() -> None:
    """An optimizer in a hook may change the parameter as soon as the gradient is delivered."""
    steps = Schedule.from_order(step(), range(3)).steps
    assert steps.index(Compute(2)) < steps.index(Deliver(3))


def test_accumulating_frees_what_is_delivered() -> None:
    """If `.grad` exists already, a delivered gradient is freed."""
    steps = [Compute(0), Compute(1), Deliver(3), Compute(2), Deliver(4)]
    assert 7 + 7 + 200 == simulate(step(), Schedule(steps, 1)).peak_nbytes
    assert 7 + 7 + 100 == simulate(step(), Schedule(steps, 1), grads=Grads.ACCUMULATE).peak_nbytes


def test_gradients_of_inputs_stay_where_those_of_parameters_are_added() -> None:
    """A hidden tensor has no `.grad` to add to; whoever made it gets its gradient."""
    steps = [Compute(0), Compute(1), Deliver(3), Compute(2), Deliver(4)]
    timeline = simulate(step(), Schedule(steps, 1), grads=Grads.PRESENT)
    assert 7 + 7 + 100 == timeline.peak_nbytes
    assert 7 + 7 + 100 == timeline.live_nbytes[-1]


def test_a_delivered_gradient_cannot_be_read() -> None:
    """It belongs to autograd from then on."""
    reader = Op(
        name="reader",
        target="f",
        backward=True,
        implementations=(Implementation(inputs=(3,), outputs=(5,)),),
    )
    values = [*step().values, Value(name="norm", nbytes=4)]
    graph = Graph(name="clip", values=values, ops=[*step().ops, reader])
    simulate(graph, Schedule.from_order(graph, range(4)))
    steps = [Compute(0), Compute(1), Deliver(3), Compute(2), Deliver(4), Compute(3)]
    with pytest.raises(InvalidSchedule, match="g, which was delivered"):
        simulate(graph, Schedule(steps, 1))


def test_an_op_that_reads_a_tangent_waits_for_the_boundary() -> None:
    """Before the boundary the tangent is not live."""
    with pytest.raises(InvalidSchedule, match="t, which is not live"):
        simulate(step(), Schedule([Compute(0), Compute(1), Compute(2), Deliver(3), Deliver(4)], 5))


def test_a_repeat_makes_a_second_copy_of_a_pinned_value() -> None:
    """The copy is counted while the op runs, and freed then."""
    order = [0, 1, 2, 1]
    timeline = simulate(step(), Schedule.from_order(step(), order))
    assert 7 + 7 + 200 + 100 == timeline.peak_nbytes
    assert 7 + 200 == timeline.live_nbytes[-1]


@settings(deadline=None)
@given(schedules())
def test_accumulating_never_needs_more(case: tuple[Graph, Schedule]) -> None:
    """So a plan for `.grad` None is valid for both states."""
    graph, schedule = case
    new = simulate(graph, schedule)
    accumulate = simulate(graph, schedule, grads=Grads.ACCUMULATE)
    present = simulate(graph, schedule, grads=Grads.PRESENT)
    assert accumulate.peak_nbytes <= present.peak_nbytes <= new.peak_nbytes
    assert accumulate.time_s == present.time_s == new.time_s
