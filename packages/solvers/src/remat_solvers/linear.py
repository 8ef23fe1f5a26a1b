"""The linear order of a graph cut into segments, for the methods that think of a network as a chain.

A cut lies between two forward ops; what crosses it is a set of values (skips and encoder outputs among
them), not one. A backward op belongs to the segment in which the last of the forward values that it reads
has its last forward use, made monotone along the backward, so that the backward visits the segments in
reverse.

Any order made of first runs in trace order and of repeats inserted later is valid, so a method that plans
on this simplified picture always yields a valid sequence; only its peak has to be checked.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs

from remat_graph import Graph


@attrs.frozen(kw_only=True, eq=False)
class Segments:
    """A graph's ops, cut.

    Attributes:
        forward: per segment, its forward ops in order.
        backward: per segment, the backward ops that belong to it, in order.
        crossing: per segment, the values made before it that it or a later one reads in the forward.
        saved: per segment, the values made in it that the backward reads.
    """

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    crossing: tuple[frozenset[int], ...]
    saved: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.forward)


def forward_ops(graph: Graph) -> list[int]:
    """Indices of the forward ops."""
    return [i for i, op in enumerate(graph.ops) if not op.backward]


def cut(graph: Graph, cuts: Sequence[int]) -> Segments:
    """Cut the forward before each of the given places.

    Args:
        graph: the graph.
        cuts: rising places in the list of forward ops, without 0.
    """
    ops = forward_ops(graph)
    bounds = [0, *cuts, len(ops)]
    forward = [tuple(ops[a:b]) for a, b in pairwise(bounds)]
    segment_of = {op: s for s, run in enumerate(forward) for op in run}
    made_in: dict[int, int] = {}
    last_in: dict[int, int] = {}
    for op, s in segment_of.items():
        for v in graph.ops[op].first.outputs:
            if not graph.values[v].external:
                made_in[v] = last_in[v] = s
    for op, s in segment_of.items():
        for v in graph.ops[op].first.inputs:
            if v in last_in:
                last_in[v] = max(last_in[v], s)
    crossing = [frozenset(v for v, a in made_in.items() if a < s <= last_in[v]) for s in range(len(forward))]
    backward: list[list[int]] = [[] for _ in forward]
    read: set[int] = set()
    lowest = len(forward) - 1
    for i, node in enumerate(graph.ops):
        if node.backward:
            used = [v for v in node.first.inputs if v in last_in]
            read.update(used)
            lowest = min([lowest, *(last_in[v] for v in used)])
            backward[lowest].append(i)
    saved = [frozenset(v for v, a in made_in.items() if a == s and v in read) for s in range(len(forward))]
    return Segments(
        forward=tuple(forward),
        backward=tuple(map(tuple, backward)),
        crossing=tuple(crossing),
        saved=tuple(saved),
    )


def articulation_places(graph: Graph) -> list[int]:
    """Places in the forward that one value alone crosses: every path from input to loss runs through it."""
    ops = forward_ops(graph)
    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        for v in graph.ops[op].first.inputs:
            last[v] = place
    opens, closes = [0] * (len(ops) + 1), [0] * (len(ops) + 1)
    for place, op in enumerate(ops):
        for v in graph.ops[op].first.outputs:
            if last.get(v, -1) > place and not graph.values[v].external:
                opens[place + 1] += 1
                closes[last[v] + 1] += 1 if last[v] < len(ops) else 0
    crossing, places = 0, []
    for place in range(1, len(ops)):
        crossing += opens[place] - closes[place]
        if crossing == 1:
            places.append(place)
    return places


def repeatable(graph: Graph, ops: Iterable[int]) -> list[int]:
    """Those ops that may run again at any later time."""
    replaced = {value.replaces for value in graph.values if value.replaces is not None}
    chosen = []
    for i in ops:
        rerun = graph.ops[i].rerun
        if rerun is not None and not replaced.intersection(graph.ops[i].implementations[rerun].inputs):
            chosen.append(i)
    return chosen


def without_useless(graph: Graph, order: Sequence[int]) -> list[int]:
    """Drop every repeat whose outputs nothing reads before they are made anew; one backward sweep."""
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
