"""Read memory from the allocator, kernel workspaces included.

This reading shares nothing with ``remat_executor.memory.meter``: no dispatch mode, no storages. On a device
whose allocator keeps statistics (CUDA and the like) it is ``max_memory_allocated`` above ``memory_allocated``
at entry. The CPU's allocator keeps none, so there the profiler's memory records are added up: one record for
each allocation and each free, with its address.

The CPU's records do not contain memory that a library takes from the system by itself (MKL's packing
buffers), allocations of other Python threads, frees of blocks allocated before entry, and frees by another
thread, such as gloo's of a collective's tensor: that block counts until its address is allocated again, or to
the end. Blocks are matched by address, because the profiler reports the free of a block from an earlier
session with that session's size, although the address may belong to another block by now.
"""

import os
from collections.abc import Callable, Generator, Iterator
from operator import itemgetter
from typing import Any, Generic, TypeVar

import attrs
import torch
from torch.autograd.profiler import profile

from remat_executor.torch_private.profiler import end_profilers_thread, end_session, profiler_running
from remat_graph import RematError
from remat_graph.contexts import context

T = TypeVar("T")


@attrs.frozen(kw_only=True, str=False)
class ProfilerBusy(RematError):
    """Memory on the CPU is read with the profiler, and another one is running."""

    def __str__(self) -> str:
        return "a profiler is running, so memory on the CPU cannot be read: do this before it starts"


@attrs.frozen(kw_only=True)
class AllocatorRecord(Generic[T]):
    """The allocator's bytes while a function ran.

    Attributes:
        peak_nbytes: the largest number of allocated bytes, above those at entry.
        end_nbytes: allocated bytes when the function returned, with its result still held, above those at
            entry.
        result: the function's result.
    """

    peak_nbytes: int
    end_nbytes: int
    result: T


def allocator_peak(function: Callable[[], T], device: torch.device | str = "cpu") -> AllocatorRecord[T]:
    """Run a function once and read its peak from the device's allocator.

    Raises:
        ProfilerBusy: on CPU, a profiler is already running; starting another would end it.
    """
    device = torch.device(device)
    return _from_profiler(function) if device.type == "cpu" else _from_statistics(function, device)


def fragments_nbytes(device: torch.device) -> int | None:
    """What the allocator has held beyond the bytes of tensors since its peaks were reset; None on the CPU.

    The peaks of both are compared, which need not be at the same time. What it holds now is left out: blocks
    around tensors that were there before. So release the blocks that nothing uses first.
    """
    if device.type == "cpu":
        return None
    memory = torch.accelerator.memory
    before_nbytes = memory.memory_reserved(device) - memory.memory_allocated(device)
    return max(0, memory.max_memory_reserved(device) - memory.max_memory_allocated(device) - before_nbytes)


def _from_statistics(function: Callable[[], T], device: torch.device) -> AllocatorRecord[T]:
    memory = torch.accelerator.memory
    torch.accelerator.synchronize(device)
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    result = function()
    torch.accelerator.synchronize(device)
    return AllocatorRecord(
        peak_nbytes=memory.max_memory_allocated(device) - before,
        end_nbytes=memory.memory_allocated(device) - before,
        result=result,
    )


def _from_profiler(function: Callable[[], T]) -> AllocatorRecord[T]:
    if profiler_running():
        raise ProfilerBusy()
    session = profile(profile_memory=True, use_kineto=True)
    try:
        with _quiet(), session:
            result = function()
    finally:
        try:
            end_session(session)
        finally:
            end_profilers_thread()
    live: dict[int, int] = {}
    level = peak = 0
    for address, nbytes in _records(session):
        if nbytes > 0:
            # A block that was at this address has been freed by another thread, of which there is no record.
            level += nbytes - live.get(address, 0)
            live[address] = nbytes
            peak = max(peak, level)
        else:
            level -= live.pop(address, 0)
    return AllocatorRecord(peak_nbytes=peak, end_nbytes=level, result=result)


def _records(session: profile) -> Iterator[tuple[int, int]]:
    """(address, bytes) of allocations (positive) and frees (negative), in order of time."""
    results = session.kineto_results
    if results is None:
        raise RuntimeError("the profiler returned no results")
    records = []
    pending = list(reversed(results.experimental_event_tree()))
    while pending:  # parents before children: events of the same nanosecond stay in order
        event = pending.pop()
        pending.extend(reversed(event.children))
        if event.name == "[memory]":
            block: Any = event.extra_fields  # has a device, an address and a size
            if block.device.type == "cpu":
                records.append((event.start_time_ns, block.ptr, block.alloc_size))
    records.sort(key=itemgetter(0))
    return ((address, nbytes) for _, address, nbytes in records)


@context
def _quiet() -> Generator[None, None, None]:
    """Suppress the profiler's start and stop lines on stderr; its level is read at the first session."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    try:
        os.environ[name] = "6"  # above its highest level
        yield
    finally:
        os.environ.pop(name, None)
