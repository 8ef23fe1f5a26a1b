"""Structural keys: equal keys mean the same kernel on the same shapes, strides, dtypes and scalars."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def describe(argument: Any) -> str:
    """One argument as text: tensors by layout, everything else by value."""
    if isinstance(argument, Node):
        return describe(argument.meta.get("val"))
    if isinstance(argument, Tensor):
        dtype = str(argument.dtype).removeprefix("torch.")
        conjugate = "~" if argument.is_conj() else ""
        return f"{conjugate}{dtype}{list(argument.shape)}{list(argument.stride())}@{argument.device.type}"
    if isinstance(argument, list | tuple):
        return "(" + ", ".join(describe(a) for a in argument) + ")"
    if isinstance(argument, torch.device):
        return argument.type
    return repr(argument)


def target_name(node: Node) -> str:
    """The name of what a node calls: an operator's overload, or a function of ours."""
    operator = isinstance(node.target, str) or hasattr(node.target, "overloadpacket")
    return str(node.target) if operator else str(getattr(node.target, "__name__", node.target))


def _copies_storages(node: Node) -> bool:
    """Whether the op's result gets a storage as large as its first argument's, whatever that shows of it."""
    name = target_name(node)
    return name.startswith("aten.copy.") or "_scatter." in name


def call_key(node: Node, device: torch.device) -> str:
    """The key of a call: its target and everything that decides which kernel runs."""
    parts = [describe(a) for a in node.args] + [f"{k}={describe(v)}" for k, v in sorted(node.kwargs.items())]
    if _copies_storages(node):
        first = node.args[0].meta["val"]  # type: ignore[union-attr]
        parts.append(f"in {first.untyped_storage().nbytes()} bytes at {first.storage_offset()}")
    return f"{target_name(node)}({', '.join(parts)}) on {device.type}"
