"""A machine: a device that computes, the host beside it, and three lanes on which other work runs meanwhile.

One lane copies from the device to the host, one the other way, and on one the CPU runs the optimizer. Each is
first in, first out. What is put on a lane is a *ticket*, and whoever gives the next work says which tickets
it comes after. That order is all that keeps two lanes apart where they touch one tensor; ``races`` checks it.

This file says what a machine does. ``threaded`` is how lanes are run, ``simulated`` and ``cuda`` are the
machines.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from remat_graph import Lane
from remat_offload.errors import MachineMisuse


class Ticket(Protocol):
    """Work that was put on a lane."""

    def query(self) -> bool:
        """Whether it is done, well or badly."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the lane's thread is done with it, well or badly."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it is done.

        Raises:
            LaneFailed: it failed, or something that it comes after did.
        """
        ...


@runtime_checkable
class Machine(Protocol):
    """A device that computes, the host, and what runs beside the computing.

    One thread at a time gives it work. Device memory is allocated in that thread alone: an allocator knows
    the caller's stream, a memory meter the caller's thread.
    """

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        ...

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take device memory; its content is unspecified."""
        ...

    def release(self, tensor: Tensor) -> None:
        """Say that nobody will read a device tensor, or any other of its storage, again."""
        ...

    def release_after_copies(self, tensor: Tensor) -> None:
        """Say that copies of a device tensor may be under way which nobody will hold.

        Its memory is used again only after those given so far, whoever drops it.
        """
        ...

    def copy(
        self, lane: Lane, destination: Tensor, source: Tensor, after: Iterable[Ticket] = (), name: str = ""
    ) -> Ticket:
        """Copy once the tickets, and all compute that was given before this call, are done.

        Args:
            lane: ``TO_HOST`` or ``TO_DEVICE``.
            destination: what is written.
            source: what is read; of the destination's sizes, strides and dtype, without gaps.
            after: what the copy waits for.
            name: what errors call it.

        Raises:
            MachineMisuse: there can be no such copy, or the machine is closed.
        """
        ...

    def work(self, function: Callable[[], object], after: Iterable[Ticket] = (), name: str = "") -> Ticket:
        """Run a function on the lane ``CPU_OPTIMIZER`` once the tickets are done; its result is dropped.

        Raises:
            MachineMisuse: the machine is closed.
        """
        ...

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Let compute that is given from now on run after the ticket; ``work`` holds the calling thread too.

        Raises:
            LaneFailed: what the ticket stands for could not be carried out.
        """
        ...

    def check(self) -> None:
        """See that it takes work.

        Raises:
            MachineMisuse: it is closed, or this process was forked from the one that it is in.
        """
        ...

    def drain(self) -> None:
        """Wait until all lanes are idle.

        Raises:
            LaneFailed: the first failure that no ``synchronize``, ``wait_on_compute`` or ``drain`` has raised
                yet.
        """
        ...

    def close(self) -> None:
        """Let the lanes finish what was given, then end their threads; nothing can be given any more."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def check_copy(device: torch.device, lane: Lane, destination: Tensor, source: Tensor) -> None:
    """Check that a copy is one of bytes as they lie: any other would need memory of its own on the device.

    Raises:
        MachineMisuse: it is not, or it is not in the lane's direction.
    """
    if lane not in (Lane.TO_HOST, Lane.TO_DEVICE):
        raise MachineMisuse(problem=f"a copy on the lane {lane}; copies go on to_host or to_device")
    host = torch.device("cpu")
    wanted = (host, device) if lane is Lane.TO_HOST else (device, host)
    if wanted != (destination.device, source.device):
        raise MachineMisuse(
            problem=f"a copy {lane} into {destination.device} from {source.device}; "
            f"it goes into {wanted[0]} from {wanted[1]}"
        )
    to, of = _layout(destination), _layout(source)
    if to != of or not _dense(source):
        raise MachineMisuse(
            problem=f"a copy into {to} from {of}; both must have the same dtype, sizes and strides, no gaps"
        )


def _layout(tensor: Tensor) -> tuple[torch.dtype, list[int], list[int]]:
    """A stride of a dimension of size 1 says nothing."""
    strides = [1 if n == 1 else stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.dtype, list(tensor.shape), strides


def _dense(tensor: Tensor) -> bool:
    """By sizes and strides alone: an operator would be seen by whoever watches the caller's thread."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True
