"""Search decisions of switches and sequences together.

`quick` plans one decision cheaply: greedy eviction, polishing, and where that does not fit a short walk.
`anneal` searches as `methods.annealing` does, over sequences of all ops of the graph with switches. A share
of its changes flip switches: one, some neighbours of a family, or a whole family, and those off that
conflict. Which values are made where then changes at once, and frees follow from liveness, so a flip needs no
repair: it is refused only if the sequence would read a value before any run makes it, or repeat what must run
once. What follows from a flip, evictions or repeats that are no longer needed, the other changes find. The
best sequence of a walk is taken over to the graph of its decision, evaluated there, and polished.

A flip costs one pass over the runs, and a second one to derive the state where it is kept, against 2 us for
another change at 600 ops. Deterministic for a seed and a number of moves.

Imperfect: ops that run nothing stay where they were put, as early as their reads allow.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import attrs
import numpy as np

from remat_graph import Graph, Schedule, Specialized, specialize, switches_on
from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate, flatten
from remat_solvers.evaluation.switch_arrays import SwitchArrays
from remat_solvers.local_search.anneal import COLD, AnnealingWalk
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.halve import halve
from remat_solvers.local_search.min_peak import COOL, ROUNDS, Descent, default_peak_moves
from remat_solvers.local_search.polish import polish
from remat_solvers.protocol import Deadline
from remat_solvers.running.parallel import in_parallel

QUICK_MOVES = 8_000  # of the walk to a first sequence that fits
FIRST_PRICE = 30.0  # of bytes above the budget in that walk


@attrs.frozen(kw_only=True, eq=False)
class DecidedOrder:
    """A decision and a valid sequence of its graph.

    Attributes:
        made: the decision.
        order: the sequence of op indices of `made.graph`.
        time_s: its compute seconds.
        peak_nbytes: its peak.
    """

    made: Specialized
    order: Ints
    time_s: float
    peak_nbytes: int

    @property
    def schedule(self) -> Schedule:
        """The schedule of the original graph."""
        return self.made.restore(Schedule.from_order(self.made.graph, self.order.tolist()))


@attrs.frozen(kw_only=True, eq=False)
class Walk:
    """One annealing walk.

    Attributes:
        start: where it begins.
        moves: changes that it tries.
        hot: its first temperature, in mean op times.
        price: of bytes above the budget, in mean op times for a value of mean size.
    """

    start: DecidedOrder
    moves: int
    hot: float
    price: float


@attrs.define(eq=False)
class JointSearch:
    """The sequences found so far for one graph and budget, each decision's best.

    Attributes:
        graph: with switches.
        budget_nbytes: of the problem.
        seed: of the walks.
        tried: changes that walks have evaluated.
    """

    graph: Graph
    budget_nbytes: int
    seed: int = 0
    tried: int = 0
    found: dict[frozenset[str], DecidedOrder] = attrs.field(factory=dict)
    _walks: int = 0
    _flat: dict[frozenset[str], Arrays] = attrs.field(factory=dict)

    def arrays(self, made: Specialized) -> Arrays:
        """The graph of a decision as arrays, made once."""
        if made.on not in self._flat:
            self._flat[made.on] = flatten(made.graph)
        return self._flat[made.on]

    @cached_property
    def choice(self) -> SwitchArrays:
        """The graph as arrays."""
        return SwitchArrays.of(self.graph)

    @property
    def fitting(self) -> list[DecidedOrder]:
        """What fits, the fastest first; of those that are even, with the fewest switches."""
        fits = [each for each in self.found.values() if each.peak_nbytes <= self.budget_nbytes]
        base_s = self.graph.time_s or 1.0  # to nine digits of it, times do not depend on the order of a sum
        return sorted(fits, key=lambda each: (round(each.time_s / base_s, 9), len(each.made.on)))

    @property
    def smallest(self) -> DecidedOrder | None:
        """The smallest peak of all."""
        return min(self.found.values(), key=lambda each: each.peak_nbytes, default=None)

    def add(self, made: Specialized, order: Ints, deadline: Deadline) -> None:
        """Polish a sequence that fits, and keep it if it is the best of its decision."""
        arrays = self.arrays(made)
        result = evaluate(arrays, order)
        if not result.valid:
            return
        if result.peak_nbytes <= self.budget_nbytes:
            order = polish(arrays, order, self.budget_nbytes, deadline)
            result = evaluate(arrays, order)
        one = DecidedOrder(made=made, order=order, time_s=result.time_s, peak_nbytes=result.peak_nbytes)
        known = self.found.get(made.on)
        if known is None or self.rank(one) < self.rank(known):
            self.found[made.on] = one

    def rank(self, one: DecidedOrder) -> tuple[int, float]:
        """Smaller is better: bytes above the budget, then seconds."""
        return max(0, one.peak_nbytes - self.budget_nbytes), one.time_s

    def quick(self, *decisions: Iterable[str], deadline: Deadline) -> None:
        """Plan decisions cheaply, side by side."""
        decided = [specialize(self.graph, on) for on in decisions]
        tasks = [partial(self._first_order, self.arrays(made)) for made in decided]
        for made, (order, tried) in zip(decided, in_parallel(tasks, deadline), strict=True):
            self.tried += tried
            self.add(made, order, deadline)

    def _first_order(self, arrays: Arrays, deadline: Deadline) -> tuple[Ints, int]:
        """A sequence from trace order, which fits if one is found soon, and the changes tried."""
        order = np.arange(len(arrays.backward), dtype=np.int64)
        if evaluate(arrays, order).peak_nbytes > self.budget_nbytes:
            order = evict(arrays, self.budget_nbytes, deadline)
        if evaluate(arrays, order).peak_nbytes <= self.budget_nbytes:
            return order, 0
        walk = AnnealingWalk(arrays, order, self.budget_nbytes, self.seed, FIRST_PRICE)
        reached = walk.reach(QUICK_MOVES, 1.0, 0.1, deadline)
        return order if reached is None else reached, walk.tried

    def divide(self, *ones: DecidedOrder, deadline: Deadline) -> None:
        """Divide and conquer for decisions of which nothing fits, side by side."""
        tasks = [partial(halve, self.arrays(one.made), self.budget_nbytes) for one in ones]
        for one, order in zip(ones, in_parallel(tasks, deadline), strict=True):
            self.add(one.made, order, deadline)

    def take(self, schedule: Schedule, deadline: Deadline) -> None:
        """Add a schedule of the graph, such as the plan of a smaller budget."""
        made, order = self.choice.narrow(switches_on(self.graph, schedule), schedule.order)
        self.add(made, order, deadline)

    def anneal(self, walks: Sequence[Walk], deadline: Deadline) -> None:
        """Anneal decisions and sequences in parallel."""
        states = [self._begin(walk.start, self.budget_nbytes, walk.price) for walk in walks]
        for state, order in zip(states, self._annealed(walks, states, deadline), strict=True):
            if order is not None:
                made, order = self.choice.narrow(state.best_on, order)
                self.add(made, order, deadline)
                self.flip_greedily(self.found[made.on], deadline)

    def anneal_sequences(self, walks: Sequence[Walk], deadline: Deadline) -> None:
        """Anneal sequences alone in parallel; the decisions stay."""
        states = []
        for walk in walks:
            self._walks += 1
            arrays, seed = self.arrays(walk.start.made), self.seed + self._walks
            states.append(AnnealingWalk(arrays, walk.start.order, self.budget_nbytes, seed, walk.price))
        for walk, order in zip(walks, self._annealed(walks, states, deadline), strict=True):
            if order is not None:
                self.add(walk.start.made, order, deadline)

    def _annealed(
        self, walks: Sequence[Walk], states: list[AnnealingWalk], deadline: Deadline
    ) -> list[Ints | None]:
        """The best sequences of walks that fit."""
        pairs = zip(walks, states, strict=True)
        tasks = [partial(state.anneal, walk.moves, walk.hot, COLD) for walk, state in pairs]
        found = in_parallel(tasks, deadline)
        self.tried += sum(state.tried for state in states)
        return found

    def flip_greedily(self, start: DecidedOrder, deadline: Deadline) -> None:
        """Flip single switches of a decision that fits while that saves time; those that save none go off."""
        from remat_solvers.kernels import switch

        if start.peak_nbytes > self.budget_nbytes:
            return
        walk = self._begin(start, self.budget_nbytes, FIRST_PRICE)
        if switch.flip_greedily(walk.state, self.budget_nbytes) <= start.time_s * (1 + switch.EVEN):
            on = [name for name, one in zip(self.choice.names, walk.state.switches["on"], strict=True) if one]
            made, order = self.choice.narrow(on, self.choice.widen(start.made, start.order))
            self.add(made, order, deadline)

    def _begin(self, start: DecidedOrder, budget_nbytes: int, price: float) -> AnnealingWalk:
        self._walks += 1
        wide = self.choice.widen(start.made, start.order)
        seed = self.seed + self._walks
        return AnnealingWalk(
            self.choice.arrays, wide, budget_nbytes, seed, price, choice=self.choice, on=start.made.on
        )

    def shrink(self, goal_nbytes: int, floor_nbytes: int, moves: int, deadline: Deadline) -> None:
        """Walk at falling budgets from the smallest peak, as `minimize_peak` does, down to a goal."""
        best, descent = self.smallest, Descent(floor_nbytes)
        ends: list[tuple[frozenset[str], Ints]] = []
        share = default_peak_moves(len(self.graph.ops)) // ROUNDS
        while best is not None and best.peak_nbytes > max(goal_nbytes, floor_nbytes):
            if not descent.goes_on or moves <= 0 or deadline.reached():
                break
            targets, hot, price = descent.next(best.peak_nbytes)
            walks = [self._begin(best, target, price) for target in targets]
            tasks = [partial(walk.reach, min(max(1, moves // 2), share), hot, COOL * hot) for walk in walks]
            found = in_parallel(tasks, deadline)
            moves -= sum(max(1, walk.tried) for walk in walks)
            self.tried += sum(walk.tried for walk in walks)
            pairs = zip(walks, found, strict=True)
            hits = [(walk.best_on, order) for walk, order in pairs if order is not None]
            ends += [(walk.now_on, walk.now) for walk in walks]
            if hits or descent.at_last_kind:
                for there in hits or ends:
                    self.add(*self.choice.narrow(*there), deadline)
                ends = []
            assert self.smallest is not None
            fell = 1 - self.smallest.peak_nbytes / best.peak_nbytes
            descent.learn([order is not None for order in found], fell)
            best = self.smallest
        for there in ends:
            self.add(*self.choice.narrow(*there), deadline)
