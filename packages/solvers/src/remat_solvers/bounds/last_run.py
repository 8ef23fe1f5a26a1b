"""A floor on the budget from the last run of heavy ops, which must fit next to what is kept after it.

Take a set of ops, the *heavy* ones, and in a schedule the last run of any of them, by op h. No heavy op runs
after it, so from then on values are live from which all that must be live at the end, such as the gradients
of the parameters, is computed without heavy ops. The fewest bytes of such values are a minimum cut (keep a
value, or compute it from its inputs). They, the inputs and outputs of h and its workspace fit the budget.

Before that run its inputs were live at once. When an op, p, last ran that may make one of them, the others
were live already, and so were the inputs and outputs of p. Heavy ops may have run between p and h only if
they fit next to the inputs of h and what must be kept after them; all others are done by then, so what must
be kept is a minimum cut again. The same holds one step back, for the inputs of p and those that were live
already, and so on: a search backwards through sets of values that are live at once. If each of its paths ends
at a set that does not fit, h is not the heavy op that runs last. Ops that may be last are taken out of the
set until nothing changes; if any are left then, no schedule fits the budget.

The ops that are heavy at first are those that need a share of the budget alone. With fewer of them more ops
can be recomputed after the last run, with more of them more can run in between, so several shares are tried.

Imperfect: it misses what is live for reasons other than the last run, and ends searches that take long.
"""

import heapq
from collections.abc import Collection, Iterable
from itertools import count
from typing import Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from remat_graph import Graph
from remat_solvers.bounds.decisions import bounding_graphs
from remat_solvers.bounds.reachability import reachability
from remat_solvers.evaluation.arrays import records
from remat_solvers.protocol import Deadline

INFINITE = 1 << 60
NODE = "first level at queue path"
EDGE = "next to fixed capacity"
HEAVY = (0.4, 0.25, 0.1)  # shares of the budget that an op needs alone to be heavy at first
SMALL = 0.02  # a share of the budget: smaller values do not count among those that are live at once
MOST_SETS = 100  # of values, in the search back from one op; with 400 floors rose by 0.4 % in twice the time
STEPS = 1  # back from a set next to which all heavy ops fit, so that only what is live at once counts
MOST_WORK = 10_000_000  # of one floor, as cuts times ops of 0.3 to 0.9 us each
TRIAL = 0.5  # share of the work that is left for one budget
CLOSE = 0.02  # a ratio of the smallest known peak, to which the floor is determined

Values = frozenset[int]


def raised_floor_nbytes(graph: Graph, floor_nbytes: int, peak_nbytes: int, deadline: Deadline) -> int:
    """A budget below which no schedule exists in which gradients stay to the end.

    Args:
        graph: the training step; with switches the floor holds for every decision of them.
        floor_nbytes: a floor that is known.
        peak_nbytes: the peak of a schedule.
        deadline: ends the search with what is proven so far. Without one it takes some seconds.

    Returns:
        At least `floor_nbytes`, and at most `peak_nbytes` if that is more.
    """
    low, high = floor_nbytes, peak_nbytes
    if high - low <= CLOSE * peak_nbytes or deadline.reached():
        return low
    all_runs = [LastRuns(each) for each in bounding_graphs(graph)]
    left = MOST_WORK
    while high - low > CLOSE * peak_nbytes and left > len(graph.ops) and not deadline.reached():
        middle, work = (low + high) // 2, _Work(left=round(TRIAL * left))
        left -= work.left
        if all(runs.exceed(middle, work, deadline) for runs in all_runs):
            low = middle + 1
        else:
            high = middle
        left += max(0, work.left)
    return low


@attrs.define
class _Work:
    """What the search at one budget may still do, as cuts times ops."""

    left: int


class _Flow(NamedTuple):
    """The graph of the cut: two nodes and an edge between them for each value, a source and a sink."""

    node: NDArray[Any]
    edge: NDArray[Any]


@attrs.frozen(eq=False)
class _Op:
    """What each run of an op needs and makes, whichever of its implementations it takes; with bytes only."""

    reads: Values
    makes: Values
    may_make: Values
    workspace_nbytes: int
    reuses: tuple[tuple[int, int], ...]  # outputs, and inputs whose storage they may take over


class LastRuns:
    """What the runs of a graph without switches need, and the cut of what must be kept after them."""

    def __init__(self, graph: Graph) -> None:
        reach = reachability(graph)
        self.base_nbytes = reach.base_nbytes
        # Tangents do not count: they may come after the last heavy run.
        uncounted = {v for v, free in enumerate(reach.free) if free} | reach.tangent_set
        self.nbytes = [0 if v in uncounted else graph.allocated_nbytes(v) for v in range(len(graph.values))]
        self.ops: list[_Op] = []
        for op in graph.ops:
            ways = op.implementations
            reads = [self._paid(way.inputs) for way in ways]
            makes = [self._paid(way.outputs) for way in ways]
            self.ops.append(
                _Op(
                    reads=frozenset.intersection(*reads),
                    makes=frozenset.intersection(*makes),
                    may_make=frozenset.union(*makes),
                    workspace_nbytes=min(way.workspace_nbytes for way in ways),
                    reuses=tuple({pair for way in ways for pair in way.reuses}),
                )
            )
        self.producer = graph.producer
        self.readers: list[list[int]] = [[] for _ in graph.values]
        for i, one in enumerate(self.ops):
            for v in one.reads:
                self.readers[v].append(i)
        self.own = [self.running(i, frozenset())[0] for i in range(len(self.ops))]
        self._make_flow(v for v, value in enumerate(graph.values) if value.pinned and self.nbytes[v])

    def _paid(self, values: Iterable[int]) -> Values:
        return frozenset(v for v in values if self.nbytes[v])

    def _make_flow(self, targets: Iterable[int]) -> None:
        """Edges: from the source to what is needed at the end, through each value, and on to its inputs.

        A value whose maker may not run leads to the sink instead, and so does one that nothing makes.
        """
        edges: list[tuple[int, int, int]] = []  # from, to, capacity
        self.source, self.sink = 2 * len(self.nbytes), 2 * len(self.nbytes) + 1
        self.keeping = np.zeros(len(self.nbytes), np.int64)  # per value its edge
        self.ending: list[list[int]] = [[] for _ in self.ops]  # per op the edges of what it makes to the sink
        for v in targets:
            edges.append((self.source, 2 * v, INFINITE))
        for v, nbytes in enumerate(self.nbytes):
            if not nbytes:
                continue
            self.keeping[v] = 2 * len(edges)
            edges.append((2 * v, 2 * v + 1, nbytes))
            maker = self.producer[v]
            if maker is None:
                edges.append((2 * v + 1, self.sink, INFINITE))
                continue
            self.ending[maker].append(2 * len(edges))
            edges.append((2 * v + 1, self.sink, 0))
            edges += ((2 * v + 1, 2 * u, INFINITE) for u in self.ops[maker].reads)
        node, edge = records(NODE, self.sink + 1), records(EDGE, 2 * len(edges))
        node["first"] = -1
        for e, (begin, end, capacity) in enumerate(edges):
            for side, (at, to, fixed) in enumerate(((begin, end, capacity), (end, begin, 0))):
                edge[2 * e + side] = (node["first"][at], to, fixed, 0)
                node["first"][at] = 2 * e + side
        self.flow = _Flow(node=node, edge=edge)

    def kept_nbytes(self, live: Iterable[int], allowed: Iterable[int]) -> int:
        """The fewest bytes next to `live` from which what is needed at the end is computed.

        Of the heavy ops only those in `allowed` may run.
        """
        from remat_solvers.kernels import last_run

        cleared = [self.keeping[v] for v in live]
        cleared += [e for i in allowed for e in self.ending[i]]
        return int(last_run.least_kept(self.flow, self.source, self.sink, np.array(cleared, np.int64)))

    def running(self, i: int, held: Values) -> tuple[int, Values]:
        """The least bytes live while op i runs next to what is held until after it, and the values."""
        op = self.ops[i]
        rest = held - op.may_make
        live = rest | op.reads
        takers = {made for made, _ in op.reuses}
        free = {source for _, source in op.reuses} & op.reads - rest
        new = [self.nbytes[v] for v in op.makes if v not in takers]
        # At most one output can take over each input.
        new += sorted((self.nbytes[v] for v in op.makes if v in takers), reverse=True)[len(free) :]
        nbytes = self.total(live) + sum(new) + op.workspace_nbytes
        return nbytes, live | op.may_make

    def total(self, values: Iterable[int]) -> int:
        """Their bytes."""
        return sum(self.nbytes[v] for v in values)

    def exceed(self, budget_nbytes: int, work: _Work, deadline: Deadline) -> bool:
        """Whether every schedule certainly exceeds the budget."""
        return any(_Heavy(self, budget_nbytes, share, work, deadline).remain() for share in HEAVY)


class _Heavy:
    """The heavy ops at one budget, of which those that may be the last to run are taken out."""

    def __init__(
        self, runs: LastRuns, budget_nbytes: int, share: float, work: _Work, deadline: Deadline
    ) -> None:
        self.runs, self.limit_nbytes = runs, budget_nbytes - runs.base_nbytes
        self.work, self.deadline = work, deadline
        self.small_nbytes = SMALL * budget_nbytes
        found = sorted((own, i) for i, own in enumerate(runs.own) if own >= share * budget_nbytes)
        self.ops = {i: own for own, i in found}  # with the bytes that each needs alone, which ascend
        self.most_kept_nbytes = 0  # next to no live values, if none of these ops may run
        # Sets from which paths go on, and the ops allowed there: with fewer heavy ops, or more that are
        # allowed, more of them do.
        self.alive: dict[Values, list[Values]] = {}

    def remain(self) -> bool:
        """Whether any are left when those that may be last are taken out; not if the search is cut short."""
        edge, ending = self.runs.flow.edge, self.runs.ending
        for edges in ending:
            edge["fixed"][edges] = 0
        for i in self.ops:
            edge["fixed"][ending[i]] = INFINITE
        before = -1
        while len(self.ops) != before:
            before = len(self.ops)
            self.most_kept_nbytes = self.kept_nbytes((), ())
            for i in list(self.ops):
                if self.may_be_last(i):
                    del self.ops[i]
                    edge["fixed"][ending[i]] = 0
        return bool(self.ops)

    def kept_nbytes(self, live: Iterable[int], allowed: Iterable[int]) -> int:
        """As `LastRuns.kept_nbytes`, counted as work."""
        self.work.left -= len(self.runs.ops)
        return self.runs.kept_nbytes(live, allowed)

    @property
    def cut_short(self) -> bool:
        """Whether the work or the time is used up; then any op may be last."""
        return self.work.left <= 0 or self.deadline.reached()

    def fits(self, nbytes: int, live: Iterable[int], allowed: Collection[int]) -> bool:
        """Whether `live` values, which take `nbytes`, fit next to what must be kept."""
        left_nbytes = self.limit_nbytes - nbytes
        if left_nbytes < 0 or self.most_kept_nbytes <= left_nbytes:
            return left_nbytes >= 0
        return self.kept_nbytes(live, allowed) <= left_nbytes

    def may_be_last(self, i: int) -> bool:
        """Whether a path of sets that fit leads back from the inputs of op i further than the search goes."""
        runs = self.runs
        if not self.fits(*runs.running(i, frozenset()), (i,)):
            return False
        number = count()
        first = self.large(runs.ops[i].reads)
        waiting: list[tuple[int, int, Values, Values, int, _Path | None]]
        waiting = [(runs.total(first), next(number), first, frozenset((i,)), 0, None)]
        seen: set[tuple[Values, Values]] = set()
        while waiting:
            _, _, held, later, steps, path = heapq.heappop(waiting)
            if (held, later) in seen:
                continue
            seen.add((held, later))
            path = _Path(held, later, path)
            allowed = self.between(held, later)
            makers = {maker for v in held if (maker := runs.producer[v]) is not None}
            known = any(other <= later for other in self.alive.get(held, ()))
            ended = len(seen) > MOST_SETS or self.cut_short
            if known or ended or steps > STEPS or not makers:
                self.mark(path)
                return True
            if len(allowed) == len(self.ops):
                steps += 1
            for maker in makers:
                if self.fits(*runs.running(maker, held), allowed):
                    before = held - runs.ops[maker].may_make | self.large(runs.ops[maker].reads)
                    after = allowed | {maker} if maker in self.ops else allowed
                    heapq.heappush(waiting, (runs.total(before), next(number), before, after, steps, path))
        return False

    def mark(self, path: "_Path | None") -> None:
        """Note of all sets of a path that it goes on from there."""
        while path is not None:
            self.alive.setdefault(path.held, []).append(path.later)
            path = path.before

    def large(self, values: Values) -> Values:
        return frozenset(v for v in values if self.runs.nbytes[v] >= self.small_nbytes)

    def between(self, held: Values, later: Values) -> Values:
        """The heavy ops that may run while `held` is live or, as those of `later` may, after that."""
        runs, nbytes = self.runs, self.runs.total(held)
        near = {i for v in held for i in runs.readers[v] if i in self.ops}
        asked: list[tuple[int, int, Values]] = []
        for i, own in self.ops.items():
            if i in later or not runs.ops[i].may_make.isdisjoint(held):
                continue
            if i not in near and nbytes + own > self.limit_nbytes:
                continue
            needed, live = runs.running(i, held)
            if needed <= self.limit_nbytes:
                asked.append((needed, i, live))
        allowed = set(later)
        while asked:
            # One cut for all: next to the values of all of them less must be kept than next to those of one.
            # A cut for each took twenty times as long, and raised one floor of nine by more than 0.05.
            least = self.kept_nbytes(held.union(*(live for _, _, live in asked)), allowed)
            fitting = {i for needed, i, _ in asked if needed + least <= self.limit_nbytes}
            if not fitting:
                break
            allowed |= fitting
            asked = [each for each in asked if each[1] not in fitting]
        return frozenset(allowed)


class _Path(NamedTuple):
    """A set of values that are live at once, the heavy ops that may run after that, and what led to it."""

    held: Values
    later: Values
    before: "_Path | None"
