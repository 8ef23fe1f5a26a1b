"""Minimize the peak: sequence search with memory as the objective.

Greedy eviction towards the floor first; then walks at falling targets, from the sequence with the smallest
peak so far and ended as soon as the target holds: two side by side, one half as far as the other. Where walks
of all kinds miss, the next ones go on from the smallest peak at which one of them has ended, to nearer
targets unless that gained enough. Going on from every walk that missed was worse on one of eight small models
(weight norm, 8 % in the mean of six seeds), and never doing so on six (by up to 10 %). Where walks gain no
more, `second_pass` leaves gradients to a second pass over the step; if that needs less, walks begin again.
Time hardly matters here, so sequences may grow to several times the graph. The search ends when steps are
under half a percent, at the goal, or when the moves are used up. Deterministic for a seed and a number of
moves. A search with a goal passes through the same sequences as a search for the floor, so a budget that was
once reached is reached again.

Imperfect: nothing is proven; the floor may lie below the peak of every schedule.
"""

from functools import partial
from math import sqrt

import attrs
import numpy as np

from remat_solvers.evaluation.arrays import Arrays, Ints, evaluate
from remat_solvers.local_search.anneal import SMALL_OPS, AnnealingWalk
from remat_solvers.local_search.evict import evict
from remat_solvers.local_search.second_pass import with_second_pass
from remat_solvers.protocol import Deadline
from remat_solvers.running.parallel import in_parallel

FIRST_STEP = 0.85
LAST_STEP = 0.995
MOVED = 1 / 8  # of a step: the least by which the peak falls where walks gain that miss their targets
# Start temperatures and prices. Where walks of one kind came to one or two ops above the target, those of
# another reached it (GPT-2 and an FFT model at their smallest peaks).
KINDS = ((1.0, 30.0), (3.0, 3.0), (0.1, 30.0))
COOL = 0.1  # ratio of the last temperature to the first
ROUNDS = 30  # moves of a walk are such that about as many walks can miss their targets


@attrs.define
class Descent:
    """Falling targets for walks, two at a time: a step down from the smallest peak, and half of one.

    Attributes:
        floor_nbytes: no target is lower.
        step: the ratio of the first target to the peak.
        missed: walks of how many kinds have missed both targets.
    """

    floor_nbytes: int
    step: float = FIRST_STEP
    missed: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether steps are still worth a walk."""
        return self.step < LAST_STEP

    def next(self, peak_nbytes: int) -> tuple[list[int], float, float]:
        """Targets of walks from a peak; their start temperature, and the price of bytes above the target."""
        targets = [max(self.floor_nbytes, int(peak_nbytes * each)) for each in (self.step, sqrt(self.step))]
        return targets, *KINDS[self.missed]

    @property
    def at_last_kind(self) -> bool:
        """Whether walks of all other kinds have missed."""
        return self.missed == len(KINDS) - 1

    def learn(self, reached: list[bool], fell: float) -> None:
        """Halve the step where only the nearer target was reached, or walks of all kinds gained too little.

        Args:
            reached: whether each target was.
            fell: by which ratio the peak fell, also where no target was reached.
        """
        far, near = reached
        moved = far or near or fell > MOVED * (1 - self.step)
        self.missed = 0 if moved else self.missed + 1
        if (near and not far) or self.missed == len(KINDS):
            self.step, self.missed = sqrt(self.step), 0


def minimize_peak(
    arrays: Arrays,
    goal_nbytes: int,
    floor_nbytes: int,
    deadline: Deadline,
    *,
    moves: int | None = None,
    start: Ints | None = None,
) -> Ints:
    """Find a sequence with a small peak, from `start` or trace order, with at most `moves` changes.

    The search stops at a peak of `goal_nbytes`; no sequence needs less than `floor_nbytes`.
    """
    ops = len(arrays.backward)
    left = default_peak_moves(ops) if moves is None else moves
    best: Ints = np.arange(ops, dtype=np.int64) if start is None else start
    peak = evaluate(arrays, best).peak_nbytes
    # Evicting straight to a far target accumulates recomputed values; evicting in steps avoids that.
    step = FIRST_STEP
    while peak > goal_nbytes and not deadline.reached():
        order = evict(arrays, max(floor_nbytes, int(peak * step)), deadline, best)
        reached = evaluate(arrays, order).peak_nbytes
        if reached >= peak:
            step = sqrt(step)
            if step > 0.98:
                break
            continue
        best, peak = order, reached
    search = _Walks(arrays, best, peak, max(goal_nbytes, floor_nbytes), Descent(floor_nbytes), deadline)
    search.lower(left - left // 4)
    while search.tried < left and not search.ended:
        longer = with_second_pass(arrays, search.best, deadline)
        if longer is None or longer[1] >= search.peak_nbytes:
            break
        search.best, search.peak_nbytes = longer
        search.descent = Descent(floor_nbytes)
        search.lower((left - search.tried) // 2)
    search.lower(left - search.tried)
    return search.best


@attrs.define(eq=False)
class _Walks:
    """Walks at falling targets from the sequence with the smallest peak so far.

    Attributes:
        arrays: of the graph.
        best: that sequence.
        peak_nbytes: its peak.
        enough_nbytes: the peak at which the search ends.
        descent: the targets.
        deadline: of the search.
        tried: changes that walks have evaluated.
    """

    arrays: Arrays
    best: Ints
    peak_nbytes: int
    enough_nbytes: int
    descent: Descent
    deadline: Deadline
    tried: int = 0
    _seed: int = 0

    @property
    def ended(self) -> bool:
        return self.peak_nbytes <= self.enough_nbytes or self.deadline.reached()

    def lower(self, moves: int) -> None:
        """Walk until the moves are used up or steps are no longer worth a walk."""
        left, share = moves, default_peak_moves(len(self.arrays.backward)) // ROUNDS
        ends: list[Ints] = []  # of walks of other kinds that missed the same targets
        while self.descent.goes_on and left > 0 and not self.ended:
            targets, hot, price = self.descent.next(self.peak_nbytes)
            walks = [
                AnnealingWalk(self.arrays, self.best, each, self._seed + i, price)
                for i, each in enumerate(targets)
            ]
            tasks = [partial(walk.reach, min(max(1, left // 2), share), hot, COOL * hot) for walk in walks]
            found = in_parallel(tasks, self.deadline)
            tried = sum(max(1, walk.tried) for walk in walks)
            left -= tried
            self.tried += tried
            self._seed += len(walks)
            hits = [order for order in found if order is not None]
            ends += [walk.now for walk in walks]
            before_nbytes = self.peak_nbytes
            if hits or self.descent.at_last_kind:
                self._take(hits or ends)
                ends = []
            self.descent.learn([order is not None for order in found], 1 - self.peak_nbytes / before_nbytes)
        self._take(ends)

    def _take(self, orders: list[Ints]) -> None:
        """Keep the valid sequence with the smallest peak of these and the best."""
        for order in orders:
            result = evaluate(self.arrays, order)
            if result.valid and result.peak_nbytes < self.peak_nbytes:
                self.best, self.peak_nbytes = order, result.peak_nbytes


def default_peak_moves(ops: int) -> int:
    """Work that takes about 2 s at 600 ops and 10 s at 2,700: a move costs more on a longer sequence."""
    most = 300_000 + min(750_000, 450_000_000 // max(1, ops))
    return round(most * min(1.0, 3 * ops / SMALL_OPS))
