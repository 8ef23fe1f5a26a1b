"""A lower bound on a step's compute time at a budget, valid for any order and any number of recomputations.

Take a backward op j at its first run. Every ancestor of j has run by then, and, if j depends on a tangent,
every forward op; j and its descendants have not. Let K be the values live at that moment. K, the outputs of j
and its workspace fit the budget. Everything that j's descendants need from now on is in K or is computed from
K, and running an op again costs its time. A gradient that may have been computed already is in K, or what it
is computed from is needed too. So

    overhead  >=  min over K with bytes(K) <= headroom_j  of  cost of computing, from K, what they need

where headroom_j is the budget less what is certainly live (`budget_bound.certainly_live`, j's own inputs and
outputs). With a price per byte instead of the knapsack row this minimum is a minimum cut (keep or recompute,
a submodular choice), and every price gives a valid bound: bound_j(price) = cut_j(price) - price * headroom_j,
concave in the price. The bound is the largest over j and price. Ops that are no descendants of j but may not
have run yet cost nothing to run.

All j are tried at the best price so far, and the price is then searched for the most promising ones only;
that loses little, since neighbouring ops agree on the price. At a new price an op is tried again only if its
tangent at the price before is above the best bound. Two threads; 60 ms at 1,200 ops.

Imperfect: the bound considers one moment at a time and misses interacting peaks (U-Net at 30 %: 15 of 21.5
%).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat_graph import Graph
from remat_solvers.bounds.budget_bound import budget_floor
from remat_solvers.bounds.reachability import Reachability, reachability
from remat_solvers.evaluation.arrays import Bools, Floats, Ints, compressed, records
from remat_solvers.protocol import Deadline
from remat_solvers.running.parallel import LANES, in_parallel

# Costs are rounded down to integers, so that flows are exact and the bound stays valid: TICKS for all ops if
# each took the median time, and at most MOST_TICKS for one.
TICKS = 10**9
MOST_TICKS = 1 << 48
PAIRS = 12_000_000  # (moment, op) pairs a sweep: every moment up to some 4,500 ops, a sample beyond
FEW = 12  # moments of the first sample
CHUNK = 32  # moments between two checks of the deadline
SWEEPS = 3  # at most, over all moments
SEARCHED = 8  # moments a sweep at which the price is searched for
STEPS = 20  # of that search, at most
WIDE, NARROW = 16.0, 4.0  # search range around the price so far, as a logarithm
FACTOR = 4.0  # of the first change of the price
CLOSE = 1e-6  # a share of the bound that is not worth another step


class CutGraph(NamedTuple):
    """Input of the compiled cut problems: few record arrays, which compile fast."""

    op: NDArray[Any]  # per op; `reads`, `again`, `both` and `makes` begin its parts of `idx`
    value: NDArray[Any]  # per value; `readers` begins its part of `idx`
    idx: Ints
    new: Bools  # per entry of `idx`: an output that certainly needs its own storage
    sticky: Ints  # values that cannot be freed at will
    base: int  # bytes held throughout


class Work(NamedTuple):
    """Working memory for one cut problem at a time."""

    node: NDArray[Any]
    edge: NDArray[Any]
    meta: np.void  # scalars, one record


OP = "reads reads_end again again_end both both_end makes makes_end ticks workspace backward after"
VALUE = "readers readers_end producer size recomputable pinned tangent"
NODE = "relation there from_source first reached queue level at path"
META = "edges held largest built"
TANGENT = "bound:f8 slope:f8 price:f8"  # the bound in ticks at one price per byte, its change with the price
EDGE = "next to fixed size capacity"  # `fixed` is capacity without price, `size` capacity per unit of price


def lower_bound(graph: Graph, budget_nbytes: int, deadline: Deadline | None = None) -> float:
    """Seconds that no valid schedule within the budget beats; infinite if none can exist.

    For schedules without transfers whose first runs use first implementations and in which gradients stay to
    the end, as those of `Schedule.from_order`.

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
        self._works = [_work(self.flat) for _ in range(LANES)]
        self._tangents = records(TANGENT, len(graph.ops))
        self._searched: set[int] = set()  # ops whose best price is known
        self._best, self._price, self._at = 0.0, 0.0, -1
        self.proven_s = 0.0  # the last result of `extra_s`

    def extra_s(self, budget_nbytes: int, deadline: Deadline) -> float:
        """Seconds of recomputation that no schedule within the budget avoids."""
        self._best, self._at, self.proven_s = 0.0, -1, 0.0
        if not self.tick_s > 0 or not len(self.candidates):
            return 0.0
        sizes = self.flat.value["size"]
        mean = sizes.sum() / max(1, np.count_nonzero(sizes))
        self._price = TICKS / max(1, len(self.graph.ops)) / max(1.0, float(mean))
        self._tangents["bound"], self._tangents["slope"] = np.inf, 0.0
        self._searched.clear()
        # A few ops give a price; then all ops are tried until the best price no longer changes.
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
        """Try ops at the best price so far, and search for the best price of promising ones."""
        hopeful = ops[self._at_most(ops) > self._best]
        sweeps = [
            partial(self._sweep, work, hopeful[lane::LANES], budget_nbytes)
            for lane, work in enumerate(self._works)
        ]
        in_parallel(sweeps, deadline)
        most = dict(zip(ops.tolist(), self._at_most(ops).tolist(), strict=True))
        for i in sorted(most.keys() - self._searched, key=lambda i: (-most[i], i))[:SEARCHED]:
            if deadline.reached() or (most[i] <= 0 and self._best > 0):
                return
            bound, price = self._best_price(i, budget_nbytes, WIDE if wide else NARROW)
            self._searched.add(i)
            if bound > self._best:
                self._best, self._price, self._at = bound, price, i

    def _at_most(self, ops: Ints) -> Floats:
        """At the best price so far, what the bounds of ops do not exceed: they are concave in the price."""
        known = self._tangents[ops]
        most: Floats = known["bound"] + known["slope"] * (self._price - known["price"])
        return most

    def _sweep(self, work: Work, ops: Ints, budget_nbytes: int, deadline: Deadline) -> None:
        """Bound the step at each of the ops, at the best price so far."""
        from remat_solvers.kernels import time_bound

        for start in range(0, len(ops), CHUNK):
            if deadline.reached():
                return
            chunk = np.ascontiguousarray(ops[start : start + CHUNK])
            time_bound.sweep(self.flat, work, chunk, budget_nbytes, self._price, self._tangents)

    def _best_price(self, i: int, budget_nbytes: int, range_: float) -> tuple[float, float]:
        """The best bound at op i, which is concave in the price, and its price: lines that meet.

        The next price tried is where the tangents on both sides of the best meet (the cutting planes of J. E.
        Kelley, 1960); before there is one on both sides, the price changes by growing factors.
        """
        price, best = self._price, (-np.inf, self._price)
        least, most = price * np.exp(-range_), price * np.exp(range_)
        below = above = None
        factor = FACTOR
        for _ in range(STEPS):
            bound, slope = self._bound(i, budget_nbytes, price)
            best = max(best, (bound, price))
            if slope == 0:
                break
            if slope > 0:
                below = (price, bound, slope)
            else:
                above = (price, bound, slope)
            if below is None or above is None:
                if not least < price < most:
                    break
                price = min(most, price * factor) if slope > 0 else max(least, price / factor)
                factor *= factor
                continue
            (low, at_low, rise), (high, at_high, fall) = below, above
            price = (at_high - at_low + rise * low - fall * high) / (rise - fall)
            if not low < price < high or at_low + rise * (price - low) - best[0] <= CLOSE * abs(best[0]):
                break
        return best

    def _bound(self, i: int, budget_nbytes: int, price: float) -> tuple[float, float]:
        """The bound in ticks at op i, and its change per unit of price."""
        from remat_solvers.kernels import time_bound

        chosen = np.array([i], np.int64)
        time_bound.sweep(self.flat, self._works[0], chosen, budget_nbytes, price, self._tangents)
        tangent = self._tangents[i]
        return float(tangent["bound"]), float(tangent["slope"])

    @property
    def binding_op(self) -> int | None:
        """After `extra_s`: the op at whose first run memory binds; None if it binds at none."""
        return None if self._at < 0 else self._at

    def binding(self) -> tuple[int, set[int]] | None:
        """After `extra_s`: the binding op and the values that its cut keeps; None if none binds."""
        if self.binding_op is None:
            return None
        # The price is slightly higher, to keep rather too few values.
        return self.binding_op, self.kept(self.binding_op, self._price * 1.001)

    def kept(self, i: int, price: float) -> set[int]:
        """The values that the cut at the first run of op `i` keeps, at a price in ticks per byte."""
        from remat_solvers.kernels import time_bound

        work, chosen = self._works[0], np.array([i], np.int64)
        time_bound.sweep(self.flat, work, chosen, 0, float(price), records(TANGENT, len(self.graph.ops)))
        time_bound.mark_kept(self.flat, work)
        return set(np.flatnonzero(work.node["there"][: len(self.graph.values)]).tolist())


def _usual_s(graph: Graph) -> float:
    """The median of the positive op times, so that one dominant op does not round all others to 0."""
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
        value["recomputable"][v] = v in reach.recomputable
        value["tangent"][v] = v in reach.tangent_set
    return CutGraph(
        op=op,
        value=value,
        idx=np.concatenate(parts),
        new=new,
        sticky=np.array(sorted(reach.sticky), np.int64),
        base=reach.base_nbytes,
    )


def _work(flat: CutGraph) -> Work:
    ops, values = len(flat.op), len(flat.value)
    # A value is needed once by the source and once by each reader; it has its own edge, as each op has.
    edges = 2 * (len(flat.idx) + 2 * values + ops) + 2
    meta = records(META, 1)[0]
    meta["built"] = -1
    return Work(node=records(NODE, ops + values + 2), edge=records(EDGE, edges), meta=meta)
