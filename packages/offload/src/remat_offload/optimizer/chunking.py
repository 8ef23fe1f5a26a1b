"""Flat views of tensors, and splits of them that do not change a bit of an elementwise result.

Vectorized kernels process the end of their range one element at a time, and a compiler may round there
differently than in the vectors: seen on a CPU with AVX512 for the fused kernels in every dtype, and for
``add`` with a factor in the half dtypes. So chunks begin at multiples of 64 elements, and only the last chunk
ends like the whole.

A CPU distributes a large tensor over threads. The fused kernels distribute cache lines, which changes
nothing. All others distribute equal shares, whose ends may be anywhere. Chunks for these kernels never cross
the end of a share, and no chunk is so large that it would itself be distributed unevenly.
"""

import math
from collections.abc import Sequence

import torch

CHUNK_NUMEL = 1 << 22
"""The most elements of a chunk, unless a caller asks for another number."""

ALIGNMENT = 64  # elements: two vectors of the smallest dtype, the unrolled loop of the kernels
_GRAIN = 32768  # elements: below it a CPU kernel stays on one thread (at::internal::GRAIN_SIZE)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor without gaps or overlaps, 0 where the size is 1; else ``None``.

    Tensors of one shape and one order have corresponding elements at corresponding positions.
    """
    if tensor.layout != torch.strided:
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(0 if size == 1 else n for n, size in zip(tensor.stride(), tensor.shape, strict=True))


def share_order(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether tensors have one shape and one order in memory, so that their flat views correspond."""
    order = memory_order(first)
    return order is not None and all(t.shape == first.shape and memory_order(t) == order for t in others)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that has a ``memory_order``: its elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the positions of two strided tensors that share memory of an element; None if no two do."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _reach_nbytes(tensor), place)
        for place, tensor in enumerate(tensors)
        if tensor.numel() and not tensor.is_meta
    )
    near: list[int] = []  # positions of tensors with overlapping spans
    last, reached = "", 0
    for device, begin, end, place in spans:
        if device != last or begin >= reached:
            if (found := _first_overlap(tensors, near)) is not None:
                return found
            near, reached = [], 0
        near.append(place)
        last, reached = device, max(reached, end)
    return _first_overlap(tensors, near)


def _reach_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the last."""
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.itemsize


def _first_overlap(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> tuple[int, int] | None:
    """As `overlapping`, for overlapping spans: columns of one matrix, for example, share no element."""
    if len(places) < 2:
        return None
    begin = min(tensors[place].data_ptr() for place in places)
    end = max(tensors[place].data_ptr() + _reach_nbytes(tensors[place]) for place in places)
    offsets = {place: tensors[place].data_ptr() - begin for place in places}
    unit = math.gcd(*offsets.values(), *(tensors[place].itemsize for place in places))
    taken = torch.zeros((end - begin) // unit, dtype=torch.int32)
    for place, offset in offsets.items():
        tensor, units = tensors[place], tensors[place].itemsize // unit
        strides = [stride * units for stride in tensor.stride()]
        mine = taken.as_strided((*tensor.shape, units), (*strides, 1), offset // unit)
        if (other := int(mine.max())) > 0:
            return other - 1, place
        mine.fill_(place + 1)
    return None


def split_elements(numel: int, chunk_numel: int, threads: int) -> list[slice]:
    """Split flat memory so that an elementwise kernel gives the same bits on the chunks as on the whole.

    A chunk has at most `chunk_numel` elements, a multiple of ``ALIGNMENT``. Kernels distribute equal shares
    to `threads` threads; 1 if they do not. There is at least one chunk.
    """
    if numel <= chunk_numel:
        return [slice(0, numel)]
    share = -(-numel // min(threads, -(-numel // _GRAIN)))
    chunks = []
    for begin in range(0, numel, share):
        end = min(begin + share, numel)
        while begin < end:
            size = _aligned_size(end - begin, chunk_numel, threads)
            chunks.append(slice(begin, begin + size))
            begin += size
    return chunks


def _aligned_size(left: int, chunk_numel: int, threads: int) -> int:
    """Return the most elements that several threads would share out in multiples of ``ALIGNMENT``."""
    most = min(left, chunk_numel)
    if threads == 1 or most < _GRAIN:
        return most
    return most // (_GRAIN * threads) * (_GRAIN * threads) or most // _GRAIN * _GRAIN
