"""Private keys of the metadata that torch gives to the nodes of a trace."""

import re

from torch.fx import Node

_OWNER = re.compile(r"^[LG]\['\w+'\](\.__closure__\[\d+\]\.cell_contents)?\.?")
_ITEM = re.compile(r"(?:\._modules)?\['?([^'\]]*)'?\]")


def sums_gradients(node: Node) -> bool:
    """Whether autograd made this node to add the gradients of several readers of a tensor."""
    return bool(node.meta.get("is_gradient_acc"))


def module_path(node: Node) -> str:
    """The module in which Dynamo traced what the node does; "" if none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [source for source, _ in stack.values()][-1] if stack else ""
    return _ITEM.sub(r".\1", _OWNER.sub("", path)).lstrip(".")
