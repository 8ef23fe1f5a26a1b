"""Equal layers are found from keys and wiring alone."""

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import Graph, Implementation, Op, Value
from remat_graph.partition import Block, repeated_blocks
from remat_graph.testing.strategies import graphs


def network(layers: int, *, head: int = 3, odd: int | None = None, skip: int | None = None) -> Graph:
    """A stem, equal layers of five ops with a residual, and a head; one layer may be odd."""
    values: list[Value] = []
    ops: list[Op] = []

    def op(key: str, inputs: tuple[int, ...], nbytes: int = 8) -> int:
        values.append(Value(name=f"v{len(values)}", nbytes=nbytes))
        made = Implementation(inputs=inputs, outputs=(len(values) - 1,))
        ops.append(Op(name=f"{key}{len(ops)}", target=key, key=key, implementations=(made,)))
        return len(values) - 1

    x = op("embed", ())
    x = op("scale", (x,))
    for layer in range(layers):
        size = 16 if layer == odd else 8
        normed = op("norm", (x,), size)
        up = op("mm", (normed,), 32)
        act = op("gelu", (up,), 32)
        down = op("mm", (act if layer != skip else up,))
        x = op("add", (x, down))
    for _ in range(head):
        x = op("head", (x,))
    return Graph(name="network", values=values, ops=ops)


@pytest.mark.parametrize("layers", [2, 3, 7, 40])
def test_all_layers_are_found(layers: int) -> None:
    """As one repetition, in order, each the length of a layer."""
    found = repeated_blocks(network(layers))[0]
    assert (layers, 5) == (len(found.blocks), found.length)
    starts = [block.start for block in found.blocks]
    assert list(range(starts[0], starts[0] + 5 * layers, 5)) == starts


def test_blocks_are_cut_where_least_crosses() -> None:
    """One small value crosses between layers; larger values cross inside."""
    blocks = repeated_blocks(network(4))[0].blocks
    assert [2, 7, 12, 17] == [block.start for block in blocks]
    assert [(1,), (6,), (11,), (16,)] == [block.inputs for block in blocks]
    assert (2, 3, 4, 5, 6) == blocks[0].made


def test_an_odd_layer_splits_the_rest_but_not_the_group() -> None:
    """Equal layers on both sides of it form one repetition."""
    found = repeated_blocks(network(7, odd=3))[0]
    assert (6, 5) == (len(found.blocks), found.length)
    assert 17 not in [block.start for block in found.blocks]


def test_equal_keys_with_another_wiring_are_not_equal() -> None:
    """The layer that skips its activation is left out."""
    found = repeated_blocks(network(7, skip=2))[0]
    assert [2, 7, 17, 22, 27, 32] == [block.start for block in found.blocks]


def test_nothing_repeats() -> None:
    """A chain of different ops, and no ops at all."""
    assert () == repeated_blocks(Graph(name="empty", values=(), ops=()))
    ops = [
        Op(name=f"f{i}", target=f"f{i}", implementations=(Implementation(inputs=(), outputs=(i,)),))
        for i in range(9)
    ]
    values = [Value(name=f"v{i}", nbytes=i) for i in range(9)]
    assert () == repeated_blocks(Graph(name="chain", values=values, ops=ops))


def wired_alike(graph: Graph, source: Block, target: Block) -> None:
    """Equal blocks correspond op by op and value by value, by the definition of an isomorphism."""
    ops = dict(zip(source.ops, target.ops, strict=True))
    values = dict(zip(source.values, target.values, strict=True))
    for one, other in ops.items():
        first, second = graph.ops[one], graph.ops[other]
        assert (first.key, first.backward, first.rerun) == (second.key, second.backward, second.rerun)
        for way, twin in zip(first.implementations, second.implementations, strict=True):
            assert [values[v] for v in way.inputs] == list(twin.inputs)
            assert [values[v] for v in way.outputs] == list(twin.outputs)
            assert {(values[a], values[b]) for a, b in way.reuses} == set(twin.reuses)
    for one, other in values.items():
        assert graph.values[one].nbytes == graph.values[other].nbytes
        assert graph.values[one].role == graph.values[other].role


def check(graph: Graph) -> set[int]:
    taken: set[int] = set()
    for repetition in repeated_blocks(graph):
        for block in repetition.blocks:
            assert repetition.length == len(block.ops)
            assert not taken & set(block.ops)
            taken |= set(block.ops)
            wired_alike(graph, repetition.blocks[0], block)
    return taken


def repeat(graph: Graph, times: int) -> Graph:
    """Several copies of the graph one after another."""
    values: list[Value] = []
    ops: list[Op] = []
    for copy in range(times):
        shift = len(values)
        for v in graph.values:
            links = {n: None if (to := getattr(v, n)) is None else to + shift for n in ("of", "replaces")}
            values.append(attrs.evolve(v, name=f"{v.name}.{copy}", **links))
        for op in graph.ops:
            ways = [
                attrs.evolve(
                    way,
                    inputs=[v + shift for v in way.inputs],
                    outputs=[v + shift for v in way.outputs],
                    reuses=[(a + shift, b + shift) for a, b in way.reuses],
                )
                for way in op.implementations
            ]
            ops.append(attrs.evolve(op, name=f"{op.name}.{copy}", implementations=ways))
    return Graph(name="repeated", values=values, ops=ops)


@settings(deadline=None)
@given(graphs(), st.integers(2, 5))
def test_blocks_correspond_and_do_not_overlap(graph: Graph, times: int) -> None:
    """All blocks are equal by definition; copies of a whole graph are found."""
    check(graph)
    taken = check(repeat(graph, times))
    if len(graph.ops) >= 2:
        assert len(taken) >= (times - 1) * len(graph.ops)
