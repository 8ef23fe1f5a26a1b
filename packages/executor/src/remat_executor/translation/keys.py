"""Structural keys of ops: equal keys mean the same kernel on the same shapes, strides, dtypes and scalars."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.torch_private.fake_tensors import copies_storages
from remat_executor.ways.substitution import Change


def describe(argument: Any) -> str:
    """One argument as a string: tensors by layout, everything else by value."""
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
    """The name of the operator overload, or of the function of this package, that a node calls."""
    operator = isinstance(node.target, str) or hasattr(node.target, "overloadpacket")
    return str(node.target) if operator else str(getattr(node.target, "__name__", node.target))


def anywhere(key: str) -> str:
    """A key without its device, to look up measurements of another device."""
    call, found, device = key.rpartition(" on ")
    if not found:
        return key
    return re.sub(rf"@{device}\b|\bdevice={device}\b", "", call)


def call_key(node: Node, device: torch.device) -> str:
    """The key of a call: its target and everything that decides the kernel."""
    parts = [describe(a) for a in node.args] + [f"{k}={describe(v)}" for k, v in sorted(node.kwargs.items())]
    if copies_storages(target_name(node)):
        first = node.args[0].meta["val"]  # type: ignore[union-attr]
        parts.append(f"in {first.untyped_storage().nbytes()} bytes at {first.storage_offset()}")
    return f"{target_name(node)}({', '.join(parts)}) on {device.type}"


def kernel_key(change: Change, device: torch.device) -> str:
    """The key of the kernel of another way, like `call_key`."""
    name = getattr(change.kernel, "__name__", "nothing")
    parts = [describe(argument) for argument in (*change.reads, *change.constants)]
    return f"{name}({', '.join(parts)}) on {device.type}"
