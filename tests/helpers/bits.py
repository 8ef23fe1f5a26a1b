"""Tensors that are equal in every bit: NaN equals NaN, and zeros have signs."""

from __future__ import annotations

import torch
from torch import Tensor

SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 6.0, 3.0, -3.0, 1.0, -1.0)


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same layout and the same bits."""
    laid_out = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return laid_out and torch.equal(bits_of(one), bits_of(other))


def with_special(tensor: Tensor, share: float) -> Tensor:
    """The tensor with about this share of its elements replaced by zeros, infinities, NaN and bounds."""
    drawn = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), tensor.shape)]
    return torch.where(torch.rand(tensor.shape) < share, drawn.to(tensor.dtype), tensor)
