"""Orders of ops for any budget on activations, each from the next one above: eviction, and a polish.

A plan that moves values asks for orders at many budgets, and which it wants depends on what the copies hide;
seconds of the portfolio for each would be too much. Greedy eviction goes on where it stopped, so that a rung
costs one polish. Where it gets stuck, the table over intervals takes over, and at the bottom the search for
the smallest peak. On a Llama of 3,811 ops, one core of a server: 0.3 s a rung, and orders as fast as the
portfolio finds in 10 s.

Imperfect: what is moved is not known here, so orders give up what is cheap to compute again per byte and keep
for the links what is not, wherever it lies.
"""

from collections.abc import Sequence
from operator import itemgetter

import attrs
import numpy as np

from remat_graph import Graph, Role
from remat_solvers.bounds import budget_floor
from remat_solvers.evaluation.arrays import Ints, evaluate, flatten
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.min_peak import descend
from remat_solvers.local_search.polish import polish
from remat_solvers.methods.interval_dp import plan
from remat_solvers.offload.training_problem import Style
from remat_solvers.protocol import Deadline

LEVELS = 10  # between the unplanned peak and the floor
SHORT = 500  # ops, up to which another way down is tried
DESCENT, DESCENT_S = 20_000, 5.0  # changes tried for the smallest peak, and seconds of a deadline


@attrs.frozen(kw_only=True, eq=False)
class Rung:
    """An order.

    Attributes:
        nbytes: its peak, with parameters and states held for free.
        time_s: its compute time.
        order: the ops.
    """

    nbytes: int
    time_s: float
    order: tuple[int, ...]


class Ladder:
    """Orders of a training step by their peak.

    Args:
        graph: the training step.
        style: how it is trained: whether gradients stay.
        deadline: limit by the clock.
    """

    def __init__(self, graph: Graph, style: Style, deadline: Deadline) -> None:
        self.graph = _lent(graph, keep_gradients=not (style.adds or style.in_backward))
        self.deadline = deadline
        self.arrays = flatten(self.graph)
        self.floor_nbytes = budget_floor(self.graph).nbytes
        trace: Ints = np.arange(len(graph.ops), dtype=np.int64)
        self.evicted = [(evaluate(self.arrays, trace).peak_nbytes, trace)]
        self.known: dict[int, Rung] = {}
        self.top = self._rung(trace)
        self.least = self._descend()
        span = self.top.nbytes - self.least.nbytes
        self.levels = sorted({self.least.nbytes + span * i // LEVELS for i in range(LEVELS + 1)})

    def at(self, budget_nbytes: int) -> Rung:
        """The fastest order found for a budget; below the smallest peak known, the one that has it."""
        budget_nbytes = min(max(budget_nbytes, self.least.nbytes), self.top.nbytes)
        if budget_nbytes not in self.known:
            self.known[budget_nbytes] = self._find(budget_nbytes)
        fitting = [rung for rung in self.known.values() if rung.nbytes <= budget_nbytes]
        return min(fitting, key=lambda rung: rung.time_s)

    def curve(self) -> list[Rung]:
        """The orders of all levels, the smallest first; of both ends alone where the deadline is reached."""
        found = [self.at(level) for level in reversed(self.levels) if not self.deadline.reached()]
        return found[::-1] if len(found) > 1 else [self.least, self.top]

    def _find(self, budget_nbytes: int) -> Rung:
        above = [pair for pair in self.evicted if pair[0] > budget_nbytes]
        start = min(above, key=itemgetter(0), default=self.evicted[0])
        order = evict(self.arrays, budget_nbytes, self.deadline, start[1])
        peak = evaluate(self.arrays, order).peak_nbytes
        if peak <= budget_nbytes:
            self.evicted.append((peak, order))
            return self._rung(polish(self.arrays, order, budget_nbytes, self.deadline))
        planned = plan(self.graph, self.arrays, budget_nbytes, self.deadline)
        if planned is not None:
            return self._rung(polish(self.arrays, planned, budget_nbytes, self.deadline))
        return self.least

    def _descend(self) -> Rung:
        """The order with the smallest peak: the table's where it has one near the floor, or a search's.

        Of a short order eviction is tried beside the table, which knows only one form of plan.
        """
        found = self._near_the_floor()
        if len(self.graph.ops) <= SHORT:
            order = evict(self.arrays, self.floor_nbytes, self.deadline, self.evicted[0][1])
            found = min(found, self._polished(order), key=lambda rung: rung.nbytes)
        return found

    def _near_the_floor(self) -> Rung:
        for part in (1, 2, 4, 8, 16):
            budget = self.floor_nbytes + (self.top.nbytes - self.floor_nbytes) * part // 64
            planned = plan(self.graph, self.arrays, budget, self.deadline)
            if planned is not None:
                return self._rung(polish(self.arrays, planned, budget, self.deadline))
        deadline = self.deadline.within(DESCENT_S)
        return self._polished(
            descend(self.arrays, self.floor_nbytes, self.floor_nbytes, deadline, moves=DESCENT)
        )

    def _polished(self, order: Ints) -> Rung:
        """An order made faster within its own peak."""
        peak = evaluate(self.arrays, order).peak_nbytes
        return self._rung(polish(self.arrays, order, peak, self.deadline))

    def _rung(self, order: Ints) -> Rung:
        found = evaluate(self.arrays, order)
        rung = Rung(nbytes=found.peak_nbytes, time_s=found.time_s, order=tuple(order.tolist()))
        self.known[rung.nbytes] = min(self.known.get(rung.nbytes, rung), rung, key=lambda r: r.time_s)
        return rung


def repeats(order: Sequence[int]) -> list[int]:
    """Positions of the runs that are not their op's first."""
    first: dict[int, int] = {}
    return [position for position, op in enumerate(order) if first.setdefault(op, position) != position]


def _lent(graph: Graph, *, keep_gradients: bool) -> Graph:
    """The same step with parameters and states lent, as solvers know it that move nothing.

    What makes a gradient runs once: the first copy of it may have left by the time of a second.
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
