"""Read fx nodes: arguments without fx's wide unions, and recurring patterns of captured graphs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_TORCH_NAMESPACES = frozenset(
    {"aten", "prims", "rngprims", "quantized", "mkldnn", "torchvision", "torchaudio"}
    | {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem"}
)

LAYER = "layer"
"""Key of a node's metadata: the name of the submodule whose call made it."""

WRITES_FIRST = "writes first"
"""Key of a lowered node's metadata: whether it overwrites a tensor of the caller, its first argument."""


def layer_of(node: Node) -> str:
    """The name of the submodule whose call made the node; "" outside of submodules."""
    name: str = node.meta.get(LAYER, "")
    return name


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments."""
    return node.args


def target_of(node: Node) -> Any:
    """What the node calls."""
    return node.target


def operator_of(node: Node) -> Any:
    """What the node calls, or the operator inside the wrapper of one that writes to its arguments."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, torch._ops.OpOverload) else node.target


def may_draw(target: Any) -> bool:
    """Whether an operator is tagged as random, or is a user's operator, which may be random without a tag."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or is_foreign(target)


def switches_dropout_off(node: Node) -> bool:
    """Whether a call of an operator that is tagged as random draws nothing: attention without dropout."""
    operator = target_of(node)
    if not isinstance(operator, torch._ops.OpOverload) or is_foreign(operator):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def is_foreign(target: Any) -> bool:
    """Whether an operator is not part of torch."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _TORCH_NAMESPACES


def source_of(node: Node) -> Node:
    """The first argument: the base of a view, or the op that an item is taken from."""
    source: Any = node.args[0]
    assert isinstance(source, Node)
    return source


def is_item(node: Node) -> bool:
    """Whether the node takes one output of an op that has several."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_second_name(node: Node, base: Node) -> bool:
    """Whether two outputs of one op are the same tensor, as an LSTM's bias gradients are."""
    return is_item(node) and is_item(base) and node is not base and node.args[0] is base.args[0]


def replayed(node: Node, known: Mapping[Node, Any]) -> Any:
    """The view that a node makes, replayed from the nearest known node."""
    if node in known:
        return known[node]
    source = replayed(source_of(node), known)
    if is_item(node):
        return source[node.args[1]]
    return target_of(node)(source, *node.args[1:], **node.kwargs)


def nodes_in(argument: Any) -> list[Node]:
    """The nodes in an argument, with repeats; `all_input_nodes` has each once."""
    found: list[Node] = []

    def note(node: Node) -> Node:
        found.append(node)
        return node

    torch.fx.node.map_arg(argument, note)
    return found


def meta_tensors(value: Any) -> list[Tensor]:
    """The fake tensors of a node's result."""
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, list | tuple) else []
