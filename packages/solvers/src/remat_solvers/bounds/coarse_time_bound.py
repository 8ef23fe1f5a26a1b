"""A tighter bound from a coarse integer program: memory at a few moments, the work between them in any order.

Take ops j_1, ..., j_m in the order of their first runs, which are the *moments*. Either every schedule keeps
this order, because each op is an ancestor of the next, or some schedules do. A moment may also be the first
repeat of an op since the moment before; in a schedule without one it is when the op of the moment before has
run, so its rows hold there too. The moments cut the step into m + 1 intervals. Variables, 0 or 1:

* K[s, v]: value v is live when j_s first runs;
* X[s, i]: op i runs in interval s, once or more often.

An op reads values that are live at the beginning of its interval or computed in it; a value that is live at a
moment was live at the one before or was computed since; a pinned value is live from its first computation on;
K[s], the outputs of j_s and its workspace fit the budget; an op that must run for the first time in an
interval does, and its runs in later intervals cost time.
Every schedule satisfies these rows, so the program's dual bound is a lower bound on the overhead, for any
order and any number of recomputations. With one moment it is the cut bound in whole numbers instead of its
Lagrangian. All intervals from a moment to the end together have the rows of one interval too, so that the
program in fractions is no weaker than the cut bound at any of its moments.

Choice of moments: the first is where the cut bound binds, or the unplanned peak if it binds nowhere. The
program's solution, written as a sequence, exceeds the budget somewhere; the next first run from there on
becomes a moment too. If dependencies do not determine its place among the others, there is a program for each
place, for the schedules that keep that order: none is faster than the lowest of their bounds, and the program
with that bound is refined next (branch and bound over orders). A repeat has its place in the sequence, since
its moment is there in every schedule. When the sequence fits the budget and the program is solved to the end,
the sequence is optimal; if no program has a solution, there is no schedule. A few moments are usually enough
(U-Net at 30 %: 7 of 71 raise 15.0 to 22.9 %; VGG-16 at 50 %: 6 prove optimality; GPT-2 with its head at 40 %:
the place of the head's weight gradient relative to the last layers' raises 33.7 to 34.6 %), and each round
gives a good start for a search. Checkmate (Jain et al. 2020) is the same program with a moment at every op, a
fixed order, and rows for all runs in between.

A program has about 2 * moments * ops variables: a tenth of a second for one moment at 600 ops, and each
further moment about doubles the time.
"""

import heapq
from itertools import chain, takewhile

import attrs
import numpy as np

from remat_solvers.bounds.coarse_program import CoarseProgram, Moment
from remat_solvers.bounds.reachability import Reachability, with_order
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate
from remat_solvers.protocol import Deadline

# Rounding error of a program's bound, in units of cost. At HiGHS's default tolerances one bound exceeded a
# schedule by 1.4e-6 (a Swin transformer at 70 %), at strict ones none did by a hundredth of that.
TOLERANCE, ROUGH_TOLERANCE = 1e-7, 1e-5
UNIT = 10.0  # of cost, in expected extra times: programs are solved best with costs below 1
DEAR = 16.0  # in expected extra times: a known schedule rules out a repeat that costs more
GAINED = 0.05  # a moment that closes a smaller share of the gap to a known schedule is idle
ROUGH = 1e-3  # relative gap at which a round ends while there are moments to add


@attrs.frozen(kw_only=True, eq=False)
class Round:
    """The result of one program."""

    extra_s: float  # no schedule within the budget recomputes for less; infinite if there is none at all
    # the sequence of its solution; it may not fit the budget. None if there is no solution
    order: Ints | None
    fits: bool  # whether it does
    slack_s: float  # how far `extra_s` may lie below the program's own optimum by rounding
    # whether it was solved strictly and without a gap, so that a gap within `slack_s` counts as none
    proven: bool
    ended: bool  # whether it was solved to the end; if not, another round will not succeed either
    checks: int  # its work, counted as in `highs`


@attrs.frozen(kw_only=True, eq=False)
class _MomentOrder:
    """An order of moments, with a bound on the schedules that keep it."""

    extra_s: float  # none of them recomputes for less
    moments: tuple[Moment, ...]
    reach: Reachability  # the dependencies, that order among them
    proving: bool = False  # whether the next round adds no moment, but closes the gap that the last one left
    finished: bool = False  # whether another round would add nothing
    idle: bool = False  # whether the last moment has raised it by too little
    repeated: bool = False  # whether that was a repeat

    def with_moment(self, op: int) -> list["_MomentOrder"]:
        """One order for each possible place of `op` among the first runs."""
        orders = []
        places = [s for s, moment in enumerate(self.moments) if not moment.again]
        for place in (*places, len(self.moments)):
            before = [j for j, again in self.moments[:place] if not again]
            after = [j for j, again in self.moments[place:] if not again]
            if any(self.reach.ancestors[j] >> op & 1 for j in before):
                continue
            if any(self.reach.descendants[j] >> op & 1 for j in after):
                continue
            reach = self.reach
            if before and not reach.ancestors[op] >> before[-1] & 1:
                reach = with_order(reach, before[-1], op)
            if after and not reach.descendants[op] >> after[0] & 1:
                reach = with_order(reach, op, after[0])
            moments = (*self.moments[:place], Moment(op), *self.moments[place:])
            orders.append(attrs.evolve(self, moments=moments, reach=reach, proving=False, repeated=False))
        return orders

    def with_repeat(self, op: int, s: int) -> "_MomentOrder":
        """With the first repeat of `op` in interval s."""
        moments = (*self.moments[:s], Moment(op, again=True), *self.moments[s:])
        return attrs.evolve(self, moments=moments, proving=False, repeated=True)


class CoarseBound:
    """The bound of one graph at one budget, for which `cut.extra_s` was computed; each round adds a moment.

    Attributes:
        thorough: whether repeats are moments early on, and rounds go on after a sequence that fits but is
            slower than its program: they take longer, and prove more in the end.
        moments: the moments of the latest program.
    """

    def __init__(self, cut: CutBound, arrays: Arrays, budget_nbytes: int, *, thorough: bool = False) -> None:
        self.graph = cut.graph
        self.arrays = arrays
        self.budget_nbytes = budget_nbytes
        self.thorough = thorough
        self.moments: tuple[Moment, ...] = ()
        self._orders: list[tuple[float, int, _MomentOrder]] = []  # a heap, the lowest bound on top
        self._count = 0
        self._least_s = max(cut.proven_s, 1e-3 * self.graph.time_s)
        if self.graph.time_s > 0:
            trace = np.arange(len(self.graph.ops), dtype=np.int64)
            moment = cut.binding_op
            if moment is None:
                moment = int(evaluate(arrays, trace).profile.argmax())
            self._push(_MomentOrder(extra_s=0.0, moments=(Moment(moment),), reach=cut.reach))

    def _push(self, order: _MomentOrder) -> None:
        heapq.heappush(self._orders, (order.extra_s, self._count, order))
        self._count += 1

    @property
    def extra_s(self) -> float:
        """No schedule within the budget recomputes for less."""
        return self._orders[0][0] if self._orders else 0.0

    @property
    def finished(self) -> bool:
        """Whether another round would add nothing."""
        return not self._orders or self._orders[0][2].finished

    @property
    def proving(self) -> bool:
        """Whether the next round adds no moment, but closes the gap that the last one left."""
        return bool(self._orders) and self._orders[0][2].proving

    @property
    def variables(self) -> int:
        """Approximate number of variables of the next round's program."""
        if not self._orders:
            return 0
        return (2 * len(self._orders[0][2].moments) - 1) * len(self.graph.ops)

    def round(self, deadline: Deadline, *, enough_s: float = np.inf, checks: int | None = None) -> Round:
        """Solve the next program.

        Args:
            deadline: limit by the clock.
            enough_s: extra time of a known schedule: no higher bound is needed. It also sets the unit of
                cost, so that rounding is small in comparison.
            checks: limit on the work of the round, counted as in `highs`; None for none.
        """
        _, _, at = heapq.heappop(self._orders)
        self.moments = at.moments
        known = 0 < enough_s < np.inf
        unit_s = UNIT * (enough_s if known else max(at.extra_s, self._least_s))
        most_s = DEAR * enough_s if known else np.inf
        tolerance = TOLERANCE if at.proving else ROUGH_TOLERANCE
        program = CoarseProgram(self.graph, at.reach, self.budget_nbytes, at.moments, unit_s, most_s)
        solved = program.rows.minimize(
            gap=0.0 if at.proving else ROUGH,
            enough=enough_s / unit_s + tolerance - program.constant,
            deadline=deadline,
            checks=checks,
            strict=at.proving,
        )
        extra_s = max(at.extra_s, (solved.bound + program.constant - tolerance) * unit_s)
        least_s = GAINED * (enough_s - at.extra_s) if known else 0.0
        at = attrs.evolve(at, extra_s=extra_s, idle=extra_s - at.extra_s <= least_s)
        order, fits, following = None, False, list[_MomentOrder]()
        if solved.found is not None:
            # Values kept at a moment are recomputed before it or, often as cheaply, when they are read.
            sequences = [program.sequence(solved.found, late=late) for late in (False, True)]
            orders = [np.array(list(chain.from_iterable(each)), np.int64) for each in sequences]
            results = [evaluate(self.arrays, each) for each in orders]
            ranks = [
                (not result.valid, max(result.peak_nbytes, self.budget_nbytes), result.time_s)
                for result in results
            ]
            best = ranks.index(min(ranks))
            if results[best].valid:
                order = orders[best]
                fits = results[best].peak_nbytes <= self.budget_nbytes
                source = best  # of the next moment
                slower_s = results[best].time_s - self.graph.time_s - extra_s
                if self.thorough and fits and slower_s > 2 * tolerance * unit_s and results[1 - best].valid:
                    source = 1 - best
                following = self._next(at, program, sequences[source], results[source].profile)
        used_up = deadline.reached() or (checks is not None and solved.checks > checks)
        if not following and (solved.ended or not used_up):
            # No moment to add: one more round closes the gap that the last one left.
            following = [attrs.evolve(at, proving=True, finished=at.proving or order is None)]
        for each in following or [at]:
            self._push(each)
        return Round(
            extra_s=self.extra_s,
            order=order,
            fits=fits,
            slack_s=2 * tolerance * unit_s,
            proven=at.proving and at.extra_s <= self.extra_s,
            ended=solved.ended,
            checks=solved.checks,
        )

    def _next(
        self, at: _MomentOrder, program: CoarseProgram, intervals: list[list[int]], profile: Ints
    ) -> list[_MomentOrder]:
        """With the next first run from the worst excess on, preferably one with a determined place.

        A parameter's gradient, which no op follows, has many places, because all other ops could run after
        it. Where all these first runs are moments already, the repeat that exceeds the budget most. With
        `thorough` also after a first run that raised the bound by too little, if it is the worst excess.
        """
        order = list(chain.from_iterable(intervals))
        interval = [s for s, each in enumerate(intervals) for _ in each]
        first: dict[int, int] = {}
        for position, op in enumerate(order):
            first.setdefault(op, position)
        runs = list(first)
        over = np.flatnonzero(profile > self.budget_nbytes)
        over = over[np.argsort(-profile[over], kind="stable")]
        present = {moment.op for moment in at.moments if not moment.again}
        soon = np.searchsorted(np.array(list(first.values()), np.int64), over)
        candidates = [runs[i] for i in soon.tolist() if i < len(runs) and runs[i] not in present]
        early = self.thorough and at.idle and not at.repeated
        if early and over.size and first[order[over[0]]] != over[0]:
            repeats = self._with_repeat(at, program, order, interval, over[:1])
            if repeats:
                return repeats
        if candidates:
            related = (
                op
                for op in candidates
                if all((at.reach.ancestors[op] | at.reach.descendants[op]) >> j & 1 for j in present)
            )
            return at.with_moment(next(related, candidates[0]))
        return self._with_repeat(at, program, order, interval, over)

    def _with_repeat(
        self, at: _MomentOrder, program: CoarseProgram, order: list[int], interval: list[int], over: Ints
    ) -> list[_MomentOrder]:
        """With the first of the positions that is a repeat and no moment yet between the same first runs."""
        for position in over.tolist():
            op, s = order[position], interval[position]
            before = takewhile(lambda moment: moment.again, reversed(at.moments[:s]))
            after = takewhile(lambda moment: moment.again, at.moments[s:])
            if program.latest[op] < s and Moment(op, again=True) not in chain(before, after):
                return [at.with_repeat(op, s)]
        return []
