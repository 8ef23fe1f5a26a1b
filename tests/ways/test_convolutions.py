"""The backward of a convolution in two ops: the bits of the one call, and its memory."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from remat_executor.ways.convolutions import convolutions, input_gradient, weight_gradient

aten = torch.ops.aten
ANY = partial(convolutions, least_nbytes=0)
SIZES = {1: (13,), 2: (9, 7), 3: (5, 7, 6)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def assert_same(one: Tensor, other: Tensor) -> None:
    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def halves(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any, bias: bool) -> tuple[Tensor, ...]:
    shape = [gradient.shape[1]]
    (made,) = input_gradient(gradient, weight, tuple(x.shape), x.stride(), shape, *rest)
    return made, *weight_gradient(gradient, x, weight, shape, *rest, (False, True, bias))


def special(tensor: Tensor) -> Tensor:
    """NaN, infinities and zeros of both signs among the numbers."""
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40], dtype=tensor.dtype)
    where = torch.rand_like(tensor, dtype=torch.float32) < 0.02
    return torch.where(where, values[torch.randint(len(values), tensor.shape)], tensor)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_halves_give_the_bits_of_the_call(dtype: torch.dtype, dims: int, threads: int) -> None:
    """Strides, paddings, dilations, groups, transposed; images, channels last; batches, none; no bias."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    shapes = [
        (1, 1, 1, 1, 1, 16),
        (3, 2, 1, 1, 1, 16),
        (3, 1, 0, 2, 8, 8),
        (3, 2, 1, 1, 2, 24),
        (2, 2, 0, 1, 1, 4),
    ]
    for (size, stride, padding, dilation, groups, outs), transposed, last, rows, bias in itertools.product(
        shapes, (False, True), (False, True), (0, 2), (False, True)
    ):
        x = special(torch.randn(rows, 8, *SIZES[dims]).to(dtype))
        around = (8, outs // groups) if transposed else (outs, 8 // groups)
        weight = torch.randn(*around, *[size] * dims).to(dtype)
        if last and dims in LAST:
            x, weight = (t.to(memory_format=LAST[dims]) for t in (x, weight))
        rest = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
        gradient = special(torch.randn_like(aten.convolution(x, weight, None, *rest)))
        wanted = aten.convolution_backward(gradient, x, weight, [outs], *rest, [True, True, bias])
        found = halves(gradient, x, weight, *rest, bias=bias)
        assert len(found) == 2 + bias
        for one, other in zip(wanted, found, strict=False):
            assert_same(one, other)
    torch.set_num_threads(before)
