"""Parts of tensors that stay in a cache while a kernel makes several passes over them."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

_THREAD_NUMEL = 1 << 15  # what torch gives a thread at least; so no part ends within a vector
_NUMEL = 1 << 22  # elsewhere: a launch takes about as long as 8 MiB of a device's memory


def chunk_numel(device: torch.device) -> int:
    """Elements of a chunk, a multiple of 64: 128 KiB to 512 KiB of them for each of two threads."""
    return max(2, torch.get_num_threads()) * _THREAD_NUMEL if device.type == "cpu" else _NUMEL


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill a part of its storage, each at a place of its own."""
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    filled = [prod(n for _, n in dims[:i]) for i in range(len(dims))]
    return tensor.numel() > 0 and [s for s, _ in dims] == filled


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def chunks(tensor: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """The parts of a tensor along its first dimension, each with its start."""
    return ((start, tensor[start : start + size]) for start in range(0, len(tensor), size))
