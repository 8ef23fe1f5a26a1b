"""Which of the caller's tensors a lowered graph writes."""

import torch
from torch.fx import GraphModule, Node

from remat_executor.fx_nodes import WRITES_FIRST, args_of, is_item

aten = torch.ops.aten


def written(module: GraphModule) -> set[int]:
    """Indices, in a lowered graph's list, of the caller's tensors that it writes.

    In-place forms that the plan chose write only dying values, so they do not count.
    """
    nodes: list[Node] = []
    for node in module.graph.nodes:
        if node.target is aten.copy_.default or node.meta.get(WRITES_FIRST):
            nodes.append(args_of(node)[0])
        elif node.target in (aten._native_batch_norm_legit.default, aten.cudnn_batch_norm.default):
            nodes.extend(a for a in args_of(node)[3:5] if a is not None)
    return {args_of(node)[1] for node in nodes if is_item(node) and args_of(node)[0].op == "placeholder"}
