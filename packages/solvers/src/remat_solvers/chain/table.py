"""Dynamic programming over a chain of groups with several options each.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (rotor), with several options per stage as in Zhao et al. 2023
(Rockmate). ``cost(i, j, m)`` is the least forward time that runs groups i to j - 1 and their backward within
m bytes beyond the values that cross cut i:

* keep: run group i, keep what one of its options keeps, then ``cost(i + 1, j, less)``, then its backward by
  that option;
* drop: run groups i to k - 1 keeping only what crosses cut k, then ``cost(k, j, less)``, then ``cost(i, k,
  m)``, which recomputes them.

The values that cross a cut are a set and counted once, so that the graph need not be a chain. Memory is
divided into `slots` levels; where the sizes share a divisor that is coarse enough, the levels are exact. The
memory of a running group has two estimates, see `ConservativeChain` and `OptimisticChain`. O(groups^3 *
slots), vectorized over the slots.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import attrs
import numpy as np

from remat_graph.partition import Partition
from remat_solvers.errors import TableTooLarge
from remat_solvers.evaluation.arrays import Arrays, Floats, Ints, evaluate
from remat_solvers.evaluation.linear_order import without_useless
from remat_solvers.protocol import Deadline

MOST_TABLE_NBYTES = 2**32
LEVELS = 24  # memory levels at which a table is read

GroupRun = tuple[str, int, int]  # ("forward", group, 0) or ("backward", group, option)


@attrs.frozen(kw_only=True)
class Option:
    """One way to treat a group between its last forward and its backward."""

    saved: frozenset[int]  # values computed in the group that stay until its backward
    backward: tuple[int, ...]  # op indices of its backward, repeats of its forward ops among them
    extra_s: float  # seconds of these repeats


def keep_all(groups: Partition, group: int) -> Option:
    """The option that keeps everything that the backward reads."""
    return Option(saved=groups.saved[group], backward=groups.backward[group], extra_s=0.0)


def order_of_runs(
    groups: Partition, options: Sequence[Sequence[Option]], runs: Iterable[GroupRun]
) -> list[int]:
    """The ops of runs of groups, without useless repeats.

    A repeat of a group leaves out ops that may not run again.
    """
    order: list[int] = []
    seen: set[int] = set()
    for kind, s, option in runs:
        if kind == "backward":
            order += options[s][option].backward
        else:
            order += groups.repeats[s] if s in seen else groups.forward[s]
            seen.add(s)
    return without_useless(groups.graph, order)


class Chain(ABC):
    """A partition seen as a chain: what crosses its cuts, and the peak memory of each group.

    Attributes:
        behind: per cut, bytes that later groups have computed for the backward of the groups before it.
    """

    behind: list[int]

    def __init__(self, groups: Partition) -> None:
        self.graph, self.groups = groups.graph, groups
        self.size = [self.graph.allocated_nbytes(v) for v in range(len(self.graph.values))]
        self.first_s = [sum(self.graph.ops[op].first.time_s for op in run) for run in groups.forward]
        self.again_s = [sum(self.graph.ops[op].first.time_s for op in run) for run in groups.repeats]

    def total(self, values: Iterable[int]) -> int:
        """Bytes of a set of values."""
        return sum(self.size[v] for v in values)

    def crossing(self, place: int) -> frozenset[int]:
        """The values that cross a cut; none after the last one."""
        return self.groups.crossing[place] if place < len(self.groups) else frozenset()

    @abstractmethod
    def forward_peak(self, i: int, saved: frozenset[int]) -> int:
        """Bytes beyond what crosses cut i while group i runs forward and keeps `saved`."""

    @abstractmethod
    def backward_peak(self, i: int, option: Option) -> int:
        """Bytes beyond what crosses cut i while the backward of group i runs by an option."""

    @abstractmethod
    def passing_peak(self, i: int, held_nbytes: int) -> int:
        """Bytes while group i runs forward and keeps nothing, with `held_nbytes` across its cut."""


class ConservativeChain(Chain):
    """Peaks by simulation with all values at a group's cuts held: exact on a chain, else upper bounds."""

    def __init__(self, groups: Partition) -> None:
        super().__init__(groups)
        self._look_behind()
        self._passing = [self.forward_peak(i, frozenset()) for i in range(len(groups))]

    def _look_behind(self) -> None:
        """Per cut, what the backward after it passes on: values read by earlier groups, and pinned bytes."""
        graph, groups = self.graph, self.groups
        count = len(groups)
        forward = {v for run in groups.forward for op in run for v in graph.ops[op].first.outputs}
        reads = [{v for op in run for v in graph.ops[op].first.inputs} - forward for run in groups.backward]
        before = [set[int]() for _ in range(count + 1)]  # what groups before a cut read
        for s in range(count):
            before[s + 1] = before[s] | reads[s]
        made = set(graph.tangents)
        pinned = self.total(v for v in forward if graph.values[v].pinned)
        self.coming = [frozenset[int]()] * (count + 1)
        self.pinned_nbytes = [0] * (count + 1)
        for s in range(count, -1, -1):
            if s < count:
                for op in groups.backward[s]:
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
        """Peak bytes beyond those of `free` while these ops run.

        `start` is live when they begin; values in `stays` outlive them, all others are freed after their last
        use.
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
        """See `Chain`."""
        stays = saved | self.crossing(i + 1)
        return self.peak(self.groups.forward[i], frozenset(), stays, self.crossing(i))

    def backward_peak(self, i: int, option: Option) -> int:
        """See `Chain`."""
        pinned = frozenset(self.graph.gradients)
        start = option.saved | self.crossing(i + 1) | self.coming[i + 1]
        stays = self.coming[i] | pinned
        return self.pinned_nbytes[i + 1] + self.peak(option.backward, start, stays, self.crossing(i))

    def passing_peak(self, i: int, held_nbytes: int) -> int:
        """See `Chain`."""
        return self._passing[i] + held_nbytes


class OptimisticChain(Chain):
    """Lower bounds on the peaks: what is kept, and the largest op. Tables are read at several levels."""

    def __init__(self, groups: Partition) -> None:
        super().__init__(groups)
        self.behind = [0] * (len(groups) + 1)
        self._working = [self.working_nbytes(run) for run in groups.forward]

    def working_nbytes(self, run: Iterable[int]) -> int:
        """Largest outputs and workspace of one op."""
        ways = [self.graph.ops[op].first for op in run]
        return max((self.total(way.outputs) + way.workspace_nbytes for way in ways), default=0)

    def forward_peak(self, i: int, saved: frozenset[int]) -> int:
        """See `Chain`."""
        return self._working[i]

    def backward_peak(self, i: int, option: Option) -> int:
        """See `Chain`."""
        return self.total(option.saved - self.crossing(i)) + self.working_nbytes(option.backward)

    def passing_peak(self, i: int, held_nbytes: int) -> int:
        """See `Chain`."""
        return self._working[i]


class ChainTable:
    """``cost[i, j][m]`` and the choice that attains it: -1 - o keeps group i by option o, k drops i to k - 1.

    Past the deadline the table holds no plan of the whole chain.

    Raises:
        TableTooLarge: the stages and slots need more memory than a plan is worth.
    """

    def __init__(
        self,
        chain: Chain,
        options: Sequence[Sequence[Option]],
        budget_nbytes: int,
        slots: int,
        deadline: Deadline,
    ) -> None:
        self.chain, self.options = chain, options
        self.groups = chain.groups
        self._choose_levels(budget_nbytes, slots)
        self.cost: dict[tuple[int, int], Floats] = {}
        self.choice: dict[tuple[int, int], Ints] = {}
        count = len(self.groups)
        nbytes = 8 * (count + 1) * (count + 2) * self.slots  # a float and an integer per cell and slot
        if nbytes > MOST_TABLE_NBYTES:
            raise TableTooLarge(stages=count, slots=self.slots, nbytes=nbytes)
        cuts = [chain.crossing(i) for i in range(count + 1)]
        self.held = {
            (i, k): chain.total(cuts[k] - cuts[i]) for i in range(count) for k in range(i, count + 1)
        }
        self.kept = [
            [self.in_slots(chain.total((option.saved | cuts[i + 1]) - cuts[i])) for option in options[i]]
            for i in range(count)
        ]
        self._peaks = [
            [(chain.forward_peak(i, option.saved), chain.backward_peak(i, option)) for option in options[i]]
            for i in range(count)
        ]
        for i in range(count + 1):
            self.cost[i, i] = np.zeros(self.slots)
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                if deadline.reached():
                    self.cost[0, count] = np.full(self.slots, np.inf)
                    return
                self._fill(i, i + length)

    def _choose_levels(self, budget_nbytes: int, slots: int) -> None:
        """Choose the memory levels: exact ones if few enough."""
        divisor = math.gcd(*(size for size in self.chain.size if size), budget_nbytes) or 1
        exact = budget_nbytes // divisor + 1
        self.slots = exact if exact <= slots else slots
        self.slot_nbytes = max(1.0, float(divisor) if exact <= slots else budget_nbytes / (slots - 1))

    def _fill(self, i: int, j: int) -> None:
        """Compute one entry from shorter ones."""
        chain = self.chain
        best = np.full(self.slots, np.inf)
        choice = np.full(self.slots, -1, np.int64)
        for o, option in enumerate(self.options[i]):
            cost = chain.first_s[i] + option.extra_s + shifted(self.cost[i + 1, j], self.kept[i][o])
            forward, backward = self._peaks[i][o]
            cost[: self.in_slots(max(forward + chain.behind[j], backward))] = np.inf
            take(best, choice, cost, -1 - o)
        most = 0
        for k in range(i + 1, j):
            most = max(most, chain.passing_peak(k - 1, self.held[i, k - 1]))
            held = self.in_slots(self.held[i, k])
            cost = sum(chain.again_s[i:k]) + shifted(self.cost[k, j], held) + self.cost[i, k]
            cost[: self.in_slots(most + chain.behind[j])] = np.inf
            take(best, choice, cost, k)
        self.cost[i, j], self.choice[i, j] = best, choice

    def runs(self, i: int, j: int, level: int) -> list[GroupRun]:
        """The runs of groups i to j - 1 with their backward, for a memory level."""
        if i == j:
            return []
        k = int(self.choice[i, j][level])
        if k < 0:
            kept = self.kept[i][-1 - k]
            return [("forward", i, 0), *self.runs(i + 1, j, level - kept), ("backward", i, -1 - k)]
        held = self.in_slots(self.held[i, k])
        there: list[GroupRun] = [("forward", s, 0) for s in range(i, k)]
        return there + self.runs(k, j, level - held) + self.runs(i, k, level)

    def memory_levels(self, count: int) -> list[int]:
        """Memory levels to read the table at, from the whole budget down."""
        whole = self.slots - 1
        memory_levels = [whole - round(level * whole / count) for level in range(count)]
        found = self.cost[0, len(self.groups)]
        return [a for a, b in pairwise([*memory_levels, -1]) if a != b and np.isfinite(found[a])]

    def orders(self, count: int = LEVELS) -> Iterator[Ints]:
        """The distinct plans at `count` memory levels, from the whole budget down."""
        seen: set[tuple[GroupRun, ...]] = set()
        for level in self.memory_levels(count):
            runs = tuple(self.runs(0, len(self.groups), level))
            if runs not in seen:
                seen.add(runs)
                yield np.array(order_of_runs(self.groups, self.options, runs), np.int64)

    def in_slots(self, nbytes: float) -> int:
        """Slots that hold this many bytes."""
        return min(self.slots, math.ceil(nbytes / self.slot_nbytes - 1e-9))


def chain_orders(
    groups: Partition, options: Sequence[Sequence[Option]], budget_nbytes: int, slots: int, deadline: Deadline
) -> Iterator[Ints]:
    """The plans of both memory estimates at several levels; their peaks lie around the budget."""
    for chain in (ConservativeChain(groups), OptimisticChain(groups)):
        yield from ChainTable(chain, options, budget_nbytes, slots, deadline).orders()


def shifted(cost: Floats, slots: int) -> Floats:
    """A row of the table for `slots` fewer slots."""
    moved = np.full(len(cost), np.inf)
    if slots < len(cost):
        moved[slots:] = cost[: len(cost) - slots]
    return moved


def take(best: Floats, choice: Ints, cost: Floats, mark: int) -> None:
    """Replace costs and choices where the new cost is lower."""
    better = cost < best
    best[better] = cost[better]
    choice[better] = mark


def fastest_within_budget(arrays: Arrays, orders: Iterable[Ints], budget_nbytes: int) -> Ints | None:
    """The fastest sequence within the budget."""
    best, best_s = None, float("inf")
    for order in orders:
        result = evaluate(arrays, order)
        if result.valid and result.peak_nbytes <= budget_nbytes and result.time_s < best_s:
            best, best_s = order, result.time_s
    return best
