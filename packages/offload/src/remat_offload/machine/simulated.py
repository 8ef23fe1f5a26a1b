"""A machine without a device: its device memory is the host's, its links are as fast as one says.

For tests, and to see on any computer how a plan's copies hide behind its compute. Copies move their bytes, in
the thread of their lane, and take the time that a link of the given bandwidth would take. Compute is what
PyTorch does on the CPU: it is done when its call returns, so that nothing waits for it.

The bytes of a copy arrive late on purpose: each piece is moved when the link would be through with it. So a
tensor that is read too early, or written too early, shows; and what is discarded is overwritten.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from remat_graph import Lane
from remat_offload.errors import MachineMisuse
from remat_offload.machine.base import Ticket
from remat_offload.machine.threaded import Job, LanedMachine, own

_PIECE_S = 2e-3  # of a copy: long beside the grain of sleeping, short beside a step
_POISON = 0xFF  # in every byte it is NaN in all floating dtypes that have one, and -1 in integers


class SimulatedMachine(LanedMachine):
    """A machine on the CPU alone.

    Args:
        to_host_nbytes_per_s: what the link to the host carries; ``None`` copies as fast as it goes.
        to_device_nbytes_per_s: the same for the link to the device.
        clock: seconds from anywhere on; tests hand in one that counts.
        sleep: waits that many seconds of the clock.

    Raises:
        MachineMisuse: a bandwidth is not positive.
    """

    def __init__(
        self,
        to_host_nbytes_per_s: float | None = None,
        to_device_nbytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._links = {
            Lane.TO_HOST: _Link(to_host_nbytes_per_s, clock, sleep),
            Lane.TO_DEVICE: _Link(to_device_nbytes_per_s, clock, sleep),
        }
        super().__init__(torch.device("cpu"), clock)

    def discard(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor's whole storage: whoever reads it after all reads NaN, or -1."""
        storage = tensor.untyped_storage()
        # Past PyTorch: a memory meter takes no notice, and bytes are bytes whatever the dtype.
        ctypes.memset(storage.data_ptr(), _POISON, storage.nbytes())

    def leave(self, tensor: torch.Tensor) -> None:
        """Do nothing: a copy keeps its tensors until it is done."""

    def _copying(
        self, lane: Lane, destination: torch.Tensor, source: torch.Tensor
    ) -> Callable[[Sequence[Job]], None]:
        """A copy at the link's rate."""
        link, given_s = self._links[lane], self._clock()

        def move(jobs: Sequence[Job]) -> None:
            link.move(destination, source, ready_s=max([given_s, *(job.ended_s for job in jobs)]))

        return move

    def hold(self, ticket: Ticket) -> None:
        """Block until the ticket is done: compute is what the calling thread does."""
        own(ticket).synchronize()

    def _finish_copies(self) -> None:
        """Do nothing: lanes hand nothing on."""


class _Link:
    """One direction. Only the thread of its lane moves bytes over it."""

    def __init__(
        self, nbytes_per_s: float | None, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        if nbytes_per_s is not None and not nbytes_per_s > 0:
            raise MachineMisuse(problem=f"a link of {nbytes_per_s} bytes/s; it must be positive, or None")
        self._nbytes_per_s, self._clock, self._sleep = nbytes_per_s, clock, sleep
        self._free_s = 0.0  # when it is through with what it was given

    def move(self, destination: torch.Tensor, source: torch.Tensor, ready_s: float) -> None:
        """Copy, to end when the link would: it begins once both are ready, not when this thread woke up."""
        with torch.inference_mode():
            # By `data`, autograd takes no notice: what a plan brings back is what it took away.
            destination, source = destination.data, source.data
            if self._nbytes_per_s is None:
                destination.copy_(source)
                return
            due_s = max(ready_s, self._free_s)
            for to, of in zip(self._pieces(destination), self._pieces(source), strict=True):
                due_s += of.nbytes / self._nbytes_per_s
                self._sleep(max(0.0, due_s - self._clock()))
                to.copy_(of)
            self._free_s = due_s

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor's elements in the order of memory, as much at a time as the link carries in a moment."""
        assert self._nbytes_per_s is not None
        in_memory = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        flat = tensor.permute(in_memory).view(-1)
        yield from flat.split(max(1, int(self._nbytes_per_s * _PIECE_S) // tensor.itemsize))
