"""Schedule copies to the host and back, once it is known which values may be on the host when.

`schedule_transfers` makes one pass over an order of ops with a clock for each lane, like a cache that knows
future accesses and prefetches.

* A copy to the host starts as soon as its value is computed and the copies before it have started. Two orders
  are tried, and the referee says which is faster: values in the order in which they fall idle, or, of values
  computed together, the smallest first. A value stays resident until the budget is exceeded; then the value
  with the latest next use is evicted first (Belady), if its copy is done. If no copy is done, the pass waits
  for the next one. The copy of a value that is never evicted is left out.
* A copy back starts as soon as its value fits until its next use and the lane is free in time, in the order
  of their next uses, and of the values that one run needs the largest first. A value fits if the budget holds
  it in addition to everything that cannot be evicted and to the copies to the host that were pending in a
  first pass without prefetching. Ignoring these pending copies is tried as well.

The bytes of each run are those that the referee finds in the schedule that waits for every copy on the spot.
So the peak is within the budget wherever that schedule's is. Not optimal: copies to the host keep a fixed
order, and a copy back starts at the first position where it fits. O(runs * longest interval) in numpy for the
look-ahead, O(moves * log(moves)) otherwise; 1 s for 8,000 runs and 1,600 moves on one core of a server, most
of it in the referee.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from remat_graph import Compute, Free, Graph, Lane, Links, Schedule, Timeline, simulate
from remat_solvers.evaluation.arrays import Ints
from remat_solvers.transfers.idle_intervals import (
    START,
    IdleInterval,
    OrderTimeline,
    Swap,
    idle_intervals,
    swaps_of,
)

# Solvers of other packages import these names from here, see the README.
__all__ = [
    "TRANSFER_POLICIES",
    "IdleInterval",
    "TransferPolicy",
    "TransferSchedule",
    "fastest_transfers",
    "idle_intervals",
    "schedule_transfers",
]


def schedule_transfers(
    graph: Graph, order: Iterable[int], moves: Iterable[IdleInterval], budget_nbytes: int, links: Links
) -> Schedule:
    """The schedule that runs an order and swaps values out in some of its idle intervals.

    Args:
        graph: the graph.
        order: op indices, repeats included.
        moves: idle intervals of this order. A move that the budget does not need is left out.
        budget_nbytes: bound on the peak; exceeded only where the schedule that waits for every copy exceeds
            it.
        links: bandwidths.

    Raises:
        InvalidSchedule: the order is not valid.
        NoIdleInterval: a move is not one of the order's idle intervals.
    """
    return fastest_transfers(OrderTimeline(graph, order), moves, budget_nbytes, links).schedule


@attrs.frozen(kw_only=True, eq=False)
class TransferSchedule:
    """A schedule with its copies."""

    schedule: Schedule  # the steps
    timeline: Timeline  # their simulation by the referee
    # the one of `TRANSFER_POLICIES` that was used; None if every copy is waited for on the spot
    policy: "TransferPolicy | None"


class TransferPolicy(NamedTuple):
    """The order of copies to the host, and whether prefetches reserve headroom for pending copies."""

    small_first: bool
    reserve: bool


TRANSFER_POLICIES = (TransferPolicy(False, True), TransferPolicy(False, False), TransferPolicy(True, True))


def fastest_transfers(
    order: OrderTimeline,
    moves: Iterable[IdleInterval],
    budget_nbytes: int,
    links: Links,
    copied_when_freed: Collection[int] = (),
    policies: Sequence[TransferPolicy] = TRANSFER_POLICIES,
) -> TransferSchedule:
    """Try each policy of `schedule_transfers` for an order that is prepared already, and keep the fastest.

    Values in `copied_when_freed` are copied to the host where the schedule frees them. The caller writes
    these copies; here they occupy the lane, and the values stay on the device until then.
    """
    graph, moves = order.graph, tuple(moves)
    swaps = swaps_of(order, moves, links)
    waiting = order.schedule(swaps, [t.earliest for t in swaps], [t.interval.before for t in swaps])
    best = TransferSchedule(schedule=waiting, timeline=simulate(graph, waiting, links=links), policy=None)
    if not swaps:
        return best
    steps = zip(best.timeline.during_nbytes, waiting.steps, strict=True)
    headroom = budget_nbytes - np.array([n for n, step in steps if isinstance(step, Compute)], np.int64)
    other_copies = [
        [
            (graph.allocated_nbytes(step.value), links.alone_s(Lane.TO_HOST, graph.values[step.value].nbytes))
            for step in frees
            if isinstance(step, Free) and step.value in copied_when_freed
        ]
        for frees in order.frees
    ]
    compute_s = sum(each.time_s for each in order.implementations)
    for policy in policies:
        swaps = swaps_of(order, moves, links, small_first=policy.small_first)
        without_prefetch = _TransferPass(order, swaps, headroom, None, other_copies)
        without_prefetch.run()
        reserved = without_prefetch.copying_profile() if policy.reserve else np.zeros_like(headroom)
        chosen = _TransferPass(order, swaps, headroom, reserved, other_copies)
        chosen.run()
        schedule = order.schedule(swaps, chosen.out_at, chosen.in_at)
        timeline = simulate(graph, schedule, links=links)
        if timeline.time_s <= best.timeline.time_s:
            best = TransferSchedule(schedule=schedule, timeline=timeline, policy=policy)
        if best.timeline.time_s <= compute_s * (1 + 1e-9):
            break  # all copies overlap with compute
    return best


class _TransferPass:
    """One pass over the order with a clock: when each swap frees its value, and when it starts back.

    Args:
        order: the order.
        swaps: what may be swapped out.
        headroom: per position, bytes that are free in addition to what cannot be swapped out.
        reserved: bytes of the headroom that prefetches leave free; None for no prefetches, whose copies back
            then take no time.
        other_copies: per position, bytes and seconds of other copies to the host that start after its run.

    Attributes:
        out_at: per swap the position before which its value is freed, or the end of the interval.
        in_at: per swap the position before which its copy back starts.
    """

    def __init__(
        self,
        order: OrderTimeline,
        swaps: Sequence[Swap],
        headroom: Ints,
        reserved: Ints | None,
        other_copies: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        self.other_copies = other_copies
        self.other_pending: deque[tuple[float, int]] = deque()
        self.other_pending_nbytes = 0
        self.order, self.swaps, self.headroom = order, swaps, headroom
        self.prefetch = reserved is not None
        self.free = headroom - (0 if reserved is None else reserved)  # less what is prefetched
        self.before = np.array([swap.interval.before for swap in swaps])
        self.out_at, self.in_at, self.copied = (self.before.tolist() for _ in range(3))
        self.clock_s = self.out_free_s = self.back_free_s = 0.0
        self.out_done_s = [0.0] * len(swaps)
        self.back_done_s = [0.0] * len(swaps)
        self.prefetched_nbytes = 0  # not needed yet
        # Swaps whose value is still on the device: first copying, then idle.
        self.resident: set[int] = set()
        self.copying: list[tuple[float, int]] = []
        self.copying_nbytes = 0
        self.idle: list[tuple[int, int]] = []
        self.idle_nbytes = np.zeros(len(swaps), np.int64)  # per swap
        self.idle_sum_nbytes = 0
        self.swapped_out: list[tuple[int, int, int]] = []  # first needed first, of these the largest
        self.copies_starting: list[list[int]] = [[] for _ in order.implementations]
        self.becoming_idle: list[list[int]] = [[] for _ in order.implementations]
        self.needed_by: list[list[int]] = [[] for _ in order.implementations]
        for i, swap in enumerate(swaps):
            self.needed_by[swap.interval.before].append(i)
            if swap.interval.after == START:
                self._swap_out(i, START)
            else:
                self.becoming_idle[swap.interval.after].append(i)
            if swap.start != START:
                self.copies_starting[swap.start].append(i)

    def run(self) -> None:
        """Schedule all swaps."""
        for position, implementation in enumerate(self.order.implementations):
            for i in self.needed_by[position]:
                self._needed(i)
            self._finish_copies(position)
            self._make_headroom(position)
            self._swap_in(position)
            self.clock_s += implementation.time_s
            for i in self.copies_starting[position]:
                self.out_free_s = max(self.clock_s, self.out_free_s) + self.swaps[i].swap_out_s
                self.out_done_s[i] = self.out_free_s
            for nbytes, swap_out_s in self.other_copies[position]:
                self.out_free_s = max(self.clock_s, self.out_free_s) + swap_out_s
                self.other_pending.append((self.out_free_s, nbytes))
                self.other_pending_nbytes += nbytes
            for i in self.becoming_idle[position]:
                self.resident.add(i)
                self.copying_nbytes += self.swaps[i].nbytes
                heapq.heappush(self.copying, (self.out_done_s[i], i))

    def copying_profile(self) -> Ints:
        """Per position, bytes of values that may be swapped out and are still being copied to the host."""
        change = np.zeros(len(self.headroom) + 1, np.int64)
        for swap, copied in zip(self.swaps, self.copied, strict=True):
            if swap.interval.after != START:
                change[swap.earliest] += swap.nbytes
                change[copied] -= swap.nbytes
        return np.cumsum(change)[:-1]

    def _needed(self, i: int) -> None:
        """The next run reads the value: from here on it counts among what cannot be swapped out."""
        nbytes = self.swaps[i].nbytes
        if i in self.resident:
            self.resident.discard(i)
            self._no_longer_idle(i)
            self.copying_nbytes -= nbytes if self.copied[i] == self.swaps[i].interval.before else 0
        elif self.in_at[i] < self.before[i]:
            self.prefetched_nbytes -= nbytes

    def _no_longer_idle(self, i: int) -> None:
        self.idle_sum_nbytes -= int(self.idle_nbytes[i])
        self.idle_nbytes[i] = 0

    def _finish_copies(self, position: int) -> None:
        """Record the copies to the host that are done by now."""
        while self.other_pending and self.other_pending[0][0] <= self.clock_s:
            self.other_pending_nbytes -= self.other_pending.popleft()[1]
        while self.copying and self.copying[0][0] <= self.clock_s:
            _, i = heapq.heappop(self.copying)
            if i in self.resident:
                self.copied[i] = position
                self.copying_nbytes -= self.swaps[i].nbytes
                self.idle_nbytes[i] = self.swaps[i].nbytes
                self.idle_sum_nbytes += self.swaps[i].nbytes
                heapq.heappush(self.idle, (-self.swaps[i].interval.before, i))

    def _make_headroom(self, position: int) -> None:
        """Free values until the next run fits; wait for copies if no idle value is left."""
        headroom = int(self.headroom[position]) - self.prefetched_nbytes
        while (self.resident or self.other_pending) and (
            self.copying_nbytes + self.idle_sum_nbytes + self.other_pending_nbytes > headroom
        ):
            if self.idle:
                _, i = heapq.heappop(self.idle)
                if i in self.resident:
                    self.resident.discard(i)
                    self._no_longer_idle(i)
                    self._swap_out(i, position)
            elif self.other_pending and not (self.copying and self.copying[0][0] < self.other_pending[0][0]):
                self.clock_s = max(self.clock_s, self.other_pending[0][0])
                self._finish_copies(position)
            else:
                done_s, i = self.copying[0]
                if i in self.resident:
                    self.clock_s = max(self.clock_s, done_s)
                else:
                    heapq.heappop(self.copying)
                self._finish_copies(position)

    def _swap_out(self, i: int, position: int) -> None:
        self.out_at[i] = position
        insort(self.swapped_out, (self.swaps[i].interval.before, -self.swaps[i].nbytes, i))

    def _swap_in(self, position: int) -> None:
        """Start copies back, and wait for those that the next run reads."""
        place, blocked = 0, None
        while place < len(self.swapped_out):
            before, _, i = self.swapped_out[place]
            if blocked is not None and before > blocked:
                break
            if before > position:
                # Not before the lane is free: until then a value that is needed sooner may fit.
                ready_s = max([self.clock_s, *(self.back_done_s[j] for j in self.needed_by[position])])
                if self.back_free_s >= ready_s + self.order.implementations[position].time_s:
                    break
                if not self._fits(i, position):
                    blocked, place = before, place + 1
                    continue
            self.swapped_out.pop(place)
            self.in_at[i] = position
            self.back_free_s = max(self.clock_s, self.back_free_s)
            self.back_free_s += self.swaps[i].swap_in_s if self.prefetch else 0.0
            self.back_done_s[i] = self.back_free_s
            if before > position:
                self.prefetched_nbytes += self.swaps[i].nbytes
                self.free[position:before] -= self.swaps[i].nbytes
                self._make_headroom(position)
        for i in self.needed_by[position]:
            if self.out_at[i] < position:
                self.clock_s = max(self.clock_s, self.back_done_s[i])

    def _fits(self, i: int, position: int) -> bool:
        """Whether a value may come back so early: no value that is needed before it is evicted for it."""
        swap = self.swaps[i]
        if not self.prefetch or self.free[position] < swap.nbytes:
            return False
        if self.free[position : swap.interval.before].min() < swap.nbytes:
            return False
        resident = self.copying_nbytes + self.other_pending_nbytes + self.prefetched_nbytes
        there = self.headroom[position] - resident - swap.nbytes
        if there < 0:
            return False
        return bool(self.idle_nbytes[self.before < swap.interval.before].sum() <= there)
