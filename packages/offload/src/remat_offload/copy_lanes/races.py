"""Find races: a happens-before checker over one recorded order, for all orders that the machine allows.

A correct run may have been lucky in its timing, so the checker does not use times. For any two accesses to
one buffer, on different lanes and at least one of them a write, it checks whether something *makes* one come
before the other: the order of a lane, or a wait in the record.

Each operation gets a vector clock: for each lane, the last operation on it that is certainly done before
(Mattern, 1989). Lanes run in order, so an operation comes before another exactly if the other's clock has
reached it, and a search back along a lane stops at the first that does.

Known to be imperfect: a buffer is a whole storage, so simultaneous copies of two parts of one storage, in
both directions, are reported as a race.
"""

from collections import defaultdict
from collections.abc import Sequence

import attrs

from remat_graph import Lane


@attrs.define(kw_only=True)
class Operation:
    """One operation of a record.

    Attributes:
        index: its place in the record.
        lane: where it runs.
        name: its name in reports.
        after: places of operations done before it begins, in addition to those before it on its lane.
        reads: numbers of the buffers it reads.
        writes: numbers of the buffers it writes.
    """

    index: int
    lane: Lane
    name: str
    after: tuple[int, ...] = ()
    reads: set[int] = attrs.field(factory=set)
    writes: set[int] = attrs.field(factory=set)

    def __str__(self) -> str:
        return f"{self.name!r} (operation {self.index}, on {self.lane})"


@attrs.frozen
class Race:
    """Two accesses to one buffer, at least one a write, without a guaranteed order.

    Attributes:
        first: the earlier one in the record.
        second: the later one.
        buffer: the buffer's number.
    """

    first: Operation
    second: Operation
    buffer: int

    def __str__(self) -> str:
        return f"buffer {self.buffer}: {self.first} and {self.second} may overlap; let one wait for the other"


def find_races(record: Sequence[Operation]) -> list[Race]:
    """Return all races of a record, in the order of their second operation.

    Args:
        record: the operations in order; those on the CPU have run (``drain`` the recorder first).
    """
    races: list[Race] = []
    clocks: list[dict[Lane, int]] = []
    last: dict[Lane, int] = {}
    touched: dict[int, dict[Lane, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for operation in record:
        own = operation.lane
        clock: dict[Lane, int] = {}
        for before in (*operation.after, *([last[own]] if own in last else [])):
            for lane, reached in clocks[before].items():
                clock[lane] = max(reached, clock.get(lane, -1))
        clock[own] = last[own] = operation.index
        clocks.append(clock)
        for buffer in sorted(operation.reads | operation.writes):
            for lane, earlier in touched[buffer].items():
                for other in reversed(earlier):
                    if other.index <= clock.get(lane, -1):
                        break
                    if buffer in operation.writes or buffer in other.writes:
                        races.append(Race(other, operation, buffer))
            touched[buffer][own].append(operation)
    return races
