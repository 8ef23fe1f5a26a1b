"""Pointwise ops that may overwrite a dying input: their in-place forms, which run the same kernel.

Functionalization turns ``relu_`` into ``relu``, which needs a second storage at the peak. Each entry names
the overload that writes into one of its inputs and was checked to return the same bits.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch

aten = torch.ops.aten


@attrs.frozen
class InPlace:
    """An in-place form.

    Attributes:
        target: the overload to call.
        out: keyword of the tensor to overwrite; None if that is the first argument.
    """

    target: Callable[..., Any]
    out: str | None = None


def in_place_forms() -> dict[Any, dict[int, InPlace]]:
    """For each overload with in-place forms: {position of the overwritten argument: form}."""
    over_self = (
        (aten.relu.default, aten.relu_.default),
        (aten.hardtanh.default, aten.hardtanh_.default),
        (aten.hardswish.default, aten.hardswish_.default),
        (aten.hardsigmoid.default, aten.hardsigmoid_.default),
        (aten.silu.default, aten.silu_.default),
        (aten.gelu.default, aten.gelu_.default),
        (aten.elu.default, aten.elu_.default),
        (aten.leaky_relu.default, aten.leaky_relu_.default),
        (aten.sigmoid.default, aten.sigmoid_.default),
        (aten.tanh.default, aten.tanh_.default),
        (aten.exp.default, aten.exp_.default),
        (aten.neg.default, aten.neg_.default),
        (aten.pow.Tensor_Scalar, aten.pow_.Scalar),
        (aten.add.Scalar, aten.add_.Scalar),
        (aten.mul.Scalar, aten.mul_.Scalar),
        (aten.div.Scalar, aten.div_.Scalar),
        (aten.masked_fill.Scalar, aten.masked_fill_.Scalar),
    )
    forms: dict[Any, dict[int, InPlace]] = {f: {0: InPlace(g)} for f, g in over_self}
    for binary, out in (
        (aten.add.Tensor, aten.add.out),
        (aten.sub.Tensor, aten.sub.out),
        (aten.mul.Tensor, aten.mul.out),
        (aten.div.Tensor, aten.div.out),
    ):
        forms[binary] = {0: InPlace(out, "out"), 1: InPlace(out, "out")}
    for backward, out in (
        (aten.threshold_backward.default, aten.threshold_backward.grad_input),
        (aten.gelu_backward.default, aten.gelu_backward.grad_input),
        (aten.silu_backward.default, aten.silu_backward.grad_input),
        (aten.tanh_backward.default, aten.tanh_backward.grad_input),
        (aten.sigmoid_backward.default, aten.sigmoid_backward.grad_input),
        (aten.hardtanh_backward.default, aten.hardtanh_backward.grad_input),
    ):
        forms[backward] = {0: InPlace(out, "grad_input")}
    return forms
