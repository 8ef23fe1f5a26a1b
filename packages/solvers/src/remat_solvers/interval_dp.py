"""Dynamic programming over intervals of the linear order, with sets of values as interfaces, then polish.

Idea: rotor (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains") on a graph that is no
chain. The forward is cut into up to `stages` segments where little crosses. ``cost(i, j, m)`` is the least
forward time that runs segments i to j - 1 and their backward within m bytes, given what crosses cut i:

* keep: run segment i and keep all that the backward reads of it, then ``cost(i + 1, j, less)``, then its
  backward;
* drop: run segments i to k - 1 keeping only what crosses cut k, then ``cost(k, j, less)``, then ``cost(i,
  k, m)``, which makes them again.

Bytes are counted per set, so a skip that is there already is not charged again; memory is cut into `slots`
levels. The plan becomes an op sequence (valid by construction, see `linear`), repeats that nothing needs
are dropped, and since working sets inside a segment are only estimated, the table is read at several memory
levels; the fastest sequence that really fits is polished. O(stages^3 * slots) vectorized over the slots:
about 0.2 s.

Imperfect: inside a segment it is all or nothing; the polish and the search repair that.
"""

from itertools import pairwise
from typing import ClassVar

import attrs
import numpy as np

from remat_graph import Graph
from remat_solvers.evaluate import Arrays, Floats, Ints, evaluate, flatten
from remat_solvers.linear import Segments, cut, forward_ops, repeatable, without_useless
from remat_solvers.noremat import Rematerializer
from remat_solvers.polish import polish
from remat_solvers.protocol import Deadline, Problem, Solution, judge

LEVELS = 24  # memory levels at which the table is read


@attrs.frozen(kw_only=True)
class IntervalDP(Rematerializer):
    """Interval DP and polish.

    Attributes:
        stages: most segments.
        slots: memory levels of the table.
    """

    name: ClassVar[str] = "interval_dp"
    stages: int = attrs.field(default=36, validator=attrs.validators.ge(1))
    slots: int = attrs.field(default=160, validator=attrs.validators.ge(2))

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        arrays = flatten(problem.graph)
        order = plan(problem.graph, arrays, problem.budget_nbytes, self.stages, self.slots)
        if order is not None:
            order = polish(arrays, order, problem.budget_nbytes, deadline)
        return judge(problem, None if order is None else order.tolist())


def plan(graph: Graph, arrays: Arrays, budget_nbytes: int, stages: int = 36, slots: int = 160) -> Ints | None:
    """The fastest sequence that the table yields within the budget, not polished; None if none fits."""
    pieces = cut(graph, narrow_places(graph, stages))
    table = _Table(graph, pieces, budget_nbytes, slots)
    best, best_s = None, float("inf")
    seen: set[tuple[tuple[str, int], ...]] = set()
    for level in range(LEVELS):
        room = slots - 1 - round(level * (slots - 1) / LEVELS)
        if not np.isfinite(table.cost[0, len(pieces)][room]):
            break
        tree = tuple(table.runs(0, len(pieces), room))
        if tree in seen:
            continue
        seen.add(tree)
        order = np.array(without_useless(graph, expand(graph, pieces, tree)), np.int64)
        result = evaluate(arrays, order)
        if result.valid and result.peak_nbytes <= budget_nbytes and result.time_s < best_s:
            best, best_s = order, result.time_s
    return best


def narrow_places(graph: Graph, stages: int) -> list[int]:
    """Cuts: in each of `stages` windows of the forward, the place that fewest bytes cross."""
    ops = forward_ops(graph)
    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        for v in graph.ops[op].first.inputs:
            last[v] = place
    crossing = np.zeros(len(ops) + 1)
    for place, op in enumerate(ops):
        for v in graph.ops[op].first.outputs:
            crossing[place + 1 : last.get(v, place) + 1] += graph.allocated_nbytes(v)
    edges = np.linspace(1, len(ops), min(stages, len(ops)) + 1).astype(int)
    places = {int(a + np.argmin(crossing[a:b])) for a, b in pairwise(edges.tolist()) if b > a}
    return sorted(places - {0, len(ops)})


class _Table:
    """``cost[i, j][m]`` and the choice behind it: -1 keeps segment i, k drops segments i to k - 1."""

    def __init__(self, graph: Graph, pieces: Segments, budget_nbytes: int, slots: int) -> None:
        self.slots = slots
        self.slot_nbytes = max(1.0, budget_nbytes / (slots - 1))
        count = len(pieces)
        size = [graph.allocated_nbytes(v) for v in range(len(graph.values))]

        def total(values: frozenset[int]) -> int:
            return sum(size[v] for v in values)

        time_s = [sum(graph.ops[op].first.time_s for op in run) for run in pieces.forward]
        working = [self._working(graph, run) for run in pieces.forward]
        behind = [self._working(graph, run) for run in pieces.backward]
        self.cost: dict[tuple[int, int], Floats] = {}
        self.choice: dict[tuple[int, int], Ints] = {}
        nothing = np.full(slots, np.inf)
        for i in range(count + 1):
            self.cost[i, i] = np.zeros(slots)
        self.held: dict[tuple[int, int], int] = {}
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                j = i + length
                here = pieces.crossing[i]
                after = pieces.crossing[i + 1] if i + 1 < count else frozenset[int]()
                kept = self._slots(total((pieces.saved[i] | after) - here))
                self.held[i, i + 1] = kept
                best = time_s[i] + self._shifted(self.cost[i + 1, j], kept)
                short = self._slots(max(working[i], total(pieces.saved[i] - here) + behind[i]))
                best[:short] = np.inf
                choice = np.full(slots, -1, np.int64)
                for k in range(i + 1, j):
                    held = self._slots(total(pieces.crossing[k] - here))
                    self.held[i, -k] = held
                    again = sum(time_s[i:k]) + self._shifted(self.cost[k, j], held) + self.cost[i, k]
                    short = self._slots(max(working[i:k]))
                    again[:short] = np.inf
                    better = again < best
                    best = np.where(better, again, best)
                    choice[better] = k
                self.cost[i, j], self.choice[i, j] = np.minimum(best, nothing), choice

    def runs(self, i: int, j: int, room: int) -> list[tuple[str, int]]:
        """What runs when: ("forward", segment) and ("backward", segment)."""
        if i == j:
            return []
        k = int(self.choice[i, j][room])
        if k < 0:
            inside = self.runs(i + 1, j, room - self.held[i, i + 1])
            return [("forward", i), *inside, ("backward", i)]
        there = [("forward", s) for s in range(i, k)]
        return there + self.runs(k, j, room - self.held[i, -k]) + self.runs(i, k, room)

    def _slots(self, nbytes: float) -> int:
        return min(self.slots, int(np.ceil(nbytes / self.slot_nbytes - 1e-9)))

    def _shifted(self, cost: Floats, slots: int) -> Floats:
        shifted = np.full(self.slots, np.inf)
        if slots < self.slots:
            shifted[slots:] = cost[: self.slots - slots]
        return shifted

    @staticmethod
    def _working(graph: Graph, run: tuple[int, ...]) -> int:
        """Largest bytes that one op of a run makes and scratches: an estimate from below."""
        return max(
            (
                sum(map(graph.allocated_nbytes, graph.ops[op].first.outputs))
                + graph.ops[op].first.workspace_nbytes
                for op in run
            ),
            default=0,
        )


def expand(graph: Graph, pieces: Segments, runs: tuple[tuple[str, int], ...]) -> list[int]:
    """The ops of runs of segments, in order: ("forward", segment) or ("backward", segment)."""
    order: list[int] = []
    seen: set[int] = set()
    for kind, s in runs:
        if kind == "backward":
            order += pieces.backward[s]
        else:
            order += repeatable(graph, pieces.forward[s]) if s in seen else pieces.forward[s]
            seen.add(s)
    return order
