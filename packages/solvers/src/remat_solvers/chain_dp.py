"""Dynamic programming over a chain of segments, each with several ways to be carried out.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (rotor), with the menu of options per stage of Zhao et al.
2023 (Rockmate). ``cost(i, j, m)`` is the least extra time that runs segments i to j - 1 and their backward
within m bytes beyond what crosses cut i:

* keep: run segment i, keep what one of its options keeps, then ``cost(i + 1, j, less)``, then its backward by
  that option;
* drop: run segments i to k - 1 keeping only what crosses cut k, then ``cost(k, j, less)``, then
  ``cost(i, k, m)``, which makes them again.

What crosses a cut is a set of values, counted once, so that the graph need not be a chain. Memory is cut into
`slots` levels; where the sizes share a divisor that is coarse enough, the levels are exact. Peaks inside a
segment are simulated with everything at the cut held, which is exact on a chain and careful elsewhere.
O(segments^3 * slots), vectorized over the slots.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs
import numpy as np

from remat_graph import Graph
from remat_solvers.evaluate import Arrays, Floats, Ints, evaluate
from remat_solvers.linear import Segments, repeatable, without_useless

LEVELS = 24  # memory levels at which a table is read

Run = tuple[str, int, int]  # ("forward", segment, 0) or ("backward", segment, option)


@attrs.frozen(kw_only=True)
class Option:
    """One way to treat a segment between its last forward and its backward.

    Attributes:
        saved: values made in it that stay until its backward.
        backward: op indices of its backward, repeats of its forward ops among them.
        extra_s: seconds of these repeats.
    """

    saved: frozenset[int]
    backward: tuple[int, ...]
    extra_s: float


def keep_all(pieces: Segments, segment: int) -> Option:
    """Keep everything that the backward reads."""
    return Option(saved=pieces.saved[segment], backward=pieces.backward[segment], extra_s=0.0)


class Chain:
    """Segments of a graph seen as a chain: what crosses its cuts, and what each segment holds at most."""

    def __init__(self, graph: Graph, pieces: Segments) -> None:
        self.graph, self.pieces = graph, pieces
        self.size = [graph.allocated_nbytes(v) for v in range(len(graph.values))]
        self.again_s = [
            sum(graph.ops[op].first.time_s for op in repeatable(graph, run)) for run in pieces.forward
        ]
        self.look_behind()

    def total(self, values: Iterable[int]) -> int:
        """Bytes of a set of values."""
        return sum(self.size[v] for v in values)

    def crossing(self, place: int) -> frozenset[int]:
        """What crosses a cut; nothing behind the last one."""
        return self.pieces.crossing[place] if place < len(self.pieces) else frozenset()

    def look_behind(self) -> None:
        """Per cut, what the backward behind it hands on: values that the rest reads, and pinned bytes."""
        graph, pieces = self.graph, self.pieces
        count = len(pieces)
        forward = {v for run in pieces.forward for op in run for v in graph.ops[op].first.outputs}
        reads = [{v for op in run for v in graph.ops[op].first.inputs} - forward for run in pieces.backward]
        before = [set[int]() for _ in range(count + 1)]  # what segments ahead of a cut read
        for s in range(count):
            before[s + 1] = before[s] | reads[s]
        made = set(graph.tangents)
        pinned = self.total(v for v in forward if graph.values[v].pinned)
        self.coming = [frozenset[int]()] * (count + 1)
        self.pinned_nbytes = [0] * (count + 1)
        for s in range(count, -1, -1):
            if s < count:
                for op in pieces.backward[s]:
                    for v in graph.ops[op].first.outputs:
                        if graph.values[v].pinned:
                            pinned += self.size[v]
                        else:
                            made.add(v)
            self.coming[s] = frozenset(made & before[s])
            self.pinned_nbytes[s] = pinned
        self.behind = [
            nbytes + self.total(values)
            for nbytes, values in zip(self.pinned_nbytes, self.coming, strict=True)
        ]

    def peak(
        self, ops: Iterable[int], start: frozenset[int], stays: frozenset[int], free: frozenset[int]
    ) -> int:
        """Most bytes beyond those of `free` while these ops run.

        `start` is live when they begin; what is in `stays` outlives them, all else goes after its last use.
        """
        graph = self.graph
        sequence = list(ops)
        last = dict.fromkeys(start, -1)
        for position, op in enumerate(sequence):
            for v in (*graph.ops[op].first.inputs, *graph.ops[op].first.outputs):
                last[v] = position
        live = set(start - free)
        held = self.total(live)
        most = held
        for position, op in enumerate(sequence):
            run = graph.ops[op].first
            new = [v for v in run.outputs if v not in live and v not in free]
            held += self.total(new)
            live.update(new)
            most = max(most, held + run.workspace_nbytes)
            gone = [v for v in live if last[v] <= position and v not in stays]
            held -= self.total(gone)
            live.difference_update(gone)
        return most

    def forward_peak(self, i: int, saved: frozenset[int]) -> int:
        """Bytes beyond what crosses cut i while segment i runs forward and keeps `saved`."""
        stays = saved | self.crossing(i + 1)
        return self.peak(self.pieces.forward[i], frozenset(), stays, self.crossing(i))

    def backward_peak(self, i: int, option: Option) -> int:
        """Bytes beyond what crosses cut i while the backward of segment i runs by an option."""
        pinned = frozenset(v for v in self.graph.gradients)
        start = option.saved | self.crossing(i + 1) | self.coming[i + 1]
        stays = self.coming[i] | pinned
        return self.pinned_nbytes[i + 1] + self.peak(option.backward, start, stays, self.crossing(i))


class ChainTable(Chain):
    """``cost[i, j][m]`` and the choice behind it: -1 - o keeps segment i by option o, k drops i to k - 1."""

    def __init__(
        self,
        graph: Graph,
        pieces: Segments,
        options: Sequence[Sequence[Option]],
        budget_nbytes: int,
        slots: int,
    ) -> None:
        super().__init__(graph, pieces)
        self.options = options
        self.levels(budget_nbytes, slots)
        self.cost: dict[tuple[int, int], Floats] = {}
        self.choice: dict[tuple[int, int], Ints] = {}
        count = len(pieces)
        self.dropping = [self.forward_peak(i, frozenset()) for i in range(count)]
        for i in range(count + 1):
            self.cost[i, i] = np.zeros(self.slots)
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                self.fill(i, i + length)

    def levels(self, budget_nbytes: int, slots: int) -> None:
        """Choose the memory levels: exact ones if few enough."""
        divisor = math.gcd(*(size for size in self.size if size), budget_nbytes) or 1
        exact = budget_nbytes // divisor + 1
        self.slots = exact if exact <= slots else slots
        self.slot_nbytes = max(1.0, float(divisor) if exact <= slots else budget_nbytes / (slots - 1))

    def fill(self, i: int, j: int) -> None:
        """Compute one entry from shorter ones."""
        here = self.crossing(i)
        best = np.full(self.slots, np.inf)
        choice = np.full(self.slots, -1, np.int64)
        for o, option in enumerate(self.options[i]):
            kept = self.in_slots(self.total((option.saved | self.crossing(i + 1)) - here))
            cost = option.extra_s + shifted(self.cost[i + 1, j], kept)
            forward = self.forward_peak(i, option.saved) + self.behind[j]
            cost[: self.in_slots(max(forward, self.backward_peak(i, option)))] = np.inf
            take(best, choice, cost, -1 - o)
        most = 0
        for k in range(i + 1, j):
            most = max(most, self.dropping[k - 1] + self.total(self.crossing(k - 1) - here))
            held = self.in_slots(self.total(self.crossing(k) - here))
            cost = sum(self.again_s[i:k]) + shifted(self.cost[k, j], held) + self.cost[i, k]
            cost[: self.in_slots(most + self.behind[j])] = np.inf
            take(best, choice, cost, k)
        self.cost[i, j], self.choice[i, j] = best, choice

    def runs(self, i: int, j: int, room: int) -> list[Run]:
        """What runs when, for segments i to j - 1 and `room` slots."""
        if i == j:
            return []
        here = self.crossing(i)
        k = int(self.choice[i, j][room])
        if k < 0:
            option = self.options[i][-1 - k]
            kept = self.in_slots(self.total((option.saved | self.crossing(i + 1)) - here))
            return [("forward", i, 0), *self.runs(i + 1, j, room - kept), ("backward", i, -1 - k)]
        held = self.in_slots(self.total(self.crossing(k) - here))
        there: list[Run] = [("forward", s, 0) for s in range(i, k)]
        return there + self.runs(k, j, room - held) + self.runs(i, k, room)

    def order(self, runs: Iterable[Run]) -> list[int]:
        """The ops of a plan; a segment's repeats leave out what may not run again."""
        order: list[int] = []
        seen: set[int] = set()
        for kind, s, option in runs:
            if kind == "backward":
                order += self.options[s][option].backward
            else:
                run = self.pieces.forward[s]
                order += repeatable(self.graph, run) if s in seen else run
                seen.add(s)
        return order

    def rooms(self, count: int) -> list[int]:
        """Memory levels to read the table at, from the whole budget down."""
        whole = self.slots - 1
        rooms = [whole - round(level * whole / count) for level in range(count)]
        found = self.cost[0, len(self.pieces)]
        return [a for a, b in pairwise([*rooms, -1]) if a != b and np.isfinite(found[a])]

    def in_slots(self, nbytes: float) -> int:
        """Levels that this many bytes take."""
        return min(self.slots, math.ceil(nbytes / self.slot_nbytes - 1e-9))


def shifted(cost: Floats, slots: int) -> Floats:
    """A row of the table for so many slots less."""
    moved = np.full(len(cost), np.inf)
    if slots < len(cost):
        moved[slots:] = cost[: len(cost) - slots]
    return moved


def take(best: Floats, choice: Ints, cost: Floats, mark: int) -> None:
    """Where it costs less, take it."""
    better = cost < best
    best[better] = cost[better]
    choice[better] = mark


def fastest_that_fits(graph: Graph, arrays: Arrays, table: ChainTable, budget_nbytes: int) -> Ints | None:
    """Read the table at several levels: peaks inside a stage are careful, so a plan may need less."""
    best, best_s = None, float("inf")
    for room in table.rooms(LEVELS):
        runs = table.runs(0, len(table.pieces), room)
        order = np.array(without_useless(graph, table.order(runs)), np.int64)
        result = evaluate(arrays, order)
        if result.valid and result.peak_nbytes <= budget_nbytes and result.time_s < best_s:
            best, best_s = order, result.time_s
    return best
