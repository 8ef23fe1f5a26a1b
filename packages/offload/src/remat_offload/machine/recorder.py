"""A machine that notes what it is given, so that ``find_races`` can say whether its order is safe.

What waits for what is noted as a CUDA device promises it, and no more: a ticket's work comes after the
tickets it names, a copy also after the compute given before it, compute after what it is held for, and
everything after what the calling thread has waited for. So a run on the simulated machine, where compute is
done when its call returns, is judged as a run on a device would be.

Compute is known as far as it is told, by ``reads`` and ``writes``. Of work on the CPU it is seen what
operators read and write; what passes PyTorch by (NumPy, say) is told in the work's function, by the same two
methods. The threads that give work are taken for one, as the calling thread and autograd's are.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.fork_lock import ForkAwareLock
from remat_graph import Lane
from remat_offload.errors import MachineMisuse
from remat_offload.machine.base import Machine, Ticket
from remat_offload.machine.races import Operation


@attrs.frozen(eq=False)
class RecordedTicket:
    """A machine's ticket whose waiting is noted."""

    operation: Operation
    _ticket: Ticket
    _recorder: "Recorder"

    def query(self) -> bool:
        """Whether it is done; who was told so has waited for it."""
        done = self._ticket.query()
        if done:
            self._recorder._saw(self.operation)
        return done

    def wait(self) -> None:
        """Block until the lane's thread is done with it, well or badly."""
        self._ticket.wait()
        if self.operation.lane is Lane.CPU_OPTIMIZER:  # a copy may still be on its way
            self._recorder._saw(self.operation)

    def synchronize(self) -> None:
        """Block until it is done; raises what the machine's ticket raises."""
        self._ticket.synchronize()
        self._recorder._saw(self.operation)


class Recorder:
    """A machine that notes what it is given, and hands it on to another.

    Args:
        machine: the other; its own methods are called by nobody else meanwhile.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._record: list[Operation] = []
        self._last: dict[Lane, int] = {}
        self._seen: dict[Lane, int] = {}  # the last of each lane that the calling thread has waited for
        self._buffers = _Buffers()
        self._running = threading.local()  # in a lane's thread: the operation that runs there

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._machine.device

    @property
    def record(self) -> tuple[Operation, ...]:
        """What was given so far, in order."""
        return tuple(self._record)

    def reads(self, tensors: Iterable[Tensor], name: str = "compute") -> None:
        """Note that compute given now reads tensors; in a function of ``work``, that the work does."""
        self._touch(name, reads=tensors)

    def writes(self, tensors: Iterable[Tensor], name: str = "compute") -> None:
        """Note that compute given now writes tensors; in a function of ``work``, that the work does."""
        self._touch(name, writes=tensors)

    def computed(self) -> None:
        """Note that the calling thread knows what compute was told to be done, as the host's own is."""
        if Lane.COMPUTE in self._last:
            self._seen[Lane.COMPUTE] = self._last[Lane.COMPUTE]

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate; for compute that is a write of a new buffer."""
        tensor = self._machine.allocate(size, stride, dtype)
        self._touch("allocate", writes=(tensor,))
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Discard; for compute that is a write, by whoever gets the memory next."""
        self._touch("release", writes=(tensor,))
        self._machine.release(tensor)

    def release_after_copies(self, tensor: Tensor) -> None:
        """Hand it on: nobody's memory changes hands."""
        self._machine.release_after_copies(tensor)

    def copy(
        self, lane: Lane, destination: Tensor, source: Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> RecordedTicket:
        """Copy: it reads its source, writes its destination and comes after the compute given so far."""
        tickets = [_own(ticket) for ticket in after]
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
        """Run a function on the CPU: what its operators read and write is noted while it runs."""
        tickets = [_own(ticket) for ticket in after]
        before = [ticket.operation.index for ticket in tickets]
        operation = self._operation(Lane.CPU_OPTIMIZER, name or "work", before)

        def watched() -> None:
            self._running.operation = operation
            try:
                with _Watch(operation, self._buffers):
                    function()
            finally:
                del self._running.operation

        ticket = self._machine.work(watched, [t._ticket for t in tickets], name)
        self._append(operation)
        return RecordedTicket(operation, ticket, self)

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Hold: compute given from now on comes after the ticket, and after ``work`` all else does too."""
        recorded = _own(ticket)
        self._machine.wait_on_compute(recorded._ticket)
        operation = recorded.operation
        self._append(self._operation(Lane.COMPUTE, f"compute waits for {operation.name}", [operation.index]))
        if operation.lane is Lane.CPU_OPTIMIZER:
            self._saw(operation)

    def check(self) -> None:
        """See that the machine takes work."""
        self._machine.check()

    def drain(self) -> None:
        """Drain: what is given from now on comes after all that lanes were given."""
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

    def _saw(self, operation: Operation) -> None:
        if getattr(self._running, "operation", None) is None:  # a lane's thread gives no work
            self._seen[operation.lane] = max(operation.index, self._seen.get(operation.lane, -1))


def _own(ticket: Ticket) -> RecordedTicket:
    if not isinstance(ticket, RecordedTicket):
        raise MachineMisuse(
            problem=f"a {type(ticket).__name__} was given to a recorder as a ticket; give what it returned"
        )
    return ticket


class _Buffers:
    """Numbers of storages.

    A number goes with its storage: memory that an allocator lends again has another, a block that a host pool
    keeps has the same.
    """

    def __init__(self) -> None:
        self._lock = ForkAwareLock("a record")
        self._count = itertools.count()
        # By the id of the storage's Python object, which PyTorch keeps for as long as the storage lives.
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the tensors' storages; those without a byte have none."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {self._number(storage) for storage in storages if storage.nbytes()}

    def _number(self, storage: torch.UntypedStorage) -> int:
        key, known = id(storage), self._known
        with self._lock:
            if key not in known:
                known[key] = next(self._count), weakref.ref(storage, lambda _: known.pop(key, None))
            return known[key][0]


class _Watch(TorchDispatchMode):
    """Adds what operators read and write to an operation."""

    def __init__(self, operation: Operation, buffers: _Buffers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operation = operation
        self._buffers = buffers

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
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
