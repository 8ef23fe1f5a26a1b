"""Each rule of the IR, broken once."""

import attrs
import pytest
from hypothesis import given, settings

from remat_graph import Graph, Implementation, InvalidGraph, Op, Role, Update, Value, verify
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.strategies import graphs, schedules


@settings(deadline=None)
@given(graphs())
def test_random_graphs_are_well_formed(graph):
    """Every other test relies on this."""
    verify(graph)


@settings(deadline=None, max_examples=30)
@given(schedules())
def test_a_schedule_is_verified_too(case):
    """It is simulated."""
    graph, schedule = case
    verify(graph, schedule)
    assert random_order(graph, 0) == random_order(graph, 0)


def op(name, *ways, **options):
    made = [
        Implementation(inputs=way[0], outputs=way[1], reuses=way[2] if len(way) > 2 else ()) for way in ways
    ]
    return Op(name=name, target="f", implementations=made, **options)


V = [Value(name=n, nbytes=8) for n in "abcd"]
TANGENT = Value(name="t", nbytes=8, role=Role.TANGENT)
GRAD = Value(name="g", nbytes=8, role=Role.GRAD)
HOME = Value(name="h", nbytes=8, placement="device")
OLD = Value(name="old", nbytes=8, external=True)
NEW = Value(name="new", nbytes=8, external=True, replaces=0)
MAKE = op("make", ((), (0,)))


@pytest.mark.parametrize(
    ("values", "ops", "updates", "problem"),
    [
        ([V[0], V[0]], [], (), "two values have this name"),
        (V, [MAKE, MAKE], (), "two ops have this name"),
        ([attrs.evolve(V[0], of=5)], [], (), "refers to value 5 of 1"),
        ([attrs.evolve(OLD, replaces=-1)], [], (), "refers to value -1"),
        ([V[0], attrs.evolve(V[1], replaces=0)], [], (), "not both external"),
        ([OLD, NEW, attrs.evolve(NEW, name="newer")], [], (), "that another value replaces already"),
        ([attrs.evolve(OLD, replaces=0)], [], (), "that another value replaces already"),
        (V, [op("back", ((), (0,)), backward=True), op("late", ((), (1,)))], (), "is a forward op after"),
        (V, [op("f", ((), (0,)), rerun=1)], (), "rerun 1 is not one"),
        (V, [op("f", ((), (4,)))], (), "refers to value 4 of 4"),
        (V, [op("f", ((-1,), ()))], (), "refers to value -1"),
        (V, [MAKE, op("f", ((0, 0), (1,)))], (), "names a value twice"),
        (V, [op("f", ((), (1, 1)))], (), "names a value twice"),
        (V, [op("f", ((1,), (0,)))], (), "reads b before anything makes it"),
        (V, [op("f", ((0,), (0,)))], (), "reads a before anything makes it"),
        (V, [MAKE, op("again", ((), (0,)))], (), "makes a, which make makes"),
        ([TANGENT, V[0]], [op("f", ((0,), (1,)))], (), "is a forward op that reads tangent t"),
        ([TANGENT], [op("f", ((), (0,)))], (), "makes t, which exists before the step"),
        ([HOME], [op("f", ((), (0,)))], (), "makes h, which exists before the step"),
        (V, [MAKE, op("f", ((0,), (1,), ((2, 0),)))], (), "reuses storages that it does not"),
        (V, [MAKE, op("f", ((0,), (1,), ((1, 2),)))], (), "reuses storages that it does not"),
        ([V[0], attrs.evolve(V[1], nbytes=9)], [MAKE, op("f", ((0,), (1,), ((1, 0),)))], (), "another size"),
        (
            [OLD, NEW, V[0]],
            [op("w", ((), (1,))), op("f", ((0,), (2,)))],
            (),
            "an earlier op has overwritten",
        ),
        ([OLD, NEW, V[0]], [op("f", ((1,), (2,))), op("w", ((), (1,)))], (), "before anything makes it"),
        (V, [op("f", ((), (0,)), ((), (0, 1))), op("r", ((1,), (2,)))], (), "no first implementation makes"),
        ([GRAD], [], (), "must be made by a first implementation"),
        ([*V, GRAD], [op("f", ((), (4,)))], [Update(param=9, grad=4)], "refers to value 9"),
        ([*V, GRAD], [op("f", ((), (4,)))], [Update(param=0, grad=1)], "which is not a gradient"),
        ([*V, GRAD], [op("f", ((), (4,)))], [Update(param=0, grad=4)] * 2, "two updates change it"),
    ],
)
def test_each_broken_rule_is_named(values, ops, updates, problem):
    """The message names the op or value in one line."""
    with pytest.raises(InvalidGraph, match=problem) as caught:
        verify(Graph(name="broken", values=values, ops=ops, updates=updates))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"time_s": -1}, {"time_s": float("nan")}, {"time_s": float("inf")}, {"workspace_nbytes": -1}],
)
def test_costs_are_finite_and_not_negative(options):
    """The constructor checks this."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Implementation(inputs=(), outputs=(), **options)


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8", None])
def test_sizes_are_whole_bytes(nbytes):
    """The constructor checks this."""
    with pytest.raises((TypeError, ValueError)):
        Value(name="v", nbytes=nbytes)
