"""Find structurally equal blocks that follow one another: the layers of a network, without its modules.

A network of equal layers traces to a list of ops in which one sequence of structural keys repeats, once per
layer in the forward and once in the backward. The ops are numbered by key (and by what they make). An
interval in which op i equals op i + p throughout is a repetition with period p, a tandem repeat. Candidate
periods are the distances between equal windows of ops, for windows of 1, 2, 4, ... ops (numbered by prefix
doubling as for suffix arrays), the most frequent few per window length. The interval that covers most ops
wins, then the best of the remaining ones. Every phase inside an interval is valid; the phase is chosen at
which the fewest bytes cross from block to block.

Equal keys are not enough: two blocks are equal when their wiring is equal. Inner inputs must come from the
same position in the block, and outer inputs, numbered by first use, must have the same size and role. Then
ops and `Block.values` of two blocks correspond position by position.

O(n log n) for n ops, times a small number of candidate periods. Blocks that repeat only with other ops
between them are not found. Equal blocks in several intervals (a stage, a downsampling, the stage again) form
one repetition.
"""

from collections import Counter
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, cut, forward_ops

_PERIODS_PER_WINDOW = 4
_Ranks = NDArray[np.int64]
_Wiring = tuple[object, ...]


@attrs.frozen(kw_only=True)
class Block:
    """Consecutive ops.

    Attributes:
        start: index of the first op.
        stop: index after the last op.
        inputs: values made outside that the block reads, in order of first use.
        made: values that the block makes, in order.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    made: tuple[int, ...]

    @property
    def ops(self) -> range:
        """Indices of the ops."""
        return range(self.start, self.stop)

    @property
    def values(self) -> tuple[int, ...]:
        """Inputs, then made values: in equal blocks these correspond position by position."""
        return self.inputs + self.made


@attrs.frozen(kw_only=True)
class Repetition:
    """Two or more equal `blocks`, sorted by start."""

    blocks: tuple[Block, ...] = attrs.field(validator=attrs.validators.min_len(2))

    @property
    def length(self) -> int:
        """Ops in each block."""
        return self.blocks[0].stop - self.blocks[0].start


def repeated_blocks(graph: Graph, *, min_ops: int = 2) -> tuple[Repetition, ...]:
    """Find the equal blocks of a valid graph, each of at least `min_ops` ops.

    The blocks of the repetitions do not overlap; repetitions that cover most ops come first.
    """
    labels = _labels(graph)
    crossing = _crossing_within_nbytes(graph)
    taken = np.zeros(len(labels), dtype=bool)
    groups: dict[_Wiring, list[Block]] = {}
    for start, stop, period in sorted(_stretches(labels, min_ops), key=_by_coverage):
        for free_start, free_stop in _free_parts(taken, start, stop):
            for block, wiring in _cut(graph, free_start, free_stop, period, crossing):
                taken[block.start : block.stop] = True
                groups.setdefault(wiring, []).append(block)
    found = [
        Repetition(blocks=tuple(sorted(blocks, key=lambda block: block.start)))
        for blocks in groups.values()
        if len(blocks) > 1
    ]
    return tuple(sorted(found, key=lambda r: (-len(r.blocks) * r.length, r.blocks[0].start)))


def at_repetitions(graph: Graph, *, min_ops: int = 2) -> Partition:
    """Cut the forward of a valid graph at both ends of every block of `repeated_blocks`."""
    blocks = [block for found in repeated_blocks(graph, min_ops=min_ops) for block in found.blocks]
    forward = len(forward_ops(graph))  # they come first, so that a position is an op's index
    ends = {end for block in blocks for end in (block.start, block.stop)}
    return cut(graph, sorted(end for end in ends if 0 < end < forward))


def _labels(graph: Graph) -> _Ranks:
    """One number per op; equal where the ops are equal apart from their wiring."""
    numbers: dict[object, int] = {}
    labels = np.empty(len(graph.ops), dtype=np.int64)
    for i, op in enumerate(graph.ops):
        shape = tuple(
            (len(each.inputs), tuple(_storage(graph, value) for value in each.outputs))
            for each in op.implementations
        )
        label = (op.key or op.target, op.backward, op.rerun, shape)
        labels[i] = numbers.setdefault(label, len(numbers))
    return labels


def _storage(graph: Graph, value: int) -> tuple[object, ...]:
    stored = graph.values[value]
    return stored.nbytes, stored.role, stored.external, stored.placement


def _stretches(labels: _Ranks, min_ops: int) -> Iterator[tuple[int, int, int]]:
    """Maximal intervals (start, stop, period) of two periods or more with labels[i] == labels[i + period]."""
    for period in _periods(labels, min_ops):
        equal = np.concatenate(([False], labels[:-period] == labels[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if stop - start >= period:
                yield start, stop + period, period


def _periods(labels: _Ranks, min_ops: int) -> list[int]:
    ranks, window = labels, 1
    periods: set[int] = set()
    while window <= len(labels) // 2:
        order = np.argsort(ranks, kind="stable")
        same = ranks[order][1:] == ranks[order][:-1]
        distances = np.diff(order)[same]
        if not len(distances):
            break
        lengths, counts = np.unique(distances[distances >= min_ops], return_counts=True)
        most = np.argsort(-counts, kind="stable")[:_PERIODS_PER_WINDOW]
        periods.update(int(length) for length in lengths[most] if 2 * length <= len(labels))
        # Two adjacent windows make one of twice the length; renumbering keeps the numbers small.
        pairs = ranks[:-window] * (int(ranks.max()) + 1) + ranks[window:]
        ranks = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        window *= 2
    return sorted(periods)


def _by_coverage(stretch: tuple[int, int, int]) -> tuple[int, int, int]:
    start, stop, period = stretch
    return -((stop - start) // period) * period, period, start


def _free_parts(taken: NDArray[np.bool_], start: int, stop: int) -> list[tuple[int, int]]:
    free = np.concatenate(([False], ~taken[start:stop], [False]))
    edges = (np.flatnonzero(free[1:] != free[:-1]) + start).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _cut(graph: Graph, start: int, stop: int, period: int, crossing: _Ranks) -> list[tuple[Block, _Wiring]]:
    """Blocks of an interval, cut where fewest bytes cross; only blocks that have an equal one."""
    count = (stop - start) // period
    if count < 2:
        return []
    slack = min((stop - start) - count * period, period - 1)
    offsets = range(start, start + slack + 1)
    first = min(offsets, key=lambda offset: int(crossing[offset : offset + count * period : period].sum()))
    cuts = range(first, first + count * period, period)
    blocks = [_block(graph, cut, cut + period) for cut in cuts]
    wirings = Counter(wiring for _, wiring in blocks)
    return [(block, wiring) for block, wiring in blocks if wirings[wiring] > 1]


def _block(graph: Graph, start: int, stop: int) -> tuple[Block, _Wiring]:
    inner: dict[int, int] = {}
    outer: dict[int, int] = {}
    wiring: list[object] = []
    for op in graph.ops[start:stop]:
        wiring.append((op.key or op.target, op.backward, op.rerun))
        for each in op.implementations:
            reads = [
                ("inner", inner[value]) if value in inner else ("outer", outer.setdefault(value, len(outer)))
                for value in each.inputs
            ]
            for value in each.outputs:
                inner.setdefault(value, len(inner))
            makes = [inner[value] for value in each.outputs]
            takes = [(inner[made], each.inputs.index(source)) for made, source in each.reuses]
            wiring.append((tuple(reads), tuple(makes), tuple(takes)))
    wiring.append(tuple(_storage(graph, value) for value in (*outer, *inner)))
    return Block(start=start, stop=stop, inputs=tuple(outer), made=tuple(inner)), tuple(wiring)


def _crossing_within_nbytes(graph: Graph) -> _Ranks:
    """For each op, bytes made before it and read at or after it by ops of the direction that made them.

    Values that the forward saves for the backward cross every later cut of the forward, so they do not count.
    """
    count = len(graph.ops)
    last_use = dict[int, int]()
    for i, op in enumerate(graph.ops):
        for each in op.implementations:
            for value in each.inputs:
                producer = graph.producer[value]
                if producer is not None and graph.ops[producer].backward == op.backward:
                    last_use[value] = i
    change = np.zeros(count + 1, dtype=np.int64)
    for value, last in last_use.items():
        producer = graph.producer[value]
        if producer is not None and last > producer:
            change[producer + 1] += graph.values[value].nbytes
            change[last + 1] -= graph.values[value].nbytes
    return np.cumsum(change)[:count]
