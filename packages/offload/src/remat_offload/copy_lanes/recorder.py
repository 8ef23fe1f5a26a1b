"""`Recorder` is a machine that records its work, so that ``find_races`` can check whether the order is safe.

The record contains exactly the order that a CUDA device guarantees: a ticket's work comes after the tickets
it names, a copy also after the compute before it, compute after the tickets that it waits for, and everything
after the work that the calling thread has waited for. So a run on the simulated machine, where compute is
done when its call returns, is checked as a run on a device.

Compute is recorded by calls of ``reads`` and ``writes``. Work on the CPU is recorded by a dispatch mode; its
function calls the same two methods for accesses outside of PyTorch (by NumPy, for example). The threads that
submit work count as one thread, as the calling thread and autograd's do.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.fork_lock import ForkAwareLock
from remat_graph import Lane
from remat_offload.copy_lanes.machine import Machine, Ticket
from remat_offload.copy_lanes.races import Operation
from remat_offload.errors import MachineMisuse


@attrs.frozen(eq=False)
class RecordedTicket:
    """A machine's ticket; waiting for it is recorded."""

    operation: Operation
    _ticket: Ticket
    _recorder: "Recorder"

    def query(self) -> bool:
        """Whether it is done; if so, the caller has waited for it."""
        done = self._ticket.query()
        if done:
            self._recorder._waited_for(self.operation)
        return done

    def wait(self) -> None:
        """Block until the lane's thread has finished or failed."""
        self._ticket.wait()
        if self.operation.lane is Lane.CPU_OPTIMIZER:  # a copy may be unfinished
            self._recorder._waited_for(self.operation)

    def synchronize(self) -> None:
        """Block until it is done; raises the errors of the machine's ticket."""
        self._ticket.synchronize()
        self._recorder._waited_for(self.operation)


class Recorder:
    """Records work and passes it to another machine.

    Args:
        machine: the other machine; only the recorder may call its methods.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._record: list[Operation] = []
        self._last: dict[Lane, int] = {}
        self._seen: dict[Lane, int] = {}  # the last operation of each lane that the calling thread waited for
        self._buffers = _Buffers()
        self._running = threading.local()  # in a lane's thread: its current operation

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._machine.device

    @property
    def record(self) -> tuple[Operation, ...]:
        """The operations so far, in order."""
        return tuple(self._record)

    def reads(self, tensors: Iterable[Tensor], name: str = "compute") -> None:
        """Record that compute submitted now reads tensors; in a function of ``work``, that the work does."""
        self._touch(name, reads=tensors)

    def writes(self, tensors: Iterable[Tensor], name: str = "compute") -> None:
        """Record that compute submitted now writes tensors; in a function of ``work``, that the work does."""
        self._touch(name, writes=tensors)

    def computed(self) -> None:
        """Record that the calling thread knows all compute so far to be done, as compute on the CPU is."""
        if Lane.COMPUTE in self._last:
            self._seen[Lane.COMPUTE] = self._last[Lane.COMPUTE]

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate; recorded as a write of a new buffer by compute."""
        tensor = self._machine.allocate(size, stride, dtype)
        self._touch("allocate", writes=(tensor,))
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Release; recorded as a write by compute, which gets the memory next."""
        self._touch("release", writes=(tensor,))
        self._machine.release(tensor)

    def release_after_copies(self, tensor: Tensor) -> None:
        """Pass it on; nothing to record."""
        self._machine.release_after_copies(tensor)

    def copy(
        self, lane: Lane, destination: Tensor, source: Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> RecordedTicket:
        """Copy: reads the source, writes the destination and comes after the compute so far."""
        tickets = [_as_recorded(ticket) for ticket in after]
        before = [ticket.operation.index for ticket in tickets]
        if Lane.COMPUTE in self._last:
            before.append(self._last[Lane.COMPUTE])
        operation = self._operation(lane, name or "copy", before)
        operation.reads = self._buffers.numbers((source,))
        operation.writes = self._buffers.numbers((destination,))
        ticket = self._machine.copy(lane, destination, source, [t._ticket for t in tickets], name)
        self._append(operation)
        return RecordedTicket(operation, ticket, self)

    def work(
        self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = ""
    ) -> RecordedTicket:
        """Run a function on the CPU; its operators' reads and writes are recorded while it runs."""
        tickets = [_as_recorded(ticket) for ticket in after]
        before = [ticket.operation.index for ticket in tickets]
        operation = self._operation(Lane.CPU_OPTIMIZER, name or "work", before)

        def recorded() -> None:
            self._running.operation = operation
            try:
                with _AccessRecorder(operation, self._buffers):
                    function()
            finally:
                del self._running.operation

        ticket = self._machine.work(recorded, [t._ticket for t in tickets], name)
        self._append(operation)
        return RecordedTicket(operation, ticket, self)

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Record that later compute comes after the ticket; after ``work``, all later operations do."""
        recorded = _as_recorded(ticket)
        self._machine.wait_on_compute(recorded._ticket)
        operation = recorded.operation
        self._append(self._operation(Lane.COMPUTE, f"compute waits for {operation.name}", [operation.index]))
        if operation.lane is Lane.CPU_OPTIMIZER:
            self._waited_for(operation)

    def check(self) -> None:
        """Check that the machine accepts work."""
        self._machine.check()

    def drain(self) -> None:
        """Drain; later operations come after all operations of the lanes so far."""
        self._machine.drain()
        for lane, index in self._last.items():
            if lane is not Lane.COMPUTE:
                self._seen[lane] = index

    def close(self) -> None:
        """Close the machine."""
        self._machine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._machine.__exit__(kind, error, traceback)

    def _operation(self, lane: Lane, name: str, after: Iterable[int] = ()) -> Operation:
        known = tuple(sorted({*after, *self._seen.values()}))
        return Operation(index=len(self._record), lane=lane, name=name, after=known)

    def _append(self, operation: Operation) -> None:
        self._last[operation.lane] = operation.index
        self._record.append(operation)

    def _touch(self, name: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        operation: Operation | None = getattr(self._running, "operation", None)
        if operation is None:
            operation = self._operation(Lane.COMPUTE, name)
            self._append(operation)
        operation.reads |= self._buffers.numbers(reads)
        operation.writes |= self._buffers.numbers(writes)

    def _waited_for(self, operation: Operation) -> None:
        if getattr(self._running, "operation", None) is None:  # a lane's thread submits no work
            self._seen[operation.lane] = max(operation.index, self._seen.get(operation.lane, -1))


def _as_recorded(ticket: Ticket) -> RecordedTicket:
    if not isinstance(ticket, RecordedTicket):
        raise MachineMisuse(
            problem=f"a {type(ticket).__name__} was given to a recorder as a ticket; give what it returned"
        )
    return ticket


class _Buffers:
    """Numbers of storages: reused memory of an allocator gets a new one, a block of a pool keeps its own."""

    def __init__(self) -> None:
        self._lock = ForkAwareLock("a record")
        self._count = itertools.count()
        # By the id of the storage's Python object, which PyTorch keeps for as long as the storage lives.
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the tensors' storages; empty storages have none."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {self._number(storage) for storage in storages if storage.nbytes()}

    def _number(self, storage: torch.UntypedStorage) -> int:
        key, known = id(storage), self._known
        with self._lock:
            if key not in known:
                known[key] = next(self._count), weakref.ref(storage, lambda _: known.pop(key, None))
            return known[key][0]


class _AccessRecorder(TorchDispatchMode):
    """Adds reads and writes of operators to an operation."""

    def __init__(self, operation: Operation, buffers: _Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation = operation
        self._buffers = buffers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view:  # a view touches no byte
            return out
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        read = self._buffers.numbers(_tensors(given.values()))
        mutable = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        written = self._buffers.numbers(_tensors(given.get(name) for name in mutable))
        made = self._buffers.numbers(_tensors((out,))) - read
        self._operation.reads |= read
        self._operation.writes |= written | made
        return out


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
