"""Names of a graph's values and ops that are unique, as `remat_graph.verify` and saved files want them."""

from collections.abc import Iterable

import attrs

from remat_graph import Graph


def with_unique_names(graph: Graph) -> Graph:
    """The graph with a number after each name that an earlier value, or an earlier op, already has.

    Values of the caller come first: a buffer named ``mean`` keeps its name, and the result of an op ``mean``
    gets another.
    """
    values = _unique(value.name for value in graph.values)
    ops = _unique(op.name for op in graph.ops)
    return attrs.evolve(
        graph,
        values=[attrs.evolve(value, name=name) for value, name in zip(graph.values, values, strict=True)],
        ops=[attrs.evolve(op, name=name) for op, name in zip(graph.ops, ops, strict=True)],
    )


def _unique(names: Iterable[str]) -> list[str]:
    names = list(names)
    taken = set(names)
    found: dict[str, None] = {}
    for name in names:
        new, number = name, 1
        while new in found or (new in taken and new != name):
            number += 1
            new = f"{name}_{number}"
        found[new] = None
    return list(found)
