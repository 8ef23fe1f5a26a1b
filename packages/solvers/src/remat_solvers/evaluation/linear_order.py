"""Orders of op runs from runs of groups.

First runs in trace order with repeats inserted later are always valid. So a method that plans on the
simplified picture of a chain of groups (`remat_graph.partition`) yields a valid sequence; only its peak must
be checked.
"""

from collections.abc import Iterable, Sequence

from remat_graph import Graph
from remat_graph.partition import Partition


def expand(groups: Partition, runs: Iterable[tuple[str, int]]) -> list[int]:
    """The ops of runs of groups, in order: ("forward", group) or ("backward", group)."""
    order: list[int] = []
    seen: set[int] = set()
    for kind, s in runs:
        if kind == "backward":
            order += groups.backward[s]
        else:
            order += groups.repeats[s] if s in seen else groups.forward[s]
            seen.add(s)
    return order


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
