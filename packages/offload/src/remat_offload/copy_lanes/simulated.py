"""`SimulatedMachine`: device memory is the host's, and copies take the time of links with given bandwidths.

For tests, and to see on any computer how a plan's copies overlap its compute. The thread of a lane moves the
bytes of its copies. Compute is what PyTorch does on the CPU: it is done when its call returns, so that
nothing waits for it.

The bytes of a copy arrive late on purpose: each piece is moved when the link would have finished it. So a
tensor that is read or written too early gives wrong values; and released memory is overwritten.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from remat_graph import Lane
from remat_offload.copy_lanes.machine import Ticket
from remat_offload.copy_lanes.threaded import Job, LanedMachine, as_job
from remat_offload.errors import MachineMisuse

_PIECE_S = 2e-3  # of a copy: long compared with the resolution of sleep, short compared with a step
_POISON = 0xFF  # in every byte: NaN in all floating dtypes that have one, and -1 in integers


class SimulatedMachine(LanedMachine):
    """A machine on the CPU alone.

    Args:
        to_host_nbytes_per_s: the bandwidth of the link to the host; ``None`` does not limit it.
        to_device_nbytes_per_s: the bandwidth of the link to the device.
        clock: returns seconds, from any starting point.
        sleep: waits for a number of seconds of the clock.

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
            Lane.TO_HOST: _SimulatedLink(to_host_nbytes_per_s, clock, sleep),
            Lane.TO_DEVICE: _SimulatedLink(to_device_nbytes_per_s, clock, sleep),
        }
        super().__init__(torch.device("cpu"), clock)

    def release(self, tensor: torch.Tensor) -> None:
        """Overwrite the tensor's whole storage with NaN, or -1 in integers, to expose later reads."""
        storage = tensor.untyped_storage()
        # Without PyTorch: a memory meter must not see it, and the dtype does not matter.
        ctypes.memset(storage.data_ptr(), _POISON, storage.nbytes())

    def release_after_copies(self, tensor: torch.Tensor) -> None:
        """Do nothing: a copy keeps its tensors alive until it is done."""

    def _copying(
        self, lane: Lane, destination: torch.Tensor, source: torch.Tensor
    ) -> Callable[[Sequence[Job]], None]:
        """Return a function that copies with the link's bandwidth."""
        link, given_s = self._links[lane], self._clock()

        def move(jobs: Sequence[Job]) -> None:
            link.move(destination, source, ready_s=max([given_s, *(job.ended_s for job in jobs)]))

        return move

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Block until the ticket is done: the calling thread computes."""
        as_job(ticket).synchronize()

    def _finish_copies(self) -> None:
        """Do nothing: a copy is done when its job has run."""


class _SimulatedLink:
    """One direction of copies; only the thread of its lane uses it."""

    def __init__(
        self, nbytes_per_s: float | None, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        if nbytes_per_s is not None and not nbytes_per_s > 0:
            raise MachineMisuse(problem=f"a link has {nbytes_per_s} bytes/s; it must be positive, or None")
        self._nbytes_per_s, self._clock, self._sleep = nbytes_per_s, clock, sleep
        self._free_s = 0.0  # when the copies so far end

    def move(self, destination: torch.Tensor, source: torch.Tensor, ready_s: float) -> None:
        """Copy, to end when the link would: a copy begins once ready, not when this thread wakes up."""
        with torch.inference_mode():
            # By `data`, since autograd must not count the copy as a write: a plan restores the same values.
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
        """Split the tensor's elements, in the order of memory, into what the link moves in `_PIECE_S`."""
        assert self._nbytes_per_s is not None
        in_memory = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        flat = tensor.permute(in_memory).view(-1)
        yield from flat.split(max(1, int(self._nbytes_per_s * _PIECE_S) // tensor.itemsize))
