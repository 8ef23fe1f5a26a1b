"""Annealing walks from several starts, until they gain nothing.

First a short cold and a short warm walk from each of the best starts, then walks from the best plan and, now
and then, from other fast ones, until several in a row gain nothing: the wider the gap, the more. As many
walks run in parallel as there are lanes.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import attrs

from remat_solvers.evaluation.arrays import Ints, evaluate
from remat_solvers.local_search.anneal import COLD, AnnealingWalk, default_moves, fewer_moves
from remat_solvers.portfolio.incumbent import Incumbent
from remat_solvers.protocol import Deadline
from remat_solvers.running.parallel import batches, in_parallel

# Gaps as ratios of base time. Above each of the first two, walks from the best plan are others; above the
# third, the search gets twice the moves; below the last, few walks are worth their time.
TIGHT, FAR, WIDE, NARROW = 0.1, 0.03, 0.01, 0.003
MOVED = 1e-4  # a gain, as a share of base time
CLOSED = 0.005  # or of the gap, if that is more
# Walks: their moves, and (start temperature, price of memory). With the same moves in all, long walks found
# no more than short ones of mixed temperatures (three graphs at 20 %). Far from the bound they are a little
# longer: 30 plans at 1.1 times their smallest budgets are 0.3 points faster in the mean.
WALK_MOVES, FAR_MOVES = 40_000, 50_000
DEFAULT = 1.5  # moves of a search with those from starts, as a ratio of `default_moves`
FROM_START = ((0.1, 0.3), (1.0, 3.0))
FROM_BEST = ((0.1, 0.3), (1.0, 3.0), (0.3, 0.3), (0.1, 1.0), (1.0, 10.0))
FROM_OTHERS = ((0.1, 0.3), (1.0, 3.0))
# Every other time memory is almost free of charge. Means of four seeds: 0.25 points faster on a decoder at
# 20 % and on ResNet-18 at 30 %, 0.2 slower on Mamba at 30 %.
FROM_FAR = ((0.1, 0.3), (1.0, 0.02), (0.3, 0.3), (0.2, 0.02))
# At the smallest budgets a walk that leaves what fits does not come back: memory costs much from the start.
# Of 24 plans there, recomputation fell by 3 % in the sum; single ones changed by -24 to +8 %.
FROM_TIGHT = ((0.1, 300.0), (0.3, 30.0), (0.1, 300.0), (1.0, 300.0))
STARTS, RIVAL_STARTS = 4, 2  # of the first walks; with a rival
# Gaps, and the walks after which the search ends if none of them gained; more at any wider gap. With 3, 6, 10
# and 14 walks, 86 plans took 5 % longer and were no better in the sum; above `TIGHT` 16 find more than 10.
PATIENCE, MOST_PATIENCE = ((NARROW, 2), (WIDE, 4), (FAR, 6), (TIGHT, 10)), 16
# The same, while a rival is faster. Of 17 such searches two found a faster plan, as with 6 and 4 starts.
HOPELESS = 4


@attrs.define(kw_only=True, eq=False)
class Walks:
    """A search by walks.

    Attributes:
        incumbent: its plans and bound.
        seed: of the next walk.
        moves: that a search may try; None for an amount that takes about 3 s at 600 ops.
        rival_s: time of a plan of another graph, which this one shall beat.
        lanes: walks that run at once.
        done, tried: walks and moves so far.
        idle: walks from the best plans since the last that gained.
        turn: walks from the best plans so far: their temperatures and prices come in turn.
        needless: set by another thread to end the search after the walk that runs.
    """

    incumbent: Incumbent
    seed: int
    moves: int | None
    rival_s: float
    lanes: int
    done: int = 0
    tried: int = 0
    idle: int = 0
    turn: int = 0
    needless: bool = False

    def begin(self, starts: list[Ints], deadline: Deadline) -> None:
        """Walk from the best starts."""
        plans = [(start, *pair) for start in self._best_of(starts) for pair in FROM_START]
        for some in batches(plans, self.lanes):
            if self._ended(deadline):
                return
            self._run(some, deadline)

    def go_on(self, deadline: Deadline, *, most: int | None = None) -> None:
        """Walk from the best plans while that gains; `most` walks if that is given."""
        known = self.incumbent
        last = None if most is None else self.turn + most
        walks = itertools.islice(self._plans(), self.turn, last)
        while self.idle < self._patience and not self._ended(deadline):
            plans = list(itertools.islice(walks, self.lanes))
            if not plans:
                return
            before_s = known.best_s
            self._run(plans, deadline)
            self.turn += len(plans)
            least_s = max(MOVED * known.base_s, CLOSED * (before_s - known.bound_s))
            self.idle = 0 if known.best_s < before_s - least_s else self.idle + len(plans)

    def _ended(self, deadline: Deadline) -> bool:
        """Whether the gap is closed, nobody needs more, or the moves or the time are used up."""
        if self.needless or self.done >= self._most_walks:
            return True
        return self.incumbent.closed(2 * self.incumbent.gap) or deadline.reached()

    def _run(self, plans: list[tuple[Ints, float, float]], deadline: Deadline) -> None:
        known, each = self.incumbent, self._moves_of_walk
        walks, tasks = [], []
        for order, hot, price in plans:
            walk = AnnealingWalk(known.arrays, order, known.budget_nbytes, self.seed, price)
            self.seed += 1
            walks.append(walk)
            tasks.append(partial(self._walked, walk, each, hot))
        self.done += len(walks)
        for walk, found in zip(walks, in_parallel(tasks, deadline), strict=True):
            self.tried += walk.tried
            if found is not None:
                known.add(found, "search")
        deadline.report("search", known.best_s, known.bound_s)

    def _walked(self, walk: AnnealingWalk, moves: int, hot: float, deadline: Deadline) -> Ints | None:
        """The best order of a walk, polished; None if none fits."""
        found = walk.anneal(moves, hot, COLD, deadline)
        return None if found is None else self.incumbent.polished(found, deadline)

    @property
    def _patience(self) -> int:
        """Walks without a gain after which the search ends."""
        walks = next((walks for gap, walks in PATIENCE if self.incumbent.closed(gap)), MOST_PATIENCE)
        return min(walks, HOPELESS) if self.incumbent.best_s > self.rival_s else walks

    @property
    def _most_walks(self) -> int:
        ops, each = len(self.incumbent.arrays.backward), self._moves_of_walk
        most = round(DEFAULT * default_moves(ops)) if self.moves is None else self.moves
        return -(-most * (1 if self.incumbent.closed(WIDE) else 2) // each) if each else 0

    @property
    def _moves_of_walk(self) -> int:
        moves = WALK_MOVES if self.incumbent.closed(FAR) else FAR_MOVES
        each = fewer_moves(moves, len(self.incumbent.arrays.backward))
        return each if self.moves is None else min(each, self.moves)

    def _best_of(self, starts: list[Ints]) -> list[Ints]:
        """The fastest starts that differ, or if none fits those with the smallest peaks."""
        known = self.incumbent

        def rank(start: Ints) -> tuple[int, float]:
            result = evaluate(known.arrays, start)
            return max(0, result.peak_nbytes - known.budget_nbytes), result.time_s

        differing = {start.tobytes(): start for start in starts}
        most = STARTS if self.rival_s == float("inf") else RIVAL_STARTS
        return sorted(differing.values(), key=rank)[:most]

    @property
    def _pairs(self) -> tuple[tuple[float, float], ...]:
        """Start temperatures and prices of walks from the best plan."""
        closed = self.incumbent.closed
        return FROM_BEST if closed(FAR) else FROM_FAR if closed(TIGHT) else FROM_TIGHT

    def _plans(self) -> Iterator[tuple[Ints, float, float]]:
        """Where walks begin, with which temperature and price; without end."""
        for i in itertools.count():
            assert self.incumbent.best is not None
            for hot, price in self._pairs:
                yield self.incumbent.best, hot, price
            fastest = self.incumbent.fastest
            yield fastest[i % len(fastest)][1], *FROM_OTHERS[i % len(FROM_OTHERS)]
