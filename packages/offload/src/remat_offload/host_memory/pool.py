"""`HostPool`: host memory in blocks of exact sizes under a hard cap; released blocks are reused.

Training moves the same sizes every step, so a released block is kept for the next request of its size. When
the cap requires it, idle blocks of other sizes are given back to the system, the longest idle first: the pool
never holds more than its capacity, and never refuses a request that fits without idle blocks.

A block in a pending copy is released with the event that follows the copy, and is not reused before it.
"""

import contextlib
import ctypes
import math
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import attrs
import numpy as np
import torch

from remat_executor.fork_lock import ForkAwareLock
from remat_graph import RematError
from remat_offload.deferred_signals import uninterrupted
from remat_offload.errors import HostPoolExhausted, HostPoolMisuse
from remat_offload.host_memory.pinned import HostMemory, RegisteredMemory, mapped, memory_for


class Event(Protocol):
    """A moment in pending work, such as a ``torch.Event`` recorded after a copy."""

    def query(self) -> bool:
        """Whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the work before it is done."""
        ...


@attrs.frozen(kw_only=True)
class HostPoolStatistics:
    """Bytes of a pool at one moment.

    Attributes:
        capacity_nbytes: the cap.
        held_nbytes: taken from the system, lent or idle; never above the cap.
        lent_nbytes: allocated by callers and not released yet.
        free_nbytes: what can still be allocated: the cap minus `lent_nbytes`.
        peak_nbytes: the highest `lent_nbytes` so far.
    """

    capacity_nbytes: int
    held_nbytes: int
    lent_nbytes: int
    free_nbytes: int
    peak_nbytes: int


@attrs.define(eq=False)
class _Block:
    bytes: torch.Tensor
    busy_until: Event | None = None


class HostPool:
    """Allocates host tensors within a fixed number of bytes. Threads may share a pool.

    Use it in a ``with`` statement, or call ``close``, to give its memory back early.

    Args:
        capacity_nbytes: the most bytes that the pool ever holds.
        pin: whether blocks are pinned; ``None`` pins them for CUDA devices.
        device: the device of the copies.
        memory: the source of blocks, instead of the one for `pin` and `device`.

    Raises:
        CannotPin: `pin` is True, and memory cannot be pinned for the device.
        HostPoolMisuse: the capacity is not positive.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        pin: bool | None = None,
        device: torch.device | str = "cpu",
        *,
        memory: HostMemory | None = None,
    ) -> None:
        if capacity_nbytes <= 0:
            raise HostPoolMisuse(problem=f"its capacity is {capacity_nbytes} bytes; it must be positive")
        self._capacity = capacity_nbytes
        self._memory = memory_for(torch.device(device), pin) if memory is None else memory
        # A leased block may come back at any time, by the garbage collector for example.
        self._lock = ForkAwareLock("a pool of host memory")
        self._lent: dict[int, tuple[torch.Tensor, _Block]] = {}  # by the id of the tensor
        self._idle: list[_Block] = []  # longest idle first
        self._lent_nbytes = self._held_nbytes = self._peak_nbytes = 0
        self._closed = self._given_up = False
        weakref.finalize(self, _give_back_all, self._memory, self._lent, self._idle)

    @property
    def statistics(self) -> HostPoolStatistics:
        """The pool's bytes now."""
        with self._lock:
            return HostPoolStatistics(
                capacity_nbytes=self._capacity,
                held_nbytes=self._held_nbytes,
                lent_nbytes=self._lent_nbytes,
                free_nbytes=self._capacity - self._lent_nbytes,
                peak_nbytes=self._peak_nbytes,
            )

    @property
    def rounding_nbytes(self) -> int:
        """The most bytes that a block takes beyond the request."""
        return self._memory.charge(1) - 1

    def unpinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of the kind that blocks have, but not pinned, nor of the pool: to measure on.

        Raises:
            CannotPin: the system has no such pages.
        """
        if nbytes and isinstance(self._memory, RegisteredMemory):
            return mapped(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Allocate a contiguous tensor with unspecified content.

        Args:
            shape: its sizes, or its number of elements; with the default dtype that is its number of bytes.
            dtype: the type of its elements.

        Raises:
            HostPoolExhausted: it does not fit under the cap.
            HostPoolMisuse: it would be empty, or the pool is closed.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes <= 0 or any(size < 0 for size in sizes):
            raise HostPoolMisuse(
                problem=f"a block has the shape {list(sizes)}; it must have at least one byte"
            )
        charge = self._memory.charge(nbytes)
        with self._lock:
            if self._closed:
                raise HostPoolMisuse(problem="it is closed; nothing can be allocated from it")
            free = self._capacity - self._lent_nbytes
            if charge > free:
                raise HostPoolExhausted(asked_nbytes=charge, free_nbytes=free, capacity_nbytes=self._capacity)
            block = self._idle_block(nbytes) or self._new_block(nbytes, charge)
            tensor = block.bytes.view(dtype).view(sizes)
            self._lent[id(tensor)] = (tensor, block)
            self._lent_nbytes += charge
            self._peak_nbytes = max(self._peak_nbytes, self._lent_nbytes)
        return tensor

    def release(self, tensor: torch.Tensor, after: Event | None = None) -> None:
        """Take a tensor back; its content is lost when its block is reused.

        Args:
            tensor: the tensor that ``allocate`` returned, not a view of it.
            after: the event of a pending copy; the block is not reused before it.

        Raises:
            HostPoolMisuse: it was released already, or is not of this pool; never after ``give_up``.
        """
        with self._lock:
            entry = self._lent.pop(id(tensor), None)
            if entry is None and self._given_up:
                return  # `give_up` has released it
            if entry is None:
                raise HostPoolMisuse(problem=self._why_not(tensor))
            block = entry[1]
            block.busy_until = after
            self._lent_nbytes -= self._memory.charge(block.bytes.numel())
            self._idle.append(block)
            if self._closed:
                self._drop(len(self._idle) - 1)

    def lease(self, nbytes: int, copies: Sequence[Event] = ()) -> torch.Tensor:
        """Allocate bytes that return to the pool when the last tensor on their storage is gone.

        For tensors given to others, who release nothing.

        Args:
            nbytes: how many.
            copies: copies into them, to which the caller may add; the block is not reused before the last.

        Raises:
            HostPoolExhausted: they do not fit under the cap.
            HostPoolMisuse: `nbytes` is not positive, or the pool is closed.
        """
        block = self.allocate(nbytes)
        # A storage on foreign memory keeps a reference to its owner.
        owner = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(block.data_ptr()))
        weakref.finalize(owner, self._return, block, copies)
        return torch.from_numpy(owner)

    def trim(self) -> None:
        """Give idle blocks back to the system, after waiting for their pending copies."""
        with self._lock:
            while self._idle:
                self._drop(0)

    def close(self) -> None:
        """Allocate no more; give idle blocks back to the system now, lent ones when they are released."""
        with self._lock:
            self._closed = True
        self.trim()

    def give_up(self) -> None:
        """Close, and give back lent blocks, too: their tensors keep the memory, which is ordinary then."""
        with self._lock:
            self._closed = self._given_up = True
            _give_back_all(self._memory, self._lent, self._idle)
            self._lent_nbytes = self._held_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _return(self, block: torch.Tensor, copies: Sequence[Event]) -> None:
        """Take back a leased block, unless ``give_up`` has released all."""
        with uninterrupted():  # a finalizer is not called again
            if id(block) in self._lent:
                self.release(block, after=copies[-1] if copies else None)

    def _idle_block(self, nbytes: int) -> _Block | None:
        """Return an idle block of this size: one without pending copy or, if a new one does not fit, any."""
        same = [index for index, block in enumerate(self._idle) if block.bytes.numel() == nbytes]
        if not same:
            return None
        done = [i for i in same if (event := self._idle[i].busy_until) is None or event.query()]
        if not done and self._held_nbytes + self._memory.charge(nbytes) <= self._capacity:
            return None
        index = (done or same)[0]
        if not done:
            _wait_until_unused(self._idle[index])  # an interrupted wait leaves the block in the pool
        block = self._idle.pop(index)
        block.busy_until = None
        return block

    def _new_block(self, nbytes: int, charge: int) -> _Block:
        while self._held_nbytes + charge > self._capacity:
            self._drop(0)
        block = _Block(self._memory.take(nbytes))
        self._held_nbytes += charge
        return block

    def _drop(self, index: int) -> None:
        _wait_until_unused(self._idle[index])  # an interrupted wait leaves the block in the pool
        block = self._idle.pop(index)
        self._held_nbytes -= self._memory.charge(block.bytes.numel())
        self._memory.give_back(block.bytes)

    def _why_not(self, tensor: torch.Tensor) -> str:
        address = tensor.untyped_storage().data_ptr()
        if any(block.bytes.data_ptr() == address for block in self._idle):
            return "this tensor was released already"
        if any(block.bytes.data_ptr() == address for _, block in self._lent.values()):
            return "this is a view, or was released before its block was reused; release what allocate() gave"
        return "this tensor is not of this pool"


def _wait_until_unused(block: _Block) -> None:
    """Wait for a block's pending copy; a failed one is reported elsewhere."""
    if block.busy_until is not None:
        with contextlib.suppress(RematError):
            block.busy_until.synchronize()


def _give_back_all(
    memory: HostMemory, lent: dict[int, tuple[torch.Tensor, _Block]], idle: list[_Block]
) -> None:
    """Give all blocks of a pool back to the system."""
    for block in [*(block for _, block in lent.values()), *idle]:
        _wait_until_unused(block)
        memory.give_back(block.bytes)
    lent.clear()
    idle.clear()
