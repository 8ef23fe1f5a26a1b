"""What becomes of gradients, and the steps of the optimizer, in a schedule whose copies are placed.

A gradient of a parameter at home on the host is copied there as soon as it is made, stays on the device while
the copy is under way as long as there is room, and is handed over on the host. An update follows its gradient
(`in_backward`), or all of them follow the backward in the order in which the next forward reads the
parameters: those on the CPU go on beside it. O(steps).
"""

from collections import deque
from collections.abc import Iterable

import attrs

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Graph,
    Home,
    Lane,
    Links,
    OptimizerStep,
    Role,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
    simulate,
)


def leaving(graph: Graph) -> frozenset[int]:
    """Gradients that go to the host: those of parameters that are at home there."""
    values = graph.values
    return frozenset(
        grad
        for grad in graph.gradients
        if (owner := values[grad].of) is not None and values[owner].home is Home.HOST
    )


def without_leaving(graph: Graph) -> Graph:
    """The same step, where a gradient that goes to the host goes as soon as nothing reads it."""
    gone = leaving(graph)
    values = [
        attrs.evolve(v, role=Role.ACTIVATION, of=None) if i in gone else v for i, v in enumerate(graph.values)
    ]
    return attrs.evolve(
        graph, values=tuple(values), updates=tuple(u for u in graph.updates if u.grad not in gone)
    )


def hand_over(
    graph: Graph, schedule: Schedule, budget_nbytes: int, links: Links, *, in_backward: bool
) -> Schedule:
    """Add what `without_leaving` left out, and the updates.

    Args:
        graph: the training step, everything at its home.
        schedule: placed steps on `without_leaving(graph)`.
        budget_nbytes: how much there may be on the device.
        links: bandwidths.
        in_backward: whether each parameter is updated as soon as its gradient is there.
    """
    waiting = _Rewriter(graph, schedule, links, None, in_backward).rewrite()
    during = iter(simulate(graph, waiting, links=links).during_nbytes)
    highest = [n for n, step in zip(during, waiting.steps, strict=True) if isinstance(step, Compute)]
    room = [budget_nbytes - nbytes for nbytes in highest]
    return _Rewriter(graph, schedule, links, room, in_backward).rewrite()


@attrs.define
class _Copy:
    grad: int
    done_s: float
    nbytes: int


class _Rewriter:
    """One pass over the steps with a clock for the lane to the host."""

    def __init__(
        self, graph: Graph, schedule: Schedule, links: Links, room: list[int] | None, in_backward: bool
    ) -> None:
        """Start.

        Args:
            graph: the training step.
            schedule: what is rewritten.
            links: bandwidths.
            room: per run of an op, bytes that are free beside it; None to wait for every copy on the spot.
            in_backward: see `hand_over`.
        """
        self.graph, self.schedule, self.links = graph, schedule, links
        self.room, self.in_backward = room, in_backward
        self.leaving = leaving(graph)
        self.updated = {update.grad: update.param for update in graph.updates}
        self.steps: list[Step] = []
        self.boundary = len(schedule.steps)
        self.copies: deque[_Copy] = deque()
        self.copying_nbytes = 0
        self.clock_s = self.lane_free_s = 0.0
        self.last_fetch: dict[int, int] = {}
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Wait) and step.transfer.lane is Lane.TO_DEVICE:
                self.last_fetch[step.transfer.value] = position
        self.later: dict[int, list[Step]] = {}  # what must come after the last fetch of a parameter

    def rewrite(self) -> Schedule:
        """Walk."""
        runs = 0
        for position, step in enumerate(self.schedule.steps):
            if position == self.schedule.boundary:
                self.boundary = len(self.steps)
            match step:
                case Compute(op, implementation):
                    self.make_room(None if self.room is None else self.room[runs])
                    self.clock_s += self.graph.ops[op].implementations[implementation].time_s
                    runs += 1
                    self.steps.append(step)
                case Free(value) if value in self.leaving:
                    self.send(value, position)
                case Deliver(value) if self.in_backward and value in self.updated:
                    self.steps += [OptimizerStep(self.updated[value], Lane.COMPUTE), Free(value)]
                case Start(transfer) if transfer.lane is Lane.TO_HOST:
                    self.lane_free_s = max(self.clock_s, self.lane_free_s) + self.links.alone_s(
                        transfer.lane, self.graph.values[transfer.value].nbytes
                    )
                    self.steps.append(step)
                case _:
                    self.steps.append(step)
            self.steps += self.later.pop(position, ())
        self.make_room(-1)
        if self.schedule.boundary == len(self.schedule.steps):
            self.boundary = len(self.steps)
        end = None if self.in_backward else len(self.steps)
        if not self.in_backward:
            self.steps += _updates(self.graph)
        return Schedule(self.steps, self.boundary, end)

    def send(self, grad: int, position: int) -> None:
        """Start a gradient's copy to the host."""
        stored, transfer = self.graph.values[grad], Transfer(grad, Lane.TO_HOST)
        self.steps.append(Start(transfer))
        owner = self.updated.get(grad)
        if owner is not None and self.in_backward:
            # It waits for the copy by itself; the device's own may not be fetched again after it.
            update = OptimizerStep(owner, Lane.CPU_OPTIMIZER)
            fetched = self.last_fetch.get(owner, -1)
            if fetched < position:
                self.steps.append(update)
            else:
                self.later.setdefault(fetched, []).append(update)
        self.lane_free_s = max(self.clock_s, self.lane_free_s) + self.links.alone_s(
            Lane.TO_HOST, stored.nbytes
        )
        self.copies.append(_Copy(grad, self.lane_free_s, self.graph.allocated_nbytes(grad)))
        self.copying_nbytes += self.copies[-1].nbytes
        if self.room is None:
            self.make_room(-1)

    def make_room(self, room_nbytes: int | None) -> None:
        """Wait for copies that are done by now, and for as many more as the next run needs gone."""
        while self.copies and (
            self.copies[0].done_s <= self.clock_s or room_nbytes is None or self.copying_nbytes > room_nbytes
        ):
            copy = self.copies.popleft()
            self.copying_nbytes -= copy.nbytes
            self.clock_s = max(self.clock_s, copy.done_s)
            self.steps += [Wait(Transfer(copy.grad, Lane.TO_HOST)), Free(copy.grad)]
            if not (self.in_backward and copy.grad in self.updated):
                self.steps.append(Deliver(copy.grad))


def _updates(graph: Graph) -> Iterable[Step]:
    """All updates, in the order in which a forward reads the parameters."""
    first: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for value in op.first.inputs:
            first.setdefault(value, position)
    for update in sorted(graph.updates, key=lambda update: first.get(update.param, len(graph.ops))):
        on_host = graph.values[update.param].home is Home.HOST
        yield OptimizerStep(update.param, Lane.CPU_OPTIMIZER if on_host else Lane.COMPUTE)
