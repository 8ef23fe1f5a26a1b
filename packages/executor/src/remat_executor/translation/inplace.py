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
    """An in-place form."""

    target: Callable[..., Any]  # the overload to call
    out: str | None = None  # keyword of the tensor to overwrite; None if that is the first argument


def in_place_forms() -> dict[Any, dict[int, InPlace]]:
    """For each overload with in-place forms: {position of the overwritten argument: form}."""
    pointwise = ["relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "leaky_relu"]
    pointwise += ["sigmoid", "tanh", "exp", "neg"]
    over_self = [(getattr(aten, name).default, getattr(aten, f"{name}_").default) for name in pointwise]
    over_self += [(aten.pow.Tensor_Scalar, aten.pow_.Scalar)]
    for name in ("add", "mul", "div", "masked_fill"):
        over_self.append((getattr(aten, name).Scalar, getattr(aten, f"{name}_").Scalar))
    forms: dict[Any, dict[int, InPlace]] = {f: {0: InPlace(g)} for f, g in over_self}
    for name in ("add", "sub", "mul", "div"):
        out = InPlace(getattr(aten, name).out, "out")
        forms[getattr(aten, name).Tensor] = {0: out, 1: out}
    for name in ("threshold", "gelu", "silu", "tanh", "sigmoid", "hardtanh"):
        backward = getattr(aten, f"{name}_backward")
        forms[backward.default] = {0: InPlace(backward.grad_input, "grad_input")}
    return forms
