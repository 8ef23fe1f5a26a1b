"""Sources of host memory: plain, or pinned at exactly the requested size.

A copy between host and device runs concurrently with other work, and at the link's full rate, only if the
host's pages are pinned. ``Tensor.pin_memory()`` rounds a block up to a power of two (1.78 times the request,
in one report) and never frees it. Here a block is a mapping of its own, of whole pages that
``cudaHostRegister`` pins: at most one page more than requested, and freed when unpinned. Whole pages, because
two registrations must not share a page. The mapping is shared with forks, such as those of a data loader:
after a fork, the parent would write to new copies of private pages while the device used the old ones.

PyTorch's threads touch the pages first, shared out as in an update: memory lies on the socket of the thread
that touches it first, and the registration would let one thread touch all. Huge pages are asked for, but few
systems give them to shared memory (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``). In private memory
they made Adam's updates 4 to 7 % faster, on a virtual AMD EPYC; safety in forks is worth more.
"""

import contextlib
import functools
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import torch

from remat_executor.current_device import as_current
from remat_offload.errors import CannotPin

_HUGE_NBYTES = 1 << 21  # of a huge page where pages have 4 KiB
_TOUCHED_NBYTES = 1 << 24  # at a time: an update's chunk in 32 bits, which threads share out in the same way
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostMemory(Protocol):
    """A source of host memory."""

    def charge(self, nbytes: int) -> int:
        """Return the bytes that a block of this size takes from the system."""
        ...

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a block from the system: bytes, one dimension, ``nbytes`` long."""
        ...

    def give_back(self, block: torch.Tensor) -> None:
        """Give a block back; the last reference frees its pages."""
        ...


class PlainMemory:
    """Ordinary pageable memory."""

    def charge(self, nbytes: int) -> int:
        """Return the requested bytes."""
        return nbytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a block from PyTorch's CPU allocator."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        """Do nothing: the last reference frees the block."""


class RegisteredMemory:
    """Whole pages, pinned in place.

    Args:
        cudart: the CUDA runtime, as ``torch.cuda.cudart()`` returns it.
        clear_error: makes the runtime forget the error that it returned last.
        current: a context in which the device of the copies is the current one; on another device, CUDA
            would allocate a context.
    """

    def __init__(
        self,
        cudart: Any,
        clear_error: Callable[[], None] = lambda: None,
        current: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._cudart = cudart
        self._clear_error = clear_error
        self._current = current

    def charge(self, nbytes: int) -> int:
        """Return the requested bytes, rounded up to whole pages."""
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def take(self, nbytes: int) -> torch.Tensor:
        """Map pages and pin them.

        Raises:
            CannotPin: the system has no such pages, or the runtime refuses to pin them.
        """
        size = self.charge(nbytes)
        block = mapped(size)
        with self._current():
            code = int(self._cudart.cudaHostRegister(block.data_ptr(), size, _PORTABLE))
        if code != 0:
            self._clear_error()
            raise CannotPin(
                problem=f"cudaHostRegister returned error {code} for {size:,} bytes",
                advice="lower the capacity, raise the limit of locked memory, or use pin=False",
            )
        return block[:nbytes]

    def give_back(self, block: torch.Tensor) -> None:
        """Unpin the pages."""
        with self._current():
            code = int(self._cudart.cudaHostUnregister(block.data_ptr()))
        if code != 0:
            self._clear_error()
            raise CannotPin(
                problem=f"cudaHostUnregister returned error {code}",
                advice="an earlier CUDA error may be its cause: run again with CUDA_LAUNCH_BLOCKING=1",
            )


def mapped(nbytes: int) -> torch.Tensor:
    """Map pages as blocks that are pinned have them; the last reference unmaps them.

    Raises:
        CannotPin: the system has no such pages.
    """
    try:
        pages = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise CannotPin(
            problem=f"the system has no {nbytes:,} bytes of memory ({error.strerror})",
            advice="lower the capacity",
        ) from error
    # Whole huge pages only: one at the end would reach beyond the block.
    huge_nbytes = nbytes // _HUGE_NBYTES * _HUGE_NBYTES
    advice: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge_nbytes and advice is not None:
        with contextlib.suppress(OSError):  # of a kernel without them
            pages.madvise(advice, 0, huge_nbytes)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    for piece in block.split(_TOUCHED_NBYTES):
        piece.zero_()
    return block


def memory_for(device: torch.device, pin: bool | None) -> HostMemory:
    """Return the source of host memory that suits copies to and from a device.

    Args:
        device: the device of the copies.
        pin: whether to pin; ``None`` pins for CUDA devices.

    Raises:
        CannotPin: `pin` is True, and memory cannot be pinned for the device.
    """
    if pin is False or (pin is None and device.type != "cuda"):
        return PlainMemory()
    if device.type != "cuda":
        raise CannotPin(problem=f"{device} is not a CUDA device", advice="use pin=None or pin=False")
    if not torch.cuda.is_available():
        raise CannotPin(problem="no CUDA device is available", advice="use pin=False")
    return RegisteredMemory(
        torch.cuda.cudart(),
        functools.partial(clear_cuda_error, device),
        functools.partial(as_current, device),
    )


def clear_cuda_error(device: torch.device) -> None:
    """Make CUDA forget this thread's last error, which the next kernel launch would report as its own.

    Torch does not expose ``cudaGetLastError``, but calls it after each launch.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)
