"""Where copies to the host and back go in a schedule, once it is known what may be away when.

`place` walks along an order of ops with a clock for each lane and does what a cache with an eager look ahead
does.

* A copy to the host starts as soon as its value is made and the copies before it have started. Two orders are
  tried, and the referee says which is faster: what falls idle first, or of what is made together the smallest
  first. Until memory asks for the room, the value stays: whoever is needed again last goes first, if its copy
  is done, and if none is, the walk waits for the next one. A value that memory never asks for stays, and its
  copy is left out.
* A copy back starts as soon as there is room for it until its value is needed and its lane has time for it:
  the first needed first, and the largest of those that one run needs. Room means: within the budget beside
  everything that cannot leave, and beside the copies to the host that were under way in a first walk without
  copies back; to leave none free for these is tried as well.

What each run needs is the referee's word on the schedule in which every copy is waited for on the spot. So
the peak is within the budget wherever that schedule's is. Not optimal: the copies to the host go in a fixed
order, and those back wherever they have room. O(runs * longest gap) in numpy for the look ahead,
O(moves * log(moves)) for the rest; 1 s for 8,000 runs and 1,600 moves on one core of a server, most of it the
referee's.
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
from remat_solvers.transfers.idle_intervals import START, Gap, Line, Trip, gaps, trips_of

__all__ = ["WAYS", "Gap", "Placed", "Way", "gaps", "place", "place_on"]


def place(
    graph: Graph,
    order: Iterable[int],
    moves: Iterable[Gap],
    budget_nbytes: int,
    links: Links,
    leaving: Collection[int] = (),
) -> Schedule:
    """The schedule that runs an order and moves values away in some of its gaps.

    Args:
        graph: the graph.
        order: op indices, repeats included.
        moves: gaps of this order. A move that the budget does not ask for is left out.
        budget_nbytes: what the peak should stay within; where even moves that are waited for go above it, so
            does the schedule.
        links: bandwidths.
        leaving: values that are to be copied to the host where the schedule frees them. Their copies are for
            the caller to write; here they keep the lane busy and their bytes on the device for as long.

    Raises:
        InvalidSchedule: the order is not valid.
        NoGap: a move is not one of the order's gaps.
    """
    return place_on(Line(graph, order), moves, budget_nbytes, links, leaving).schedule


@attrs.frozen(kw_only=True, eq=False)
class Placed:
    """A schedule with its copies.

    Attributes:
        schedule: the steps.
        timeline: what the referee says of them.
        way: which of `WAYS` it was made in; None if every copy is waited for on the spot.
    """

    schedule: Schedule
    timeline: Timeline
    way: "Way | None"


class Way(NamedTuple):
    """In which order copies leave, and whether copies back leave room for those under way."""

    small_first: bool
    heed: bool


WAYS = (Way(False, True), Way(False, False), Way(True, True))


def place_on(
    line: Line,
    moves: Iterable[Gap],
    budget_nbytes: int,
    links: Links,
    leaving: Collection[int] = (),
    ways: Sequence[Way] = WAYS,
) -> Placed:
    """See `place`; of the ways that are tried, the fastest."""
    graph, moves = line.graph, tuple(moves)
    trips = trips_of(line, moves, links)
    waiting = line.schedule(trips, [t.earliest for t in trips], [t.gap.before for t in trips])
    best = Placed(schedule=waiting, timeline=simulate(graph, waiting, links=links), way=None)
    if not trips:
        return best
    steps = zip(best.timeline.during_nbytes, waiting.steps, strict=True)
    room = budget_nbytes - np.array([n for n, step in steps if isinstance(step, Compute)], np.int64)
    departures = [
        [
            (graph.allocated_nbytes(step.value), links.alone_s(Lane.TO_HOST, graph.values[step.value].nbytes))
            for step in frees
            if isinstance(step, Free) and step.value in leaving
        ]
        for frees in line.frees
    ]
    compute_s = sum(way.time_s for way in line.ways)
    for way in ways:
        trips = trips_of(line, moves, links, small_first=way.small_first)
        outward = _Walk(line, trips, room, None, departures)
        outward.run()
        kept_free = outward.lingering() if way.heed else np.zeros_like(room)
        walk = _Walk(line, trips, room, kept_free, departures)
        walk.run()
        schedule = line.schedule(trips, walk.away, walk.back)
        timeline = simulate(graph, schedule, links=links)
        if timeline.time_s <= best.timeline.time_s:
            best = Placed(schedule=schedule, timeline=timeline, way=way)
        if best.timeline.time_s <= compute_s * (1 + 1e-9):
            break  # everything hides
    return best


class _Walk:
    """One pass along the order with a clock: which trip leaves when, and starts back when.

    Attributes:
        away: per trip the position before which its value leaves; where its gap ends if it never does.
        back: per trip the position before which its copy back starts.
    """

    def __init__(
        self,
        line: Line,
        trips: Sequence[Trip],
        room: Ints,
        kept_free: Ints | None,
        departures: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        """Start.

        Args:
            line: the order.
            trips: what may be away.
            room: per position, bytes beside what cannot be away.
            kept_free: how much of it copies back leave free; None to start none before it is needed, and to
                count no time for it.
            departures: per position, bytes and seconds of copies to the host that start behind its run.
        """
        self.departures = departures
        self.departing: deque[tuple[float, int]] = deque()
        self.departing_nbytes = 0
        self.line, self.trips, self.room = line, trips, room
        self.early = kept_free is not None
        self.free = room - (0 if kept_free is None else kept_free)  # less what is on its way back
        self.before = np.array([trip.gap.before for trip in trips])
        self.away, self.back, self.settled = (self.before.tolist() for _ in range(3))
        self.clock_s = self.out_free_s = self.back_free_s = 0.0
        self.out_done_s = [0.0] * len(trips)
        self.back_done_s = [0.0] * len(trips)
        self.coming_nbytes = 0  # on the way back and not needed yet
        # Trips whose value is still here: first those that are being copied, then idle.
        self.here: set[int] = set()
        self.copying: list[tuple[float, int]] = []
        self.copying_nbytes = 0
        self.idle: list[tuple[int, int]] = []
        self.idle_nbytes = np.zeros(len(trips), np.int64)  # per trip
        self.idle_sum_nbytes = 0
        self.outside: list[tuple[int, int, int]] = []  # first needed first, of these the largest
        self.starting: list[list[int]] = [[] for _ in line.ways]
        self.leaving: list[list[int]] = [[] for _ in line.ways]
        self.due: list[list[int]] = [[] for _ in line.ways]
        for i, trip in enumerate(trips):
            self.due[trip.gap.before].append(i)
            if trip.gap.after == START:
                self._leave(i, START)
            else:
                self.leaving[trip.gap.after].append(i)
            if trip.start != START:
                self.starting[trip.start].append(i)

    def run(self) -> None:
        """Walk."""
        for position, way in enumerate(self.line.ways):
            for i in self.due[position]:
                self._end(i)
            self._settle(position)
            self._make_room(position)
            self._fetch(position)
            self.clock_s += way.time_s
            for i in self.starting[position]:
                self.out_free_s = max(self.clock_s, self.out_free_s) + self.trips[i].out_s
                self.out_done_s[i] = self.out_free_s
            for nbytes, out_s in self.departures[position]:
                self.out_free_s = max(self.clock_s, self.out_free_s) + out_s
                self.departing.append((self.out_free_s, nbytes))
                self.departing_nbytes += nbytes
            for i in self.leaving[position]:
                self.here.add(i)
                self.copying_nbytes += self.trips[i].nbytes
                heapq.heappush(self.copying, (self.out_done_s[i], i))

    def lingering(self) -> Ints:
        """Per position, bytes of values that may be away and are still being copied to the host."""
        change = np.zeros(len(self.room) + 1, np.int64)
        for trip, settled in zip(self.trips, self.settled, strict=True):
            if trip.gap.after != START:
                change[trip.earliest] += trip.nbytes
                change[settled] -= trip.nbytes
        return np.cumsum(change)[:-1]

    def _end(self, i: int) -> None:
        """A value is needed: from here on it counts among what cannot be away."""
        nbytes = self.trips[i].nbytes
        if i in self.here:
            self.here.discard(i)
            self._no_longer_idle(i)
            self.copying_nbytes -= nbytes if self.settled[i] == self.trips[i].gap.before else 0
        elif self.back[i] < self.before[i]:
            self.coming_nbytes -= nbytes

    def _no_longer_idle(self, i: int) -> None:
        self.idle_sum_nbytes -= int(self.idle_nbytes[i])
        self.idle_nbytes[i] = 0

    def _settle(self, position: int) -> None:
        """Copies to the host that are done by now."""
        while self.departing and self.departing[0][0] <= self.clock_s:
            self.departing_nbytes -= self.departing.popleft()[1]
        while self.copying and self.copying[0][0] <= self.clock_s:
            _, i = heapq.heappop(self.copying)
            if i in self.here:
                self.settled[i] = position
                self.copying_nbytes -= self.trips[i].nbytes
                self.idle_nbytes[i] = self.trips[i].nbytes
                self.idle_sum_nbytes += self.trips[i].nbytes
                heapq.heappush(self.idle, (-self.trips[i].gap.before, i))

    def _make_room(self, position: int) -> None:
        """Let values go until the next run fits, and wait for copies if nothing idle is left."""
        room = int(self.room[position]) - self.coming_nbytes
        while (self.here or self.departing) and (
            self.copying_nbytes + self.idle_sum_nbytes + self.departing_nbytes > room
        ):
            if self.idle:
                _, i = heapq.heappop(self.idle)
                if i in self.here:
                    self.here.discard(i)
                    self._no_longer_idle(i)
                    self._leave(i, position)
            elif self.departing and not (self.copying and self.copying[0][0] < self.departing[0][0]):
                self.clock_s = max(self.clock_s, self.departing[0][0])
                self._settle(position)
            else:
                done_s, i = self.copying[0]
                if i in self.here:
                    self.clock_s = max(self.clock_s, done_s)
                else:
                    heapq.heappop(self.copying)
                self._settle(position)

    def _leave(self, i: int, position: int) -> None:
        self.away[i] = position
        insort(self.outside, (self.trips[i].gap.before, -self.trips[i].nbytes, i))

    def _fetch(self, position: int) -> None:
        """Start copies back, and wait for what the next run reads."""
        place, blocked = 0, None
        while place < len(self.outside):
            before, _, i = self.outside[place]
            if blocked is not None and before > blocked:
                break
            if before > position:
                # No sooner than the lane has time for it: what is needed sooner may find room until then.
                ready_s = max([self.clock_s, *(self.back_done_s[j] for j in self.due[position])])
                if self.back_free_s >= ready_s + self.line.ways[position].time_s:
                    break
                if not self._fits(i, position):
                    blocked, place = before, place + 1
                    continue
            self.outside.pop(place)
            self.back[i] = position
            self.back_free_s = max(self.clock_s, self.back_free_s)
            self.back_free_s += self.trips[i].back_s if self.early else 0.0
            self.back_done_s[i] = self.back_free_s
            if before > position:
                self.coming_nbytes += self.trips[i].nbytes
                self.free[position:before] -= self.trips[i].nbytes
                self._make_room(position)
        for i in self.due[position]:
            if self.away[i] < position:
                self.clock_s = max(self.clock_s, self.back_done_s[i])

    def _fits(self, i: int, position: int) -> bool:
        """Whether a value may come back so early: nothing that is needed before it has to go for it."""
        trip = self.trips[i]
        if not self.early or self.free[position] < trip.nbytes:
            return False
        if self.free[position : trip.gap.before].min() < trip.nbytes:
            return False
        here = self.copying_nbytes + self.departing_nbytes + self.coming_nbytes
        there = self.room[position] - here - trip.nbytes
        if there < 0:
            return False
        return bool(self.idle_nbytes[self.before < trip.gap.before].sum() <= there)
