"""Useless repeats of an order, and how to drop them.

First runs in trace order with repeats inserted later are always valid. So a method that plans on the
simplified picture of a chain of groups (`remat_graph.partition`) yields a valid sequence; only its peak must
be checked.
"""

from collections.abc import Sequence

from remat_graph import Graph


def without_useless(graph: Graph, order: Sequence[int]) -> list[int]:
    """Drop every repeat whose outputs are not read before they are recomputed; one backward pass."""
    first: dict[int, int] = {}
    for position, index in enumerate(order):
        first.setdefault(index, position)
    needed: set[int] = set()
    kept = []
    for position in range(len(order) - 1, -1, -1):
        op = graph.ops[order[position]]
        repeat = first[order[position]] != position
        run = op.implementations[op.rerun] if repeat and op.rerun is not None else op.first
        if repeat and not any(v in needed and not graph.values[v].pinned for v in run.outputs):
            continue
        needed.difference_update(run.outputs)
        needed.update(run.inputs)
        kept.append(order[position])
    return kept[::-1]
