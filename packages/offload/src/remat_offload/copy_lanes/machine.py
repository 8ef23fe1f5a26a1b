"""A `Machine` is a device that computes, its host, and three lanes of work concurrent with the compute.

One lane copies from the device to the host, one from the host to the device, and on one the CPU runs the
optimizer. Each lane is first in, first out. Work on a lane is represented by a *ticket*, and every submission
names the tickets that it comes after. These tickets alone order two lanes that use the same tensor; ``races``
checks that they suffice.

``threaded`` runs the lanes; ``simulated`` and ``cuda_streams`` are the machines.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from remat_graph import Lane
from remat_offload.errors import MachineMisuse
from remat_offload.host_memory.pool import Event
from remat_offload.tensor_memory import share_order


class Ticket(Event, Protocol):
    """Work that was put on a lane; `query` is also true if it has failed."""

    def wait(self) -> None:
        """Block the calling thread until the lane's thread has finished the work or the work has failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work is done.

        Raises:
            LaneFailed: the work failed, or work that it comes after.
        """
        ...


@runtime_checkable
class Machine(Protocol):
    """A device that computes, its host, and lanes concurrent with the compute.

    One thread at a time submits work. Only that thread allocates device memory: an allocator knows the
    caller's stream, and a memory meter the caller's thread.
    """

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        ...

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate device memory with unspecified content."""
        ...

    def release(self, tensor: Tensor) -> None:
        """Declare that nothing reads a device tensor, or another tensor of its storage, again."""
        ...

    def release_after_copies(self, tensor: Tensor) -> None:
        """Keep a device tensor's memory until the copies submitted so far are done, even if it is dropped.

        Compute does not wait for these copies.
        """
        ...

    def copy(
        self, lane: Lane, destination: Tensor, source: Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> Ticket:
        """Copy once the tickets, and all compute submitted before this call, are done.

        Args:
            lane: ``TO_HOST`` or ``TO_DEVICE``.
            destination: the tensor to write.
            source: the tensor to read, with the destination's sizes, strides and dtype, without gaps.
            after: the tickets that the copy waits for.
            name: its name in errors.

        Raises:
            MachineMisuse: the copy is invalid, or the machine is closed.
        """
        ...

    def work(self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = "") -> Ticket:
        """Run a function on the lane ``CPU_OPTIMIZER`` once the tickets are done; its result is dropped.

        Raises:
            MachineMisuse: the machine is closed.
        """
        ...

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Make compute submitted from now on wait for the ticket; for ``work`` the calling thread waits too.

        Raises:
            LaneFailed: the ticket's work failed.
        """
        ...

    def check(self) -> None:
        """Check that the machine accepts work.

        Raises:
            MachineMisuse: it is closed, or was made by the process that this one was forked from.
        """
        ...

    def drain(self) -> None:
        """Wait until all lanes are idle.

        Raises:
            LaneFailed: the first failure that no ``synchronize``, ``wait_on_compute`` or ``drain`` has
                raised.
            MachineMisuse: this process was forked from the machine's, with unfinished work.
        """
        ...

    def close(self) -> None:
        """Let the lanes finish their work, then end their threads; no more work is accepted.

        If the call is interrupted, another call continues to wait.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def check_copy(device: torch.device, lane: Lane, destination: Tensor, source: Tensor) -> None:
    """Raise `MachineMisuse` unless a copy is in the lane's direction and keeps the layout of the bytes."""
    if lane not in (Lane.TO_HOST, Lane.TO_DEVICE):
        raise MachineMisuse(problem=f"a copy was put on the lane {lane}; use to_host or to_device")
    host = torch.device("cpu")
    wanted = (host, device) if lane is Lane.TO_HOST else (device, host)
    if wanted != (destination.device, source.device):
        raise MachineMisuse(
            problem=f"a copy {lane} goes from {source.device} to {destination.device}; "
            f"it must go from {wanted[1]} to {wanted[0]}"
        )
    if destination.dtype != source.dtype or not share_order(destination, source):
        to, of = ((t.dtype, tuple(t.shape), t.stride()) for t in (destination, source))
        raise MachineMisuse(
            problem=f"a copy goes from {of} to {to}; both need the same dtype, sizes and strides, and no gaps"
        )
