"""What a schedule allocates on the device and frees, step by step, by the memory rule of the referee.

The bytes that are allocated and not freed are those of `Timeline.live_nbytes` after each step, and the most
of them within a step is `Timeline.during_nbytes`. The pass over the steps is O(steps).
"""

from collections.abc import Iterable
from enum import StrEnum

import attrs

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Grads,
    Graph,
    Lane,
    OptimizerStep,
    Placement,
    Role,
    Schedule,
    Start,
    simulate,
)
from remat_graph.training import persistent


class Cause(StrEnum):
    """Why a block is allocated."""

    PERSISTENT = "before the step"
    TANGENT = "tangent"
    SWAP_IN = "swapped in"
    FORWARD = "forward"
    BACKWARD = "backward"
    REPEAT = "recomputed"
    UPDATE = "optimizer"


@attrs.frozen
class StorageBlock:
    """One allocation of the device.

    Attributes:
        nbytes: its size, rounded as the allocator does; never 0.
        cause: why it is allocated.
        value: the value that is stored there first; None for workspaces and copies.
        op: the op that allocates it, if one does.
    """

    nbytes: int
    cause: Cause
    value: int | None = None
    op: int | None = None


@attrs.frozen
class MemoryEvent:
    """A block that is allocated or freed in a step; in step -1 before the first one."""

    step: int
    block: int  # its number, in the order of allocation
    freed: bool


@attrs.define(eq=False)
class Allocations:
    """All blocks of a schedule, and their events in order.

    Attributes:
        blocks: the blocks, by number.
        events: the events; blocks without a freeing one stay to the end.
    """

    blocks: list[StorageBlock] = attrs.field(factory=list)
    events: list[MemoryEvent] = attrs.field(factory=list)
    _stored_in: dict[int, int] = attrs.field(factory=dict)  # per value on the device, the number of its block

    def allocate(self, step: int, block: StorageBlock) -> list[int]:
        """Allocate a block; return its number, or nothing if it has no bytes."""
        if not block.nbytes:
            return []
        number = len(self.blocks)
        self.blocks.append(block)
        self.events.append(MemoryEvent(step, number, freed=False))
        if block.value is not None:
            self._stored_in[block.value] = number
        return [number]

    def free(self, step: int, blocks: Iterable[int]) -> None:
        """Free blocks."""
        self.events.extend(MemoryEvent(step, number, freed=True) for number in blocks)

    def free_value(self, step: int, value: int) -> None:
        """Free the block of a value; nothing if another value has taken it over."""
        if value in self._stored_in:
            self.free(step, [self._stored_in.pop(value)])

    def take_over(self, value: int, source: int) -> None:
        """Store a value in the block of another one."""
        if source in self._stored_in:
            self._stored_in[value] = self._stored_in.pop(source)


def allocations(graph: Graph, schedule: Schedule, grads: Grads = Grads.NEW) -> Allocations:
    """The allocations of a schedule.

    Args:
        graph: the graph.
        schedule: the steps.
        grads: the state of ``.grad``; decides whether a delivered gradient stays.

    Raises:
        InvalidSchedule: the schedule is invalid.
    """
    simulate(graph, schedule, grads=grads)
    found = Allocations()
    live: set[int] = set()
    delivered: set[int] = set()
    ran: set[int] = set()

    def arrive(step: int, values: Iterable[int], cause: Cause) -> None:
        for v in values:
            live.add(v)
            found.allocate(step, StorageBlock(graph.allocated_nbytes(v), cause, v))

    arrive(-1, persistent(graph, Placement.DEVICE), Cause.PERSISTENT)
    for position, step in enumerate(schedule.steps):
        if position == schedule.boundary:
            arrive(position, graph.tangents, Cause.TANGENT)
        match step:
            case Compute(op):
                usual = Cause.BACKWARD if graph.ops[op].backward else Cause.FORWARD
                cause = Cause.REPEAT if op in ran else usual
                ran.add(op)
                _run(found, graph, schedule, position, cause, live, delivered)
            case Free(value):
                live.discard(value)
                found.free_value(position, value)
            case Deliver(value):
                live.discard(value)
                delivered.add(value)
                if not stays(graph, value, grads):
                    found.free_value(position, value)
            case Start(transfer) if transfer.lane is Lane.TO_DEVICE and transfer.value not in live:
                arrive(position, [transfer.value], Cause.SWAP_IN)
            case OptimizerStep(value, lane) if lane is Lane.COMPUTE:
                update = next(each for each in graph.updates if each.param == value)
                found.free(
                    position, found.allocate(position, StorageBlock(update.workspace_nbytes, Cause.UPDATE))
                )
    if schedule.boundary >= len(schedule.steps):
        arrive(len(schedule.steps), graph.tangents, Cause.TANGENT)
    return found


def _run(
    found: Allocations,
    graph: Graph,
    schedule: Schedule,
    position: int,
    cause: Cause,
    live: set[int],
    delivered: set[int],
) -> None:
    """Allocate the outputs and the workspace of one run; free the workspace and the copies again."""
    step = schedule.steps[position]
    assert isinstance(step, Compute)
    run = graph.ops[step.op].implementations[step.implementation]
    dying = {source for _, source in run.reuses} & freed_after(schedule, position)
    brief: list[int] = []  # freed when the op ends
    for v in run.outputs:
        if graph.values[v].external:
            continue
        if v in live or v in delivered:  # a repeat copies a pinned value that exists
            brief += found.allocate(position, StorageBlock(graph.allocated_nbytes(v), cause, None, step.op))
            continue
        live.add(v)
        sources = [source for made, source in run.reuses if made == v and source in dying]
        if sources:
            dying.discard(sources[0])
            found.take_over(v, sources[0])
        else:
            found.allocate(position, StorageBlock(graph.allocated_nbytes(v), cause, v, step.op))
    brief += found.allocate(position, StorageBlock(run.workspace_nbytes, cause, None, step.op))
    found.free(position, brief)


def freed_after(schedule: Schedule, position: int) -> set[int]:
    """Values whose `Free` steps follow a step directly."""
    freed: set[int] = set()
    position += 1
    while position < len(schedule.steps) and isinstance(step := schedule.steps[position], Free):
        freed.add(step.value)
        position += 1
    return freed


def stays(graph: Graph, gradient: int, grads: Grads) -> bool:
    """Whether a gradient stays on the device when it is delivered, as the caller's."""
    owner = graph.values[gradient].of
    added = owner is not None and graph.values[owner].role is Role.PARAM
    return grads is Grads.NEW or (grads is Grads.PRESENT and not added)
