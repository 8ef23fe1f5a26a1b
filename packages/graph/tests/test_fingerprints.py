"""A fingerprint covers what makes a plan fit, and nothing that a second measurement changes."""

from typing import Any

import attrs
import pytest
from hypothesis import given, settings

from remat_graph import Graph, Implementation, Op, Role, Value, fingerprint, structure
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.resized import resized
from remat_graph.testing.strategies import graphs


def remeasured(graph: Graph) -> Graph:
    """Other times, workspaces, rounding and names."""
    ops = [
        attrs.evolve(
            op,
            name=f"other_{op.name}",
            implementations=tuple(
                attrs.evolve(way, time_s=way.time_s + 1, workspace_nbytes=way.workspace_nbytes + 1)
                for way in op.implementations
            ),
        )
        for op in graph.ops
    ]
    values = [attrs.evolve(value, name=f"other_{value.name}") for value in graph.values]
    return attrs.evolve(graph, name="other", ops=ops, values=values, rounding_nbytes=4096)


@settings(deadline=None)
@given(graphs())
def test_measuring_again_changes_nothing(graph: Graph) -> None:
    """Times, workspaces, rounding and names."""
    assert fingerprint(graph) == fingerprint(remeasured(graph))


def test_it_is_the_same_on_every_machine() -> None:
    """The value is written down, because a change of the scheme must change its prefix."""
    values = [Value(name="x", nbytes=4, external=True), Value(name="y", nbytes=8, role=Role.OUTPUT)]
    way = Implementation(inputs=(0,), outputs=(1,), time_s=1, reuses=((1, 0),))
    op = Op(name="f", target="aten.relu", key="relu 4", implementations=(way,))
    graph = Graph(name="small", values=values, ops=[op], conditions=(("mode", "train"),))
    assert fingerprint(graph) == "remat1:b310312f8d2911578480658d8a38000c922ba8799763260bc0c927bec94afce0"


def change_value(graph: Graph, i: int, **changes: Any) -> Graph:
    values = list(graph.values)
    values[i] = attrs.evolve(values[i], **changes)
    return attrs.evolve(graph, values=values)


def change_op(graph: Any, i: Any, **changes: Any) -> Any:
    ops = list(graph.ops)
    ops[i] = attrs.evolve(ops[i], **changes)
    return attrs.evolve(graph, ops=ops)


def change_way(graph: Any, i: Any, **changes: Any) -> Any:
    way = attrs.evolve(graph.ops[i].first, **changes)
    return change_op(graph, i, implementations=(way, *graph.ops[i].implementations[1:]))


CHANGES = {
    "bytes": lambda g: change_value(g, 2, nbytes=g.values[2].nbytes + 1),
    "role": lambda g: change_value(g, 2, role=Role.OPTIMIZER_STATE),
    "external": lambda g: change_value(g, 2, external=not g.values[2].external),
    "of": lambda g: change_value(g, 2, of=1),
    "replaces": lambda g: change_value(g, 2, replaces=1),
    "chunk": lambda g: change_value(g, 2, chunk_of="whole"),
    "home": lambda g: change_value(g, 2, placement="host"),
    "target": lambda g: change_op(g, 0, target="other"),
    "key": lambda g: change_op(g, 0, key="other"),
    "direction": lambda g: change_op(g, 0, backward=True),
    "rerun": lambda g: change_op(g, 0, rerun=None),
    "implementations": lambda g: change_op(g, 0, implementations=(g.ops[0].first,) * 3),
    "inputs": lambda g: change_way(g, 2, inputs=(*g.ops[2].first.inputs, 3)),
    "outputs": lambda g: change_way(g, 2, outputs=()),
    "reuses": lambda g: change_way(g, 2, reuses=((1, 2),)),
    "conditions": lambda g: attrs.evolve(g, conditions=(("mode", "eval"),)),
    "one op less": lambda g: attrs.evolve(g, ops=g.ops[:-1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_matters_changes_it(change: str) -> None:
    """One field at a time."""
    graph = random_graph(4)
    assert fingerprint(graph) != fingerprint(CHANGES[change](graph))


def test_the_order_of_conditions_does_not_matter() -> None:
    """Conditions are a mapping."""
    pairs = (("mode", "train"), ("autocast", "off"))
    one, other = (attrs.evolve(random_graph(1), conditions=p) for p in (pairs, pairs[::-1]))
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("seed", range(20))
def test_other_sizes_have_the_same_structure(seed: int) -> None:
    """Bytes, times and keys are left out; what reads what is not."""
    graph = random_graph(seed)
    other = resized(graph, seed)
    assert structure(other) == structure(graph)
    assert fingerprint(other) != fingerprint(graph)
    shorter = attrs.evolve(graph, ops=graph.ops[:-1])
    assert structure(shorter) != structure(graph)
