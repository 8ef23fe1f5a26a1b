"""Tensors that are equal in every bit; zeros have signs, and every NaN equals every other one.

The sign of a NaN depends on where in a tensor it lies: torch computes the last elements of each thread's
share without vectors, and in half precision this changes the sign. So it depends on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 6.0, 3.0, -3.0, 1.0, -1.0)


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, with one NaN for all."""
    numbers = tensor.detach().reshape(-1)
    if numbers.is_floating_point():
        numbers = numbers.masked_fill(numbers.isnan(), float("nan"))
    return numbers.contiguous().view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same layout and the same bits."""
    laid_out = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return laid_out and torch.equal(bits_of(one), bits_of(other))


def with_special(tensor: Tensor, share: float) -> Tensor:
    """The tensor with about this share of its elements replaced by zeros, infinities, NaN and bounds."""
    drawn = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), tensor.shape)]
    return torch.where(torch.rand(tensor.shape) < share, drawn.to(tensor.dtype), tensor)
