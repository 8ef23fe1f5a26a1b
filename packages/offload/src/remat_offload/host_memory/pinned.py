"""Where host memory comes from: plain, or pinned at exactly the size asked for.

A copy between host and device runs beside other work, and at the link's full rate, only if the host's pages
are pinned. ``Tensor.pin_memory()`` rounds a block up to a power of two (1.78 times what was needed, in one
report) and keeps it for good. Here a block is a mapping of its own, of whole pages that ``cudaHostRegister``
pins where they are: at most a page more than asked, given back to the system when it is unpinned. Whole
pages, because two registrations must not meet in one. Shared with forks, such as those of a data loader: of
private pages the parent would write to new ones after a fork, while the device went on with the old.
"""

import mmap
from typing import Any, Protocol

import torch

from remat_offload.errors import CannotPin

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostMemory(Protocol):
    """A source of host memory."""

    def charge(self, nbytes: int) -> int:
        """The bytes that a block of this size takes from the system."""
        ...

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a block from the system: bytes, one dimension, ``nbytes`` long."""
        ...

    def give_back(self, block: torch.Tensor) -> None:
        """Let go of a block; its pages go with its last reference."""
        ...


class PlainMemory:
    """Ordinary pageable memory: all that a CPU wants."""

    def charge(self, nbytes: int) -> int:
        """Exactly what was asked."""
        return nbytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Take a block from PyTorch's CPU allocator."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        """Do nothing: a block goes with its last reference."""


class RegisteredMemory:
    """Whole pages, pinned where they are.

    Args:
        cudart: the CUDA runtime, as ``torch.cuda.cudart()`` gives it.
    """

    def __init__(self, cudart: Any) -> None:
        self._cudart = cudart

    def charge(self, nbytes: int) -> int:
        """What was asked, rounded up to whole pages."""
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def take(self, nbytes: int) -> torch.Tensor:
        """Map pages and pin them.

        Raises:
            CannotPin: the system has no such pages, or the runtime refuses to pin them.
        """
        size = self.charge(nbytes)
        try:
            pages = mmap.mmap(-1, size)
        except OSError as error:
            raise CannotPin(
                problem=f"no {size:,} bytes of memory ({error.strerror})", advice="lower the capacity"
            ) from error
        block = torch.frombuffer(pages, dtype=torch.uint8)
        code = int(self._cudart.cudaHostRegister(block.data_ptr(), size, _PORTABLE))
        if code != 0:
            raise CannotPin(
                problem=f"cudaHostRegister returned error {code} for {size:,} bytes",
                advice="lower the capacity, raise the limit of locked memory, or use pin=False",
            )
        return block[:nbytes]

    def give_back(self, block: torch.Tensor) -> None:
        """Unpin the pages."""
        code = int(self._cudart.cudaHostUnregister(block.data_ptr()))
        if code != 0:
            raise CannotPin(
                problem=f"cudaHostUnregister returned error {code}",
                advice="an earlier CUDA error may be its cause: run again with CUDA_LAUNCH_BLOCKING=1",
            )


def memory_for(device: torch.device, pin: bool | None) -> HostMemory:
    """The memory that copies to and from a device want.

    Args:
        device: the device that copies go to and come from.
        pin: whether to pin; ``None`` pins for CUDA devices.

    Raises:
        CannotPin: pinning was asked for, and the device is none that memory can be pinned for.
    """
    if pin is False or (pin is None and device.type != "cuda"):
        return PlainMemory()
    if device.type != "cuda":
        raise CannotPin(problem=f"{device} is no CUDA device", advice="use pin=None or pin=False")
    if not torch.cuda.is_available():
        raise CannotPin(problem="no CUDA device is available", advice="use pin=False")
    return RegisteredMemory(torch.cuda.cudart())
