"""Idle intervals of values in an order of ops, and the schedule once it is chosen which of them are used.

An *idle interval* lies between two consecutive uses of one computation of a value; meanwhile the value may
be on the host. A value that is placed on the host (a weight that is fetched for each use) is also absent from
the device before its first use and after its last; nothing changes it, so it is never copied out. Each
absence is a `Swap`. `placement` chooses when a swap begins and ends, and `OrderTimeline.schedule` writes the
steps. O(uses).
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
from remat_solvers.errors import NoIdleInterval

START = -1  # before the first run


@attrs.frozen(order=True)
class IdleInterval:
    """A time in which a value may be absent from the device; positions count the runs of an order.

    Attributes:
        value: index of the value.
        after: position of the last run that uses it before.
        before: position of the next run that reads it.
    """

    value: int
    after: int
    before: int


def idle_intervals(graph: Graph, order: Iterable[int]) -> list[IdleInterval]:
    """Every idle interval of an order of ops, by position.

    Outputs, gradients, external values and values placed on the device have none.

    Args:
        graph: the graph.
        order: op indices, repeats included.

    Raises:
        InvalidSchedule: an op that may run only once comes twice.
    """
    return [interval for interval, _ in OrderTimeline(graph, order).idle_intervals]


@attrs.frozen(kw_only=True)
class Swap:
    """An idle interval of a value that may be swapped, or the fetch of a value placed on the host."""

    interval: IdleInterval  # when; `after` is START for a value that is on the host when the step begins
    nbytes: int  # bytes of the value on the device
    swap_out_s: float  # seconds of the copy to the host
    swap_in_s: float  # seconds of the copy to the device
    start: int  # position after which the copy to the host starts; START if the swap needs none

    @property
    def earliest(self) -> int:
        """Position before which the device's copy may be freed."""
        return START if self.interval.after == START else self.interval.after + 1


class OrderTimeline:
    """The runs of an order, and the frees that follow each of them, as `Schedule.from_order` gives them."""

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
        self.implementations = [graph.ops[run.op].implementations[run.implementation] for run in self.runs]
        uses = (
            (v, p) for p, implementation in enumerate(self.implementations) for v in implementation.inputs
        )
        for v, position in dict(
            use for use in uses if graph.values[use[0]].placement is Placement.HOST
        ).items():
            self.frees[position].append(Free(v))

    @cached_property
    def idle_intervals(self) -> list[tuple[IdleInterval, int]]:
        """Every idle interval, and the position of the run that computed its value or used it first."""
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        found: list[tuple[IdleInterval, int]] = []
        for position, implementation in enumerate(self.implementations):
            for v in implementation.inputs:
                if v in last and position - last[v] > 1 and not self._overwritten_if_freed(v, last[v]):
                    found.append((IdleInterval(v, last[v], position), made[v]))
                last[v] = position
                made.setdefault(v, position)
            for v in implementation.outputs:
                made[v] = last[v] = position
        movable = [
            not (value.external or value.pinned or value.placement is Placement.DEVICE)
            for value in self.graph.values
        ]
        return [(interval, begin) for interval, begin in found if movable[interval.value]]

    def _overwritten_if_freed(self, value: int, position: int) -> bool:
        """Whether the run would reuse the storage of the value, and so need less memory than planned."""
        reused = {source for _, source in self.implementations[position].reuses}
        return self.graph.values[value].placement is Placement.HOST and value in reused

    def schedule(self, swaps: Sequence[Swap], swap_out: Sequence[int], swap_in: Sequence[int]) -> Schedule:
        """The schedule in which swap i begins before run `swap_out[i]` and its copy back before `swap_in[i]`.

        A swap whose free would come no earlier than its next use does not take place.
        """
        ahead: list[list[Step]] = [[] for _ in self.runs]
        behind: list[list[Step]] = [[] for _ in self.runs]
        taken = [i for i, swap in enumerate(swaps) if swap_out[i] < swap.interval.before]
        for i in taken:
            out = Transfer(swaps[i].interval.value, Lane.TO_HOST)
            if swaps[i].start != START:
                behind[swaps[i].start].append(Start(out))
                ahead[swap_out[i]].append(Wait(out))
            if swaps[i].interval.after != START:
                ahead[swap_out[i]].append(Free(out.value))
        taken.sort(key=lambda i: swaps[i].interval.before)
        for i in taken:
            ahead[swap_in[i]].append(Start(Transfer(swaps[i].interval.value, Lane.TO_DEVICE)))
        for i in taken:
            interval = swaps[i].interval
            ahead[interval.before].append(Wait(Transfer(interval.value, Lane.TO_DEVICE)))
            if swaps[i].start != START:
                ahead[interval.before].append(FreeHost(interval.value))
        steps: list[Step] = []
        boundary = None
        for position, run in enumerate(self.runs):
            steps += ahead[position]
            if position == self.first_backward:
                boundary = len(steps)
            steps += [run, *self.frees[position], *behind[position]]
        return Schedule(steps, len(steps) if boundary is None else boundary)


def swaps_of(
    order: OrderTimeline, moves: Iterable[IdleInterval], links: Links, *, small_first: bool = False
) -> list[Swap]:
    """The swaps of the chosen intervals by their copies to the host, after fetches of values placed there.

    Of values computed together the smallest is copied first if `small_first`, else the one that is idle
    first.

    Raises:
        NoIdleInterval: a move is not one of the order's idle intervals.
    """
    graph, made = order.graph, dict(order.idle_intervals)
    swap_in: dict[int, int] = {}
    chosen: list[tuple[IdleInterval, int]] = []  # with the position from which its value can be copied
    for interval in sorted(set(moves), key=lambda interval: (interval.after, interval)):
        if interval not in made:
            raise NoIdleInterval(value=interval.value, after=interval.after, before=interval.before)
        chosen.append((interval, max(made[interval], swap_in.get(interval.value, 0))))
        swap_in[interval.value] = interval.before
    if small_first:
        chosen.sort(key=lambda move: (move[1], graph.values[move[0].value].nbytes, move[0]))
    inbound: dict[int, IdleInterval] = {}
    for position, implementation in enumerate(order.implementations):
        for v in implementation.inputs:
            if graph.values[v].placement is Placement.HOST:
                inbound.setdefault(v, IdleInterval(v, START, position))
    swaps, start = [], 0
    for interval, ready in (*((interval, START) for interval in inbound.values()), *chosen):
        stored = graph.values[interval.value]
        copied = stored.placement is None
        if copied:
            start = max(start, ready)  # a copy does not overtake those before it
        swaps.append(
            Swap(
                interval=interval,
                nbytes=graph.allocated_nbytes(interval.value),
                swap_out_s=stored.nbytes / links.to_host_nbytes_per_s if copied else 0.0,
                swap_in_s=stored.nbytes / links.to_device_nbytes_per_s,
                start=start if copied else START,
            )
        )
    return swaps
