"""The time and memory frontier of op orders: an order for any activation budget, by eviction and a polish.

The search over placements asks for orders at many budgets; which budget it needs depends on the copies that
overlap with compute. The portfolio would take seconds for each. Greedy eviction continues from the next
larger budget, so that a point costs one polish. Where eviction gets stuck, the table over intervals takes
over, and at the lower end the search for the smallest peak. On a Llama of 3,811 ops, one core of a server:
0.3 s a point, and orders as fast as the portfolio finds in 10 s.

Imperfect: the frontier ignores transfers. An order recomputes what costs little time per byte and keeps the
rest for the links, wherever it lies in the step.
"""

from collections.abc import Sequence
from operator import itemgetter

import attrs
import numpy as np

from remat_graph import Graph, Role
from remat_solvers.bounds import budget_floor
from remat_solvers.evaluation.arrays import Ints, evaluate, flatten
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.min_peak import minimize_peak
from remat_solvers.local_search.polish import polish
from remat_solvers.methods.interval_dp import plan
from remat_solvers.offload.training_problem import UpdateMode
from remat_solvers.protocol import Deadline

LEVELS = 10  # between the unplanned peak and the floor
SHORT = 500  # ops, up to which eviction is tried for the smallest peak as well
MIN_PEAK_MOVES, MIN_PEAK_S = 20_000, 5.0  # limits of the search for the smallest peak


@attrs.frozen(kw_only=True, eq=False)
class FrontierPoint:
    """An order."""

    nbytes: int  # its peak without parameters and states
    time_s: float  # its compute time
    order: tuple[int, ...]  # the ops


class OrderFrontier:
    """Orders of a training step by their peak; the mode decides whether gradients stay."""

    def __init__(self, graph: Graph, mode: UpdateMode, deadline: Deadline) -> None:
        self.graph = _without_placement(graph, keep_gradients=not (mode.adds_gradients or mode.in_backward))
        self.deadline = deadline
        self.arrays = flatten(self.graph)
        self.floor_nbytes = budget_floor(self.graph).nbytes
        trace: Ints = np.arange(len(graph.ops), dtype=np.int64)
        self.evicted = [(evaluate(self.arrays, trace).peak_nbytes, trace)]
        self.known: dict[int, FrontierPoint] = {}
        self.top = self._add(trace)
        self.least = self._smallest_peak()
        span = self.top.nbytes - self.least.nbytes
        self.levels = sorted({self.least.nbytes + span * i // LEVELS for i in range(LEVELS + 1)})

    def at(self, budget_nbytes: int) -> FrontierPoint:
        """The fastest order found for a budget; below the smallest known peak, the order with that peak."""
        budget_nbytes = min(max(budget_nbytes, self.least.nbytes), self.top.nbytes)
        if budget_nbytes not in self.known:
            self.known[budget_nbytes] = self._find(budget_nbytes)
        fitting = [point for point in self.known.values() if point.nbytes <= budget_nbytes]
        return min(fitting, key=lambda point: point.time_s)

    def curve(self) -> list[FrontierPoint]:
        """The orders of all levels by memory; the two ends only where the deadline is reached."""
        found = [self.at(level) for level in reversed(self.levels) if not self.deadline.reached()]
        return found[::-1] if len(found) > 1 else [self.least, self.top]

    def _find(self, budget_nbytes: int) -> FrontierPoint:
        above = [pair for pair in self.evicted if pair[0] > budget_nbytes]
        start = min(above, key=itemgetter(0), default=self.evicted[0])
        order = evict(self.arrays, budget_nbytes, self.deadline, start[1])
        peak = evaluate(self.arrays, order).peak_nbytes
        if peak <= budget_nbytes:
            self.evicted.append((peak, order))
            return self._add(polish(self.arrays, order, budget_nbytes, self.deadline))
        planned = plan(self.graph, self.arrays, budget_nbytes, self.deadline)
        if planned is not None:
            return self._add(polish(self.arrays, planned, budget_nbytes, self.deadline))
        return self.least

    def _smallest_peak(self) -> FrontierPoint:
        """The order with the smallest peak: the table's if it finds one near the floor, else a search's.

        For a short order eviction is tried as well, because the table knows only one form of plan.
        """
        found = self._near_floor()
        if len(self.graph.ops) <= SHORT:
            order = evict(self.arrays, self.floor_nbytes, self.deadline, self.evicted[0][1])
            found = min(found, self._polished(order), key=lambda point: point.nbytes)
        return found

    def _near_floor(self) -> FrontierPoint:
        for part in (1, 2, 4, 8, 16):
            budget = self.floor_nbytes + (self.top.nbytes - self.floor_nbytes) * part // 64
            planned = plan(self.graph, self.arrays, budget, self.deadline)
            if planned is not None:
                return self._add(polish(self.arrays, planned, budget, self.deadline))
        deadline = self.deadline.within(MIN_PEAK_S)
        return self._polished(
            minimize_peak(self.arrays, self.floor_nbytes, self.floor_nbytes, deadline, moves=MIN_PEAK_MOVES)
        )

    def _polished(self, order: Ints) -> FrontierPoint:
        """The order, made faster within its own peak."""
        peak = evaluate(self.arrays, order).peak_nbytes
        return self._add(polish(self.arrays, order, peak, self.deadline))

    def _add(self, order: Ints) -> FrontierPoint:
        found = evaluate(self.arrays, order)
        point = FrontierPoint(nbytes=found.peak_nbytes, time_s=found.time_s, order=tuple(order.tolist()))
        self.known[point.nbytes] = min(self.known.get(point.nbytes, point), point, key=lambda r: r.time_s)
        return point


def repeats(order: Sequence[int]) -> list[int]:
    """Positions of the runs that are not their op's first."""
    first: dict[int, int] = {}
    return [position for position, op in enumerate(order) if first.setdefault(op, position) != position]


def _without_placement(graph: Graph, *, keep_gradients: bool) -> Graph:
    """The step with external parameters and states, as solvers without transfers know it.

    An op that computes a gradient runs once: its first copy may be freed before a second is computed.
    """
    makers = {op for grad in graph.gradients if (op := graph.producer[grad]) is not None}
    ops = [attrs.evolve(op, rerun=None) if i in makers else op for i, op in enumerate(graph.ops)]
    values = [
        v if v.placement is None else attrs.evolve(v, placement=None, external=True) for v in graph.values
    ]
    if not keep_gradients:
        owners = {i for i, v in enumerate(graph.values) if v.placement is not None}
        values = [
            attrs.evolve(v, role=Role.ACTIVATION, of=None) if v.role is Role.GRAD and v.of in owners else v
            for v in values
        ]
    return attrs.evolve(graph, values=tuple(values), ops=tuple(ops), updates=())
