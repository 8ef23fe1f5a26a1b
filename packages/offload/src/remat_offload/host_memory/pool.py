"""A pool of host memory blocks: exact sizes, a hard cap, blocks used again.

Training moves the same sizes every step, so a released block is kept and lent again to the next request of
its size. Blocks of other sizes are given back to the system, longest idle first, as soon as the cap needs
their room: the pool never holds more than its capacity, and never refuses what would fit without them.

A block that is being copied is released with the event that follows the copy; it is not lent again before.
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
from remat_offload.errors import HostPoolExhausted, HostPoolMisuse
from remat_offload.host_memory.pinned import HostMemory, memory_for


class Event(Protocol):
    """Something that will have happened, such as a ``torch.Event`` recorded after a copy."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


@attrs.frozen(kw_only=True)
class HostPoolStatistics:
    """Bytes of a pool at one moment.

    Attributes:
        capacity_nbytes: the cap.
        held_nbytes: taken from the system, lent or kept to be lent again; never above the cap.
        lent_nbytes: lent now.
        free_nbytes: what can still be lent: the cap less what is lent.
        peak_nbytes: the most that was ever lent at once.
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
    """Lends host tensors out of a fixed number of bytes. Threads may share a pool.

    Use it in a ``with`` statement, or call ``close``, to give its memory back early.

    Args:
        capacity_nbytes: the most it ever holds.
        pin: whether blocks are pinned; ``None`` pins them where copies to the device want it (CUDA).
        device: the device that copies go to and come from.
        memory: where blocks come from, instead of what `pin` and `device` ask for.

    Raises:
        CannotPin: pinning was asked for and is not to be had.
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
            raise HostPoolMisuse(problem=f"a capacity of {capacity_nbytes} bytes; it must be positive")
        self._capacity = capacity_nbytes
        self._memory = memory_for(torch.device(device), pin) if memory is None else memory
        # A leased block may come back in the midst of anything, by the collector of garbage say.
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
        """The most that a block takes beyond the bytes asked for."""
        return self._memory.charge(1) - 1

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Lend a contiguous tensor with unspecified content.

        Args:
            shape: its sizes, or its number of elements; with the default dtype that is its number of bytes.
            dtype: the type of its elements.

        Raises:
            HostPoolExhausted: it does not fit under the cap beside what is lent.
            HostPoolMisuse: it would have no byte, or the pool is closed.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes <= 0 or any(size < 0 for size in sizes):
            raise HostPoolMisuse(problem=f"a block of shape {list(sizes)}; it must have at least one byte")
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
        """Take a tensor back; its content is lost once its block is lent again.

        Args:
            tensor: the very tensor that ``allocate`` returned, not a view of it.
            after: the block is in use until this has happened: a copy's event.

        Raises:
            HostPoolMisuse: it was released already, or is not of this pool; unless that has given up all.
        """
        with self._lock:
            entry = self._lent.pop(id(tensor), None)
            if entry is None and self._given_up:
                return  # with all that was lent
            if entry is None:
                raise HostPoolMisuse(problem=self._why_not(tensor))
            block = entry[1]
            block.busy_until = after
            self._lent_nbytes -= self._memory.charge(block.bytes.numel())
            self._idle.append(block)
            if self._closed:
                self._drop(len(self._idle) - 1)

    def lease(self, nbytes: int) -> torch.Tensor:
        """Lend bytes that come back by themselves, when the last tensor on their storage is gone.

        For what is handed to others, who release nothing. Whoever copies into it waits until that is done.

        Args:
            nbytes: how many.

        Raises:
            HostPoolExhausted: they do not fit under the cap beside what is lent.
            HostPoolMisuse: there would be none, or the pool is closed.
        """
        block = self.allocate(nbytes)
        # A storage on somebody else's memory keeps its owner, which goes with it.
        owner = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(block.data_ptr()))
        weakref.finalize(owner, self._return, block)
        return torch.from_numpy(owner)

    def trim(self) -> None:
        """Give back to the system what is not lent, after waiting for copies that are under way."""
        with self._lock:
            while self._idle:
                self._drop(0)

    def close(self) -> None:
        """Lend nothing more and give memory back: what is idle now, what is lent as it is released."""
        with self._lock:
            self._closed = True
        self.trim()

    def give_up(self) -> None:
        """Close, and give back what is lent, too: tensors keep their memory, which is ordinary memory now."""
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

    def _return(self, block: torch.Tensor) -> None:
        """Take back what was leased, unless all was given up."""
        if id(block) in self._lent:
            self.release(block)

    def _idle_block(self, nbytes: int) -> _Block | None:
        """A kept block of this size: one whose copy is done, or, where a new one has no room, any."""
        same = [index for index, block in enumerate(self._idle) if block.bytes.numel() == nbytes]
        if not same:
            return None
        done = [i for i in same if (event := self._idle[i].busy_until) is None or event.query()]
        if not done and self._held_nbytes + self._memory.charge(nbytes) <= self._capacity:
            return None
        block = self._idle.pop((done or same)[0])
        if not done:
            _settle(block)
        block.busy_until = None
        return block

    def _new_block(self, nbytes: int, charge: int) -> _Block:
        while self._held_nbytes + charge > self._capacity:
            self._drop(0)
        block = _Block(self._memory.take(nbytes))
        self._held_nbytes += charge
        return block

    def _drop(self, index: int) -> None:
        block = self._idle.pop(index)
        _settle(block)
        self._held_nbytes -= self._memory.charge(block.bytes.numel())
        self._memory.give_back(block.bytes)

    def _why_not(self, tensor: torch.Tensor) -> str:
        address = tensor.untyped_storage().data_ptr()
        if any(block.bytes.data_ptr() == address for block in self._idle):
            return "this tensor was released already"
        if any(block.bytes.data_ptr() == address for _, block in self._lent.values()):
            return (
                "this is a view, or a tensor released before its block was lent again; release what was lent"
            )
        return "this tensor is not of this pool"


def _settle(block: _Block) -> None:
    """Wait until a block is in use no more; nor is it if what used it failed, which others tell."""
    if block.busy_until is not None:
        with contextlib.suppress(RematError):
            block.busy_until.synchronize()


def _give_back_all(
    memory: HostMemory, lent: dict[int, tuple[torch.Tensor, _Block]], idle: list[_Block]
) -> None:
    """Unpin what a pool still holds when it goes."""
    for block in [*(block for _, block in lent.values()), *idle]:
        _settle(block)
        memory.give_back(block.bytes)
    lent.clear()
    idle.clear()
