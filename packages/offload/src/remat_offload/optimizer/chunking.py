"""Tensors as flat memory, and where it may be cut without changing a bit of an elementwise result.

Vectorized kernels treat the end of their range one by one, and a compiler may round there otherwise than in
the vectors: seen on a CPU with AVX512 for the fused kernels in every dtype, and for ``add`` with a factor in
the half dtypes. So pieces begin at multiples of 64 elements, and only the last one has an end like the
whole's.

A CPU deals a large tensor out to threads. The fused kernels deal out cache lines, which changes nothing. All
others deal out equal shares, and each share has an end, wherever that falls. Pieces for these kernels never
cross such a place, and none of them is so large that it would itself be dealt out unevenly.
"""

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 64  # elements: two vectors of the smallest dtype, which kernels unroll into one round
_GRAIN = 32768  # elements: below it a CPU kernel stays on one thread (at::internal::GRAIN_SIZE)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor without holes or overlaps, 0 where a dimension has one element; else ``None``.

    Tensors of one shape and one order hold corresponding elements at corresponding places.
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
    """Whether tensors can be viewed flat together: one shape, one order in memory."""
    order = memory_order(first)
    return order is not None and all(t.shape == first.shape and memory_order(t) == order for t in others)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor that has a ``memory_order``: its elements as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The places of two strided tensors that have memory of an element in common; None if there are none."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _reach_nbytes(tensor), place)
        for place, tensor in enumerate(tensors)
        if tensor.numel() and not tensor.is_meta
    )
    near: list[int] = []  # places whose spans touch one another
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
    """From its first element to its last."""
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.itemsize


def _first_overlap(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> tuple[int, int] | None:
    """As `overlapping`, for spans that touch: columns of one matrix, say, have nothing in common."""
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
    """Cut flat memory so that an elementwise kernel gives on the pieces what it gives on the whole.

    Args:
        numel: elements of the whole.
        chunk_numel: the most elements of a piece, a multiple of ``ALIGNMENT``.
        threads: how many get an equal share of the whole from the kernels; 1 if shares are no matter.

    Returns:
        One piece at least, in order, without holes.
    """
    if numel <= chunk_numel:
        return [slice(0, numel)]
    share = -(-numel // min(threads, -(-numel // _GRAIN)))
    cut = []
    for begin in range(0, numel, share):
        end = min(begin + share, numel)
        while begin < end:
            size = _aligned_size(end - begin, chunk_numel, threads)
            cut.append(slice(begin, begin + size))
            begin += size
    return cut


def _aligned_size(left: int, chunk_numel: int, threads: int) -> int:
    """The most elements that threads, if more than one takes them, deal out in multiples of ``ALIGNMENT``."""
    most = min(left, chunk_numel)
    if threads == 1 or most < _GRAIN:
        return most
    return most // (_GRAIN * threads) * (_GRAIN * threads) or most // _GRAIN * _GRAIN
