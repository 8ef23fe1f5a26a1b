"""When a value may be away from the device in an order of ops, and the schedule once that is chosen.

A *gap* lies between two neighbouring uses of one computation of a value. What is placed on the host (weights
that are streamed in) is away before its first use and after its last as well; it is never copied out, since
nothing changes it. Each time away is a `Trip`; when it begins and ends is for `placement` to choose, and
`Line.schedule` writes the steps. O(uses).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs

from remat_graph import (
    Compute,
    Free,
    FreeHost,
    Graph,
    Lane,
    Links,
    Placement,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
)
from remat_solvers.errors import NoGap

START = -1  # before the first run


@attrs.frozen(order=True)
class Gap:
    """A time in which a value may be away from the device; positions count the runs of an order.

    Attributes:
        value: index of the value.
        after: position of the last run that uses it before.
        before: position of the next run that reads it.
    """

    value: int
    after: int
    before: int


def gaps(graph: Graph, order: Iterable[int]) -> list[Gap]:
    """Every gap of an order of ops, by position.

    Outputs, gradients, what the caller lends and what is placed on the device have none.

    Args:
        graph: the graph.
        order: op indices, repeats included.

    Raises:
        InvalidSchedule: an op that may run only once comes twice.
    """
    return [gap for gap, _ in Line(graph, order).gaps]


@attrs.frozen(kw_only=True)
class Trip:
    """A gap in which a value may be away, or its way in from home.

    Attributes:
        gap: when; `after` is START for what is on the host when the step begins.
        nbytes: what it holds on the device.
        out_s: seconds of its copy to the host.
        back_s: seconds of its copy to the device.
        start: position behind which its copy to the host starts; START if it needs none.
    """

    gap: Gap
    nbytes: int
    out_s: float
    back_s: float
    start: int

    @property
    def earliest(self) -> int:
        """Position before which its value may leave."""
        return START if self.gap.after == START else self.gap.after + 1


class Line:
    """An order with what `Schedule.from_order` says of it: the runs, and the frees that follow each."""

    def __init__(self, graph: Graph, order: Iterable[int]) -> None:
        plain = Schedule.from_order(graph, order)
        self.graph = graph
        self.runs: list[Compute] = []
        self.frees: list[list[Step]] = []
        self.first_backward: int | None = None
        for index, step in enumerate(plain.steps):
            if isinstance(step, Compute):
                if index == plain.boundary:
                    self.first_backward = len(self.runs)
                self.runs.append(step)
                self.frees.append([])
            else:
                self.frees[-1].append(step)
        self.ways = [graph.ops[run.op].implementations[run.implementation] for run in self.runs]
        uses = ((v, p) for p, way in enumerate(self.ways) for v in way.inputs)
        for v, position in dict(
            use for use in uses if graph.values[use[0]].placement is Placement.HOST
        ).items():
            self.frees[position].append(Free(v))

    @cached_property
    def gaps(self) -> list[tuple[Gap, int]]:
        """Every gap, and the position of the run that made its value or used it first."""
        return _gaps(self.graph, self)

    def schedule(self, trips: Sequence[Trip], away: Sequence[int], back: Sequence[int]) -> Schedule:
        """The steps, where trip i leaves the device before run `away[i]` and starts back before `back[i]`.

        A trip that would leave no earlier than it ends does not take place.
        """
        ahead: list[list[Step]] = [[] for _ in self.runs]
        behind: list[list[Step]] = [[] for _ in self.runs]
        taken = [i for i, trip in enumerate(trips) if away[i] < trip.gap.before]
        for i in taken:
            out = Transfer(trips[i].gap.value, Lane.TO_HOST)
            if trips[i].start != START:
                behind[trips[i].start].append(Start(out))
                ahead[away[i]].append(Wait(out))
            if trips[i].gap.after != START:
                ahead[away[i]].append(Free(out.value))
        taken.sort(key=lambda i: trips[i].gap.before)
        for i in taken:
            ahead[back[i]].append(Start(Transfer(trips[i].gap.value, Lane.TO_DEVICE)))
        for i in taken:
            gap = trips[i].gap
            ahead[gap.before].append(Wait(Transfer(gap.value, Lane.TO_DEVICE)))
            if trips[i].start != START:
                ahead[gap.before].append(FreeHost(gap.value))
        steps: list[Step] = []
        boundary = None
        for position, run in enumerate(self.runs):
            steps += ahead[position]
            if position == self.first_backward:
                boundary = len(steps)
            steps += [run, *self.frees[position], *behind[position]]
        return Schedule(steps, len(steps) if boundary is None else boundary)


def _gaps(graph: Graph, line: Line) -> list[tuple[Gap, int]]:
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    found: list[tuple[Gap, int]] = []
    for position, way in enumerate(line.ways):
        for v in way.inputs:
            if v in last and position - last[v] > 1 and not _kept_by(graph, line, v, last[v]):
                found.append((Gap(v, last[v], position), made[v]))
            last[v] = position
            made.setdefault(v, position)
        for v in way.outputs:
            made[v] = last[v] = position
    movable = [
        not (value.external or value.pinned or value.placement is Placement.DEVICE) for value in graph.values
    ]
    return [(gap, begin) for gap, begin in found if movable[gap.value]]


def _kept_by(graph: Graph, line: Line, value: int, position: int) -> bool:
    """Whether the run would write over it if it were freed right behind, and so need less than planned."""
    reused = {source for _, source in line.ways[position].reuses}
    return graph.values[value].placement is Placement.HOST and value in reused


def trips_of(line: Line, moves: Iterable[Gap], links: Links, *, small_first: bool = False) -> list[Trip]:
    """The moves in the order of their copies to the host, behind what has to come in from there.

    Args:
        line: the order.
        moves: some of its gaps.
        links: bandwidths.
        small_first: of values made together copy the smallest first; else those first that fall idle first.

    Raises:
        NoGap: a move is not one of the order's gaps.
    """
    graph, made = line.graph, dict(line.gaps)
    back: dict[int, int] = {}
    chosen: list[tuple[Gap, int]] = []  # with the position from which its value can be copied
    for gap in sorted(set(moves), key=lambda gap: (gap.after, gap)):
        if gap not in made:
            raise NoGap(value=gap.value, after=gap.after, before=gap.before)
        chosen.append((gap, max(made[gap], back.get(gap.value, 0))))
        back[gap.value] = gap.before
    if small_first:
        chosen.sort(key=lambda move: (move[1], graph.values[move[0].value].nbytes, move[0]))
    inbound: dict[int, Gap] = {}
    for position, way in enumerate(line.ways):
        for v in way.inputs:
            if graph.values[v].placement is Placement.HOST:
                inbound.setdefault(v, Gap(v, START, position))
    trips, start = [], 0
    for gap, ready in (*((gap, START) for gap in inbound.values()), *chosen):
        stored = graph.values[gap.value]
        copied = stored.placement is None
        if copied:
            start = max(start, ready)  # a copy does not overtake those before it
        trips.append(
            Trip(
                gap=gap,
                nbytes=graph.allocated_nbytes(gap.value),
                out_s=stored.nbytes / links.to_host_nbytes_per_s if copied else 0.0,
                back_s=stored.nbytes / links.to_device_nbytes_per_s,
                start=start if copied else START,
            )
        )
    return trips
