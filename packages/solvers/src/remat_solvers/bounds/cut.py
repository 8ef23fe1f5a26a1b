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

One max-flow takes about 1 ms at 600 ops. All j are tried at the best price so far, and the price is then
searched for the most promising ones only; that gives up little, since neighbouring ops agree on the price.

Imperfect: it looks at one moment at a time, so peaks that interact are not seen (U-Net at 30 %: 15 of 21.5
%).
"""

import attrs
import numpy as np

from remat_graph import Graph
from remat_solvers.bounds.floor import budget_floor, unavoidable
from remat_solvers.bounds.relatives import Relatives, members, relatives
from remat_solvers.evaluate import Ints
from remat_solvers.protocol import Deadline

TICKS = (
    10**9
)  # of base time: costs are rounded down to integers, so that flows are exact and the bound stays valid
INFINITE = 1 << 60
MOMENTS = 250_000  # (moment, op) pairs to look at: about a second; all moments up to 700 ops


@attrs.frozen(kw_only=True, eq=False)
class _Moment:
    """The cut problem at one backward op: nodes are ops, values, source, sink."""

    room: int
    first: Ints
    edge_next: Ints
    edge_to: Ints
    fixed: Ints  # capacity without price
    size: Ints  # capacity per unit of price
    largest: int


def lower_bound(graph: Graph, budget_nbytes: int, deadline: Deadline | None = None) -> float:
    """Seconds that no valid schedule within the budget stays below; infinite if none can exist.

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

    def __init__(self, graph: Graph, kin: Relatives | None = None) -> None:
        self.graph = graph
        self.kin = kin or relatives(graph)
        self.tick_s = graph.time_s / TICKS
        self.candidates = [i for i, op in enumerate(graph.ops) if op.backward]
        self._moments: dict[int, _Moment] = {}
        self._binding: tuple[int, float] | None = None

    def extra_s(self, budget_nbytes: int, deadline: Deadline) -> float:
        """Seconds of recomputation that no schedule within the budget avoids."""
        if not self.tick_s > 0:
            return 0.0
        sizes = [self.graph.allocated_nbytes(v) for v in range(len(self.graph.values))]
        mean = sum(sizes) / max(1, sum(size > 0 for size in sizes))
        price = TICKS / max(1, len(self.graph.ops)) / max(1.0, mean)
        best = 0.0
        scores = dict.fromkeys(self.candidates, 0.0)
        for sweep in range(3):
            for i in self._order(sweep, max(scores, key=scores.__getitem__, default=0)):
                if deadline.reached():
                    break
                scores[i] = max(scores[i], self._at(i, budget_nbytes, price))
            for i in sorted(self.candidates, key=lambda i: -scores[i])[: 6 if sweep else 3]:
                if deadline.reached() or (scores[i] <= 0 and best > 0):
                    break
                value, at = self._best_price(i, budget_nbytes, price)
                if value > best:
                    best, price = value, at
                    self._binding = i, at
        return best * self.tick_s * (1 - 1e-9)

    def binding(self) -> tuple[int, set[int]] | None:
        """After `extra_s`: the op that binds and the values that its cut keeps; None if nothing binds."""
        if self._binding is None:
            return None
        i, price = self._binding
        return i, self.kept(i, price * 1.001)  # rather a value less than one too many

    def kept(self, i: int, price: float) -> set[int]:
        """The values that the cut at the first run of op `i` keeps, at a price in ticks per byte."""
        self._at(i, 0, price)
        moment = self._moments[i]
        capacity = _capacity(moment, price)
        _flow(moment, capacity)
        nodes, ops = len(moment.first), len(self.graph.ops)
        reached, waiting = {nodes - 2}, [nodes - 2]
        while waiting:
            e = moment.first[waiting.pop()]
            while e >= 0:
                y = int(moment.edge_to[e])
                if capacity[e] > 0 and y not in reached:
                    reached.add(y)
                    waiting.append(y)
                e = moment.edge_next[e]
        producer = self.graph.producer
        kept = {x - ops for x in reached if ops <= x < nodes - 2 and producer[x - ops] not in reached}
        return kept | unavoidable(self.graph, self.kin, i) | set(self.graph.ops[i].first.inputs)

    def _order(self, sweep: int, best: int) -> list[int]:
        """A coarse sample, whose best op gives the price; as many as time allows; the best's neighbours."""
        stride = max(1, len(self.candidates) // max(24, MOMENTS // max(1, len(self.graph.ops))))
        if sweep == 0:
            return self.candidates[:: max(1, len(self.candidates) // 12)]
        if sweep == 1:
            return self.candidates[::stride]
        if stride == 1 or best not in self.candidates:
            return []
        middle = self.candidates.index(best)
        return self.candidates[max(0, middle - stride) : middle + stride]

    def _best_price(self, i: int, budget: int, price: float) -> tuple[float, float]:
        """Golden-section search on the logarithm of the price; the bound is concave in the price."""
        ratio = 0.618
        low, high = np.log(price) - 4.0, np.log(price) + 4.0
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        at_left, at_right = (
            self._at(i, budget, float(np.exp(left))),
            self._at(i, budget, float(np.exp(right))),
        )
        best = max((at_left, float(np.exp(left))), (at_right, float(np.exp(right))))
        for _ in range(14):
            if at_left >= at_right:
                high, right, at_right = right, left, at_left
                left = high - ratio * (high - low)
                at_left = self._at(i, budget, float(np.exp(left)))
            else:
                low, left, at_left = left, right, at_right
                right = low + ratio * (high - low)
                at_right = self._at(i, budget, float(np.exp(right)))
            best = max(best, (at_left, float(np.exp(left))), (at_right, float(np.exp(right))))
        return best

    def _at(self, i: int, budget: int, price: float) -> float:
        """The bound at op i for a price in ticks per byte."""
        moment = self._moments.get(i)
        if moment is None:
            moment = self._moments[i] = self._moment(i)
        room = budget - moment.room
        if moment.largest * price > 1e17:
            return 0.0
        cut = _flow(moment, _capacity(moment, price))
        return float(cut - np.ceil(price * room))

    def _moment(self, i: int) -> _Moment:
        graph, kin = self.graph, self.kin
        ops = len(graph.ops)
        source, sink = ops + len(graph.values), ops + len(graph.values) + 1
        coming = kin.descendants[i] | 1 << i
        there = unavoidable(graph, kin, i) | {v for v in graph.ops[i].first.inputs if not kin.free[v]}
        reusable = {made for made, _ in graph.ops[i].first.reuses}
        made = sum(
            graph.allocated_nbytes(v)
            for v in graph.ops[i].first.outputs
            if not kin.free[v] and v not in reusable and v not in there
        )
        room = (
            kin.base_nbytes
            + sum(map(graph.allocated_nbytes, there))
            + made
            + graph.ops[i].first.workspace_nbytes
        )
        edges: list[tuple[int, int, int, int]] = []  # from, to, fixed capacity, bytes
        reached: set[int] = set()
        waiting: list[int] = []

        def need(node: int, v: int) -> None:
            maker = graph.producer[v]
            if kin.free[v] or v in there or maker is None or coming >> maker & 1:
                return
            edges.append((node, ops + v, INFINITE, 0))
            if ops + v not in reached:
                reached.add(ops + v)
                size = graph.allocated_nbytes(v)
                if v in kin.remakeable or self._may_not_have_run(i, maker):
                    edges.append((ops + v, maker, 0, size))
                    if maker not in reached:
                        reached.add(maker)
                        waiting.append(maker)
                else:
                    edges.append((ops + v, sink, 0, size))

        for x in members(kin.descendants[i]):
            for v in graph.ops[x].first.inputs:
                need(source, v)
        while waiting:
            x = waiting.pop()
            op = graph.ops[x]
            if self._may_not_have_run(i, x):
                inputs = set(op.first.inputs)
                if op.rerun is not None:
                    inputs &= set(op.implementations[op.rerun].inputs)
            else:
                again = op.implementations[op.rerun or 0]
                edges.append((x, sink, int(again.time_s / self.tick_s), 0))
                inputs = set(again.inputs)
            for v in sorted(inputs):
                need(x, v)
        return _build(room, sink + 1, edges)

    def _may_not_have_run(self, i: int, x: int) -> bool:
        if self.kin.ancestors[i] >> x & 1:
            return False
        return self.graph.ops[x].backward or not self.kin.after_boundary[i]


def _capacity(moment: _Moment, price: float) -> Ints:
    capacity: Ints = moment.fixed + np.floor(moment.size * price).astype(np.int64)
    return capacity


def _flow(moment: _Moment, capacity: Ints) -> int:
    from remat_solvers.kernels_flow import max_flow

    nodes = len(moment.first)
    return int(
        max_flow(
            nodes,
            nodes - 2,
            nodes - 1,
            moment.first,
            moment.edge_next,
            moment.edge_to,
            capacity,
            np.empty((4, nodes + 1), np.int64),
        )
    )


def _build(room: int, nodes: int, edges: list[tuple[int, int, int, int]]) -> _Moment:
    count = 2 * len(edges)
    first = np.full(nodes, -1, np.int64)
    edge_next, edge_to = np.empty(count, np.int64), np.empty(count, np.int64)
    fixed, size = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for e, (start, end, capacity, nbytes) in enumerate(edges):
        for index, a, b in ((2 * e, start, end), (2 * e + 1, end, start)):
            edge_to[index] = b
            edge_next[index] = first[a]
            first[a] = index
        fixed[2 * e], size[2 * e] = capacity, nbytes
    return _Moment(
        room=room,
        first=first,
        edge_next=edge_next,
        edge_to=edge_to,
        fixed=fixed,
        size=size,
        largest=int(size.max(initial=0)),
    )
