"""Ops that may overwrite a dying input: their in-place forms, which run the same kernel.

Functionalization turns ``relu_`` into ``relu``, which needs a second storage at the peak. Each entry names
the overload that writes into one of its inputs and was checked to return the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.fx_nodes import nodes_in

aten = torch.ops.aten


@attrs.frozen
class InPlace:
    """An in-place form."""

    target: Callable[..., Any]  # the overload to call
    out: str | None = None  # keyword of the tensor to overwrite; None if that is the first argument


def in_place_forms() -> dict[Any, dict[int, InPlace]]:
    """For each overload with in-place forms: {position of the overwritten argument: form}."""
    pointwise = ["relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "leaky_relu"]
    pointwise += ["sigmoid", "tanh", "exp", "neg", "abs", "sqrt", "rsqrt", "log", "reciprocal", "sin", "cos"]
    pointwise += ["erf", "clamp", "clamp_min", "clamp_max"]
    written = ["index_put", "scatter_add", "index_add", "index_copy", "masked_scatter"]
    over_self = [(getattr(aten, n).default, getattr(aten, f"{n}_").default) for n in pointwise + written]
    over_self += [(aten.pow.Tensor_Scalar, aten.pow_.Scalar)]
    for name in ("add", "div", "masked_fill"):
        over_self.append((getattr(aten, name).Scalar, getattr(aten, f"{name}_").Scalar))
    for overload in ("src", "value"):
        over_self.append((getattr(aten.scatter, overload), getattr(aten.scatter_, overload)))
    for overload in ("int_Scalar", "int_Tensor"):
        over_self.append((getattr(aten.index_fill, overload), getattr(aten.index_fill_, overload)))
    over_self += [(aten.masked_fill.Tensor, aten.masked_fill_.Tensor)]
    over_self += [(aten.slice_scatter.default, write_slice), (aten.select_scatter.default, write_entry)]
    over_self += [(aten.copy.default, write_whole)]
    forms: dict[Any, dict[int, InPlace]] = {f: {0: InPlace(g)} for f, g in over_self}
    for name in ("add", "sub", "mul", "div"):
        out = InPlace(getattr(aten, name).out, "out")
        forms[getattr(aten, name).Tensor] = {0: out, 1: out}
    # On a CPU `mul_.Scalar` first rounds the number to the tensor's dtype, which `mul.Scalar` does not.
    forms[aten.mul.Scalar] = {0: forms[aten.mul.Tensor][0]}
    forms[aten.where.self] = {place: InPlace(aten.where.self_out, "out") for place in (1, 2)}
    names = ["threshold", "gelu", "silu", "tanh", "sigmoid", "hardtanh", "leaky_relu", "hardsigmoid", "elu"]
    for name in names:
        backward = getattr(aten, f"{name}_backward")
        forms[backward.default] = {0: InPlace(backward.grad_input, "grad_input")}
    # Each row is read before it is written.
    for softmax in (aten._softmax, aten._log_softmax):
        forms[softmax.default] = {0: InPlace(softmax.out, "out")}
    for backward, keyword in (
        (aten._softmax_backward_data, "grad_input"),
        (aten._log_softmax_backward_data, "out"),
    ):
        forms[backward.default] = {place: InPlace(backward.out, keyword) for place in (0, 1)}
    return forms


def overwritable(
    node: Node, forms: Mapping[Any, Mapping[int, InPlace]], base_of: Mapping[Node, Node]
) -> Iterator[tuple[Node, int, InPlace]]:
    """(base, position, form) of each argument that a call could overwrite with its result.

    It is laid out like the result, and no other argument shows the same storage.

    Args:
        node: the call.
        forms: `in_place_forms()`.
        base_of: fx node -> node whose storage it shows.
    """
    result = node.meta["val"]
    for place, form in forms.get(node.target, {}).items():
        argument = node.args[place] if place < len(node.args) else None
        if not isinstance(argument, Node) or not isinstance(argument.meta.get("val"), Tensor):
            continue
        base = base_of[argument]
        alone = sum(base_of.get(a) is base for a in nodes_in((node.args, node.kwargs))) == 1
        if alone and _layout(argument.meta["val"]) == _layout(result):
            yield base, place, form


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def write_whole(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy` over its first argument; a plain `copy_` in a lowered graph writes to a tensor of the caller."""
    return x.copy_(source, non_blocking)


def write_slice(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """`slice_scatter` over its first argument."""
    aten.slice.Tensor(x, dim, start, end, step).copy_(source)
    return x


def write_entry(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """`select_scatter` over its first argument."""
    x.select(dim, index).copy_(source)
    return x
