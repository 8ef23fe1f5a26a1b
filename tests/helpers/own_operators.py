"""Operators as users register them, and a model around each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("remat_tests::smooth", mutates_args=())
def smooth(x: Tensor, rate: float) -> Tensor:
    """An operator that torch knows nothing about."""
    return x * rate + x.flip(-1) * (1 - rate)


@smooth.register_fake
def _(x: Tensor, rate: float) -> Tensor:
    return torch.empty_like(x)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rate = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> Any:
    return smooth(gradient, ctx.rate), None


smooth.register_autograd(_backward, setup_context=_set_up)


@torch.library.triton_op("remat_tests::ripple", mutates_args=())
def ripple(x: Tensor, rate: float) -> Tensor:
    """What a compiler may look into, and eager calls as one operator; no kernel of Triton's in it here."""
    return x.sin() * rate + x.flip(-1)


def _backward_of_ripple(ctx: Any, gradient: Tensor) -> Any:
    return ripple(gradient, ctx.rate), None  # any formula will do: eager's is the same


ripple.register_autograd(_backward_of_ripple, setup_context=_set_up)


class Opaque(nn.Module):
    """A model around an operator of its own."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(getattr(torch.ops.remat_tests, self.operator)(self.first(x).relu(), 0.7))
        return found
