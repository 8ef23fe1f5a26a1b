"""A lower bound on a step's compute time at a budget, valid for any order and any number of recomputations.

Take a backward op j at its first run. Every ancestor of j has run by then, and, if j depends on a tangent,
every forward op; j and its descendants have not. Let K be the values live at that moment. K, what j makes
and its workspace fit the budget. Everything that j's descendants need from now on is in K or is made from
K, and running an op again that has run before costs its time. So

    overhead  >=  min over K with bytes(K) <= room_j of  cost of remaking, from K, what the descendants need

where room_j is the budget less what is certainly there (`floor.unavoidable`, j's own inputs and outputs).
For a price per byte instead of the knapsack row this minimum is a minimum cut (keep or remake, a submodular
choice), and every price gives a valid bound: bound_j(price) = cut_j(price) - price * room_j, concave in the
price. The bound is the largest over j and price. Ops that are no descendants of j but may not have run yet
cost nothing to run.

All j are tried at the best price so far, and the price is then searched for the most promising ones only;
that gives up little, since neighbouring ops agree on the price. Laying out a moment and one max-flow take
some 0.1 ms together at 600 ops, so all of them take a tenth of a second.

Imperfect: it looks at one moment at a time, so peaks that interact are not seen (U-Net at 30 %: 15 of 21.5
%).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat_graph import Graph
from remat_solvers.bounds.floor import budget_floor
from remat_solvers.bounds.reachability import Reachability, reachability
from remat_solvers.evaluation.arrays import Bools, Floats, Ints, compressed, records
from remat_solvers.protocol import Deadline

# Costs are rounded down to integers, so that flows are exact and the bound stays valid: so many for all ops,
# if each of them were a usual one, and at most so many for one.
TICKS = 10**9
MOST_TICKS = 1 << 48
PAIRS = 12_000_000  # (moment, op) pairs a sweep: every moment up to some 4,500 ops, a sample beyond
FEW = 12  # moments of the first sample
CHUNK = 32  # moments between two looks at the clock
SWEEPS = 3  # at most, over all moments
SEARCHED = 8  # moments a sweep at which the price is searched for
STEPS = 20  # of that search
WIDE, NARROW = 16.0, 4.0  # how far from the price so far, as a logarithm


class CutGraph(NamedTuple):
    """What the compiled cut problems read: few record arrays, which compile fast."""

    op: NDArray[Any]  # per op; `reads`, `again`, `both` and `makes` begin its parts of `idx`
    value: NDArray[Any]  # per value; `readers` begins its part of `idx`
    idx: Ints
    new: Bools  # per entry of `idx`: a value made that certainly needs storage of its own
    sticky: Ints  # values that cannot be given up freely
    base: int  # bytes held throughout


class CutWorkspace(NamedTuple):
    """Room for one cut problem at a time."""

    node: NDArray[Any]
    edge: NDArray[Any]
    meta: np.void  # scalars, one record


OP = "reads reads_end again again_end both both_end makes makes_end ticks workspace backward after"
VALUE = "readers readers_end producer size remakeable pinned tangent"
NODE = "relation there from_source first reached queue level at path"
META = "edges room largest"
EDGE = "next to fixed size capacity"  # `fixed` is capacity without price, `size` capacity per unit of price


def lower_bound(graph: Graph, budget_nbytes: int, deadline: Deadline | None = None) -> float:
    """Seconds that no valid schedule within the budget stays below; infinite if none can exist.

    Of schedules that move nothing and whose first runs use first implementations, as those of
    `Schedule.from_order` do.

    Args:
        graph: the training step.
        budget_nbytes: bound on the peak.
        deadline: stops early with what is proven so far.
    """
    if budget_nbytes < budget_floor(graph).nbytes:
        return float("inf")
    return graph.time_s + CutBound(graph).extra_s(budget_nbytes, deadline or Deadline())


class CutBound:
    """The bound of one graph for any number of budgets."""

    def __init__(self, graph: Graph, reach: Reachability | None = None) -> None:
        self.graph = graph
        self.reach = reach or reachability(graph)
        self.tick_s = _usual_s(graph) * len(graph.ops) / TICKS
        self.candidates = np.array([i for i, op in enumerate(graph.ops) if op.backward], np.int64)
        self.flat = _flatten(graph, self.reach, self.tick_s)
        self._cut_workspace = _cut_workspace(self.flat)
        self._scores: Floats = np.zeros(len(graph.ops))
        self._best, self._price, self._at = 0.0, 0.0, -1
        self.proven_s = 0.0  # what `extra_s` said last

    def extra_s(self, budget_nbytes: int, deadline: Deadline) -> float:
        """Seconds of recomputation that no schedule within the budget avoids."""
        self._best, self._at, self.proven_s = 0.0, -1, 0.0
        if not self.tick_s > 0 or not len(self.candidates):
            return 0.0
        sizes = self.flat.value["size"]
        mean = sizes.sum() / max(1, np.count_nonzero(sizes))
        self._price = TICKS / max(1, len(self.graph.ops)) / max(1.0, float(mean))
        # Few ops give a price; then all of them, until the best one's price is the one they were tried at.
        few = self.candidates[:: max(1, len(self.candidates) // FEW)]
        stride = -(-len(self.candidates) * len(self.graph.ops) // PAIRS)
        self._look_at(few, budget_nbytes, deadline, wide=True)
        for _ in range(SWEEPS):
            tried = self._price
            self._look_at(self.candidates[::stride], budget_nbytes, deadline)
            if self._price == tried:
                break
        if stride > 1 and self._at >= 0:
            middle = int(np.searchsorted(self.candidates, self._at))
            near = self.candidates[max(0, middle - stride) : middle + stride]
            self._look_at(near, budget_nbytes, deadline)
        self.proven_s = self._best * self.tick_s * (1 - 1e-9)
        return self.proven_s

    def _look_at(self, ops: Ints, budget_nbytes: int, deadline: Deadline, *, wide: bool = False) -> None:
        """Try ops at the best price so far, and search for the best price of the most promising ones."""
        from remat_solvers.kernels import cut

        scores = self._scores
        ops = np.ascontiguousarray(ops)
        for start in range(0, len(ops), CHUNK):
            if deadline.reached():
                return
            chunk = ops[start : start + CHUNK]
            cut.sweep(self.flat, self._cut_workspace, chunk, budget_nbytes, self._price, scores)
        for i in sorted(ops.tolist(), key=lambda i: -scores[i])[:SEARCHED]:
            if deadline.reached() or (scores[i] <= 0 and self._best > 0):
                return
            bound, price = self._best_price(i, budget_nbytes, WIDE if wide else NARROW)
            if bound > self._best:
                self._best, self._price, self._at = bound, price, i

    def _best_price(self, i: int, budget_nbytes: int, range_: float) -> tuple[float, float]:
        """The best bound at op i and its price: golden sections of the logarithm, the bound being concave."""
        ratio = 0.618
        low, high = np.log(self._price) - range_, np.log(self._price) + range_
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        at_left, at_right = self._bound(i, budget_nbytes, left), self._bound(i, budget_nbytes, right)
        best = max((at_left, left), (at_right, right))
        for _ in range(STEPS):
            if at_left >= at_right:
                high, right, at_right = right, left, at_left
                left = high - ratio * (high - low)
                at_left = self._bound(i, budget_nbytes, left)
            else:
                low, left, at_left = left, right, at_right
                right = low + ratio * (high - low)
                at_right = self._bound(i, budget_nbytes, right)
            best = max(best, (at_left, left), (at_right, right))
        return best[0], float(np.exp(best[1]))

    def _bound(self, i: int, budget_nbytes: int, log_price: float) -> float:
        """The bound in ticks at op i."""
        from remat_solvers.kernels import cut

        price = float(np.exp(log_price))
        cut.sweep(self.flat, self._cut_workspace, np.array([i], np.int64), budget_nbytes, price, self._scores)
        return float(self._scores[i])

    def binding(self) -> tuple[int, set[int]] | None:
        """After `extra_s`: the op that binds and the values that its cut keeps; None if nothing binds."""
        if self._at < 0:
            return None
        return self._at, self.kept(self._at, self._price * 1.001)  # rather a value less than one too many

    def kept(self, i: int, price: float) -> set[int]:
        """The values that the cut at the first run of op `i` keeps, at a price in ticks per byte."""
        from remat_solvers.kernels import cut

        cut.sweep(self.flat, self._cut_workspace, np.array([i], np.int64), 0, float(price), self._scores)
        cut.mark_kept(self.flat, self._cut_workspace)
        return set(np.flatnonzero(self._cut_workspace.node["there"][: len(self.graph.values)]).tolist())


def _usual_s(graph: Graph) -> float:
    """The median time of what takes time: one op that dwarfs all others must not round them away."""
    times = [op.first.time_s for op in graph.ops if op.first.time_s > 0]
    return float(np.median(times)) if times else 0.0


def _flatten(graph: Graph, reach: Reachability, tick_s: float) -> CutGraph:
    values, ops = graph.values, graph.ops

    def paid(some: Iterable[int]) -> list[int]:
        return [v for v in some if not reach.free[v]]

    again = [op.first if op.rerun is None else op.implementations[op.rerun] for op in ops]
    firsts = [paid(op.first.inputs) for op in ops]
    agains = [paid(way.inputs) for way in again]
    made = [paid(op.first.outputs) for op in ops]
    reusable = [{output for output, _ in op.first.reuses} for op in ops]
    readers: list[list[int]] = [[] for _ in values]
    for i, inputs in enumerate(firsts):
        for v in inputs:
            readers[v].append(i)
    both = [[v for v in one if v in set(other)] for one, other in zip(firsts, agains, strict=True)]
    op, value = records(OP, len(ops)), records(VALUE, len(values))
    parts, begin, begins = [], 0, {}
    for table, field, rows in (
        (op, "reads", firsts),
        (op, "again", agains),
        (op, "both", both),
        (op, "makes", made),
        (value, "readers", readers),
    ):
        pointers, indices = compressed(rows)
        table[field], table[f"{field}_end"] = pointers[:-1] + begin, pointers[1:] + begin
        parts.append(indices)
        begins[field] = begin
        begin += len(indices)
    new = np.zeros(begin, np.uint8)
    own = [v not in reusable[i] for i, outputs in enumerate(made) for v in outputs]
    new[begins["makes"] :][: len(own)] = own
    op["ticks"] = [int(min(MOST_TICKS, way.time_s / tick_s)) if tick_s > 0 else 0 for way in again]
    op["workspace"] = [each.first.workspace_nbytes for each in ops]
    op["backward"] = [each.backward for each in ops]
    op["after"] = reach.after_boundary
    value["producer"] = [-1 if maker is None else maker for maker in graph.producer]
    value["pinned"] = [each.pinned for each in values]
    for v in range(len(values)):
        value["size"][v] = 0 if reach.free[v] else graph.allocated_nbytes(v)
        value["remakeable"][v] = v in reach.remakeable
        value["tangent"][v] = v in reach.tangent_set
    return CutGraph(
        op=op,
        value=value,
        idx=np.concatenate(parts),
        new=new,
        sticky=np.array(sorted(reach.sticky), np.int64),
        base=reach.base_nbytes,
    )


def _cut_workspace(flat: CutGraph) -> CutWorkspace:
    ops, values = len(flat.op), len(flat.value)
    # A value is needed once by the source and once by each reader, and has an edge of its own, as ops have.
    edges = 2 * (len(flat.idx) + 2 * values + ops) + 2
    return CutWorkspace(
        node=records(NODE, ops + values + 2), edge=records(EDGE, edges), meta=records(META, 1)[0]
    )
