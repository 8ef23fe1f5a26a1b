"""Layouts of gradients: the strides with which autograd takes a gradient over without a copy."""

import torch
from torch import Tensor


def own_stride(parameter: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that autograd keeps for a gradient: those of a dense parameter, else contiguous ones."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
    return parameter.stride() if dense else _contiguous_stride(size)


def _contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def obeys_layout(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether autograd keeps the gradient without a copy; see `own_stride`."""
    if not torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        return gradient.is_contiguous()
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in pairs)
