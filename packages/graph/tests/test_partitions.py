"""Every pass puts every op into one group, each group is a graph, and orders can be mapped back."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import Graph, Implementation, Op, Role, Schedule, Value, load_graph, simulate, verify
from remat_graph.partition import (
    articulation_places,
    at_articulations,
    at_narrow_places,
    at_repetitions,
    cut,
    grouped,
    repeatable,
)
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.strategies import graphs

from .corpus import GRAPHS

PASSES = {
    "articulation": lambda graph: at_articulations(graph, 5),
    "repeated": at_repetitions,
    "narrow": lambda graph: at_narrow_places(graph, 4),
    "grouping": lambda graph: grouped(graph, 4),
    "every op": lambda graph: cut(graph, range(1, sum(not op.backward for op in graph.ops))),
}


def op(name: str, inputs: list[int], outputs: list[int], **fields: bool | None) -> Op:
    way = Implementation(inputs=inputs, outputs=outputs, time_s=1.0)
    return Op(name=name, target=name, implementations=[way], **fields)


@pytest.mark.parametrize("name", PASSES)
@settings(deadline=None, max_examples=40)
@given(graph=graphs())
def test_every_op_is_in_one_group(name: str, graph: Graph) -> None:
    """The forward in trace order, the backward in reverse, and joining unplanned groups changes nothing."""
    groups = PASSES[name](graph)
    ops = [op for run in (*groups.forward, *reversed(groups.backward)) for op in run]
    assert list(range(len(graph.ops))) == ops
    assert list(range(len(graph.ops))) == groups.join({})


@pytest.mark.parametrize("name", PASSES)
@settings(deadline=None, max_examples=40)
@given(graph=graphs())
def test_every_group_is_a_graph_of_its_own(name: str, graph: Graph) -> None:
    """It is well formed; its ops cost the same as in the whole graph, and other values are external."""
    for subgraph in PASSES[name](graph).subgraphs:
        verify(subgraph.graph)
        made = {v for op in subgraph.graph.ops for way in op.implementations for v in way.outputs}
        for small, large in enumerate(subgraph.ops):
            one, other = subgraph.graph.ops[small], graph.ops[large]
            for way, twin in zip(one.implementations, other.implementations, strict=True):
                assert twin.inputs == tuple(subgraph.values[v] for v in way.inputs)
                assert twin.outputs == tuple(subgraph.values[v] for v in way.outputs)
                assert (twin.time_s, twin.workspace_nbytes) == (way.time_s, way.workspace_nbytes)
        for small, large in enumerate(subgraph.values):
            value = subgraph.graph.values[small]
            assert value.nbytes == (graph.values[large].nbytes if small in made else 0)
            assert value.external or small in made


@pytest.mark.parametrize("name", PASSES)
@settings(deadline=None, max_examples=40)
@given(graph=graphs(), seed=st.integers(0, 999))
def test_orders_of_the_groups_are_an_order_of_the_whole(name: str, graph: Graph, seed: int) -> None:
    """The joined order is valid, and keeps the order of runs within each group."""
    groups = PASSES[name](graph)
    orders = {}
    for group, subgraph in enumerate(groups.subgraphs):
        order = random_order(subgraph.graph, seed + group)
        simulate(subgraph.graph, Schedule.from_order(subgraph.graph, order))
        forward, backward = subgraph.split(order)
        if all(not graph.ops[op].backward for op in forward):
            orders[group] = order
            assert subgraph.lift(order) == forward + backward
    joined = groups.join(orders)
    simulate(graph, Schedule.from_order(graph, joined))
    for group, order in orders.items():
        inside = set(groups.subgraphs[group].ops)
        assert [op for op in joined if op in inside] == list(groups.subgraphs[group].lift(order))


@settings(deadline=None, max_examples=40)
@given(graph=graphs())
def test_equal_keys_are_equal_graphs(graph: Graph) -> None:
    """The same order has the same peak and time in each of them."""
    for partition in PASSES.values():
        known: dict[Any, Any] = {}
        for subgraph in partition(graph).subgraphs:
            timeline = simulate(subgraph.graph, Schedule.unplanned(subgraph.graph))
            worth = timeline.peak_nbytes, timeline.time_s
            assert known.setdefault(subgraph.key, worth) == worth


@pytest.mark.parametrize(
    ("graph", "name", "equal"),
    [
        ("gpt2_nohead", "repeated", 11),  # of 12: what stands next to the embedding differs
        ("gpt2_nohead", "articulation", 11),
        ("gpt2_nohead", "grouping", 10),
        ("llama24_nohead", "repeated", 22),
    ],
)
def test_equal_layers_of_the_corpus(graph: str, name: str, equal: int) -> None:
    """The layers of a transformer are groups with one key."""
    passes = {
        "repeated": at_repetitions,
        "articulation": lambda found: at_articulations(found, 100),
        "grouping": lambda found: grouped(found, 15),
    }
    groups = passes[name](load_graph(GRAPHS / f"{graph}.json"))
    counts = Counter(subgraph.key for subgraph in groups.subgraphs)
    assert counts.most_common(1)[0][1] >= equal
    assert len(counts) <= 6


def test_grouping_keeps_to_its_limit() -> None:
    """The number of groups, or one group for each op."""
    graph = load_graph(GRAPHS / "unet.json")
    forward = sum(not op.backward for op in graph.ops)
    for most in (1, 3, 16, forward, 10 * forward):
        assert min(most, forward) == len(grouped(graph, most))


def test_grouping_closes_around_what_is_wide() -> None:
    """A chain that is wide inside two pieces is cut where it is narrow."""
    sizes = [9, 50, 50, 1, 50, 50, 9]
    values = [Value(name=f"v{i}", nbytes=nbytes) for i, nbytes in enumerate(sizes)]
    ops = [op(f"f{i}", [i - 1] if i else [], [i]) for i in range(len(sizes))]
    graph = Graph(name="waist", values=values, ops=ops)
    assert ((0, 1, 2, 3), (4, 5, 6)) == grouped(graph, 2).forward
    assert ((0, 1, 2, 3), (4, 5, 6)) == at_narrow_places(graph, 1).forward


def test_what_one_value_crosses() -> None:
    """Positions under a skip are not articulation points."""
    values = [Value(name=f"v{i}", nbytes=1) for i in range(5)]
    ops = [op("a", [], [0]), op("b", [0], [1]), op("c", [1], [2]), op("d", [0, 2], [3]), op("e", [3], [4])]
    graph = Graph(name="skip", values=values, ops=ops)
    assert [1, 4] == articulation_places(graph)
    assert ((0,), (1, 2, 3), (4,)) == at_articulations(graph, 9).forward
    assert 1 == len(at_articulations(graph, 1))


@pytest.mark.parametrize("name", PASSES)
def test_nothing_to_group(name: str) -> None:
    """No ops, one op, no backward."""
    empty = PASSES[name](Graph(name="empty", values=[], ops=[]))
    assert [] == empty.join({})
    assert [()] == [subgraph.ops for subgraph in empty.subgraphs]
    one = Graph(name="one", values=[Value(name="v", nbytes=3)], ops=[op("f", [], [0])])
    assert [((0,), ())] == list(zip(PASSES[name](one).forward, PASSES[name](one).backward, strict=True))
    line = Graph(
        name="line",
        values=[Value(name=f"v{i}", nbytes=2) for i in range(6)],
        ops=[op(f"f{i}", [i - 1] if i else [], [i]) for i in range(6)],
    )
    assert list(range(6)) == PASSES[name](line).join({})
    assert not any(PASSES[name](line).backward)


def test_what_may_not_run_again_may_not_in_a_group_either() -> None:
    """An op reads the old version of a buffer, which an op of another group overwrites."""
    values = [
        Value(name="old", nbytes=4, external=True, role=Role.BUFFER),
        Value(name="new", nbytes=4, external=True, role=Role.BUFFER, replaces=0),
        Value(name="a", nbytes=4),
        Value(name="b", nbytes=4),
        Value(name="g", nbytes=4, role=Role.GRAD),
    ]
    ops = [
        op("read", [0], [2]),
        op("write", [2], [1, 3]),
        op("once", [2], [], rerun=None),
        op("back", [2, 3], [4], backward=True),
    ]
    graph = Graph(name="buffer", values=values, ops=ops)
    verify(graph)
    groups = cut(graph, [1, 2])
    assert [3] == repeatable(graph, range(4))
    assert ((), (), ()) == groups.repeats
    assert [None, None, None] == [subgraph.graph.ops[0].rerun for subgraph in groups.subgraphs]
    assert 0 == groups.subgraphs[1].graph.ops[1].rerun
