"""An output takes over the storage of an input that is freed directly after the op."""

import pytest

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Graph,
    Implementation,
    InvalidGraph,
    InvalidSchedule,
    Op,
    Schedule,
    Value,
    simulate,
    verify,
)


def chain(length: int = 4, **last: object) -> Graph:
    """v0 -> v1 -> ..., each in the storage of the one before."""
    values = [Value(name=f"v{i}", nbytes=100) for i in range(length - 1)]
    values.append(Value(name=f"v{length - 1}", **({"nbytes": 100} | last)))
    ways = [Implementation(inputs=(), outputs=(0,))] + [
        Implementation(inputs=(i - 1,), outputs=(i,), reuses=((i, i - 1),)) for i in range(1, length)
    ]
    ops = [Op(name=f"f{i}", target="f", implementations=(way,)) for i, way in enumerate(ways)]
    return Graph(name="chain", values=values, ops=ops)


def test_a_chain_of_reuses_holds_one_storage():
    """At any length; nothing is held at the end."""
    graph = chain(6)
    timeline = simulate(graph, Schedule.from_order(graph, range(6)))
    assert (100, 100) == (timeline.peak_nbytes, timeline.live_peak_nbytes)
    assert 0 == timeline.live_nbytes[-1]


def test_an_input_that_lives_on_is_not_taken_over():
    """The free must follow directly after the op."""
    graph = chain(3)
    late = [Compute(0), Compute(1), Compute(2), Free(0), Free(1), Free(2)]  # v0 lives on, v1 dies in op 2
    assert 200 == simulate(graph, Schedule(late, 6)).peak_nbytes
    between = [Compute(0), Compute(1), Free(0), Compute(2), Free(2), Free(1)]
    assert 100 == simulate(graph, Schedule(between, 6)).peak_nbytes


def test_an_output_is_not_taken_over():
    """The caller holds it, so it is never freed."""
    values = [Value(name="y", nbytes=100, role="output"), Value(name="z", nbytes=100)]
    graph = Graph(name="held", values=values, ops=chain(2).ops)
    assert 200 == simulate(graph, Schedule.from_order(graph, range(2))).peak_nbytes
    with pytest.raises(InvalidSchedule, match="the caller holds it"):
        simulate(graph, Schedule([Compute(0), Compute(1), Free(0), Free(1)], 4))


def test_a_pinned_value_may_take_over_and_then_stays():
    """A gradient in the storage of its input needs no more bytes until the end."""
    graph = chain(3, role="grad")
    timeline = simulate(graph, Schedule.from_order(graph, range(3)))
    assert 100 == timeline.peak_nbytes
    assert 100 == timeline.live_nbytes[-1]


def test_an_external_value_is_not_taken_over():
    """The caller owns it."""
    values = [Value(name="x", nbytes=100, external=True), Value(name="y", nbytes=100)]
    way = Implementation(inputs=(0,), outputs=(1,), reuses=((1, 0),))
    graph = Graph(name="lent", values=values, ops=[Op(name="f", target="f", implementations=(way,))])
    verify(graph)
    assert 100 == simulate(graph, Schedule.from_order(graph, [0])).peak_nbytes


def test_one_input_serves_one_output():
    """Two outputs cannot both have the storage."""
    values = [Value(name=n, nbytes=100) for n in "abc"]
    ways = [
        Implementation(inputs=(), outputs=(0,)),
        Implementation(inputs=(0,), outputs=(1, 2), reuses=((1, 0), (2, 0))),
    ]
    ops = [Op(name=f"f{i}", target="f", implementations=(way,)) for i, way in enumerate(ways)]
    graph = Graph(name="twins", values=values, ops=ops)
    assert 200 == simulate(graph, Schedule.from_order(graph, range(2))).peak_nbytes


def test_a_taken_storage_can_be_computed_anew():
    """The value can be recomputed into a new storage."""
    graph = chain(3)
    timeline = simulate(graph, Schedule.from_order(graph, [0, 1, 0, 1, 2]))
    assert 100 == timeline.peak_nbytes
    assert 0 == timeline.live_nbytes[-1]


def test_sizes_must_match():
    """A storage of another size cannot be taken over."""
    with pytest.raises(InvalidGraph, match="another size"):
        verify(chain(3, nbytes=101))


def test_a_delivered_gradient_is_a_copy_of_nothing():
    """A gradient that took a storage over keeps that storage when it is delivered."""
    graph = chain(2, role="grad")
    steps = [Compute(0), Compute(1), Free(0), Deliver(1)]
    assert (100,) * 4 == simulate(graph, Schedule(steps, 4)).live_nbytes
