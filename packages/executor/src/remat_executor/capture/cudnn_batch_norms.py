"""Give captured batch norms on a GPU the kernels of eager.

Capture turns every train-mode batch norm into torch's own kernel, where eager runs cuDNN's, which is faster
and rounds differently. The operator of that writes the running statistics although its schema says that it
writes nothing, so a captured graph cannot hold it. `cudnn_batch_norm` returns them instead, as torch's
functional batch norm does, and `translation` gives it an implementation that writes them in place.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from remat_executor.fx_nodes import args_of, is_item
from remat_executor.torch_private.dispatch import selects_cudnn_batch_norm

aten = torch.ops.aten


def cudnn_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    train: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A train-mode batch norm by cuDNN.

    Returns:
        The output; the batch's mean and inverse deviation; the reserve for the backward; the new running mean
        and variance, which are copies.
    """
    new_mean, new_variance = mean.clone(), variance.clone()
    made = aten.cudnn_batch_norm.default(x, weight, bias, new_mean, new_variance, train, momentum, eps)
    return (*made, new_mean, new_variance)


def use_cudnn_batch_norms(graph: Graph, selects: Callable[..., bool] = selects_cudnn_batch_norm) -> None:
    """Replace captured batch norms for which eager takes cuDNN's kernel, in place.

    Args:
        graph: a joint graph.
        selects: whether eager takes cuDNN for the tensors, the mode and the epsilon of a batch norm.
    """
    with_statistics = aten._native_batch_norm_legit_functional.default
    without = aten._native_batch_norm_legit.no_stats
    for node in list(graph.nodes):
        if node.target not in (with_statistics, without):
            continue
        given = (
            args_of(node) if node.target is with_statistics else (*node.args[:3], None, None, *node.args[3:])
        )
        values = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in given]
        x, weight, bias, *statistics, train, _, eps = values
        backwards = _backwards(node)
        if not train or weight is None or bias is None or not _in_one_layout(x, backwards):
            continue
        if selects(x, weight, bias, *statistics, train, eps):
            target = cudnn_batch_norm if node.target is with_statistics else aten.cudnn_batch_norm.default
            _replace(graph, node, target, given, backwards)


def _backwards(node: Node) -> list[Node]:
    """What reads the statistics of a batch norm's batch."""
    items = [user for user in node.users if is_item(user) and user.args[1] in (1, 2)]
    return list(dict.fromkeys(reader for item in items for reader in item.users))


def _in_one_layout(x: Tensor, backwards: list[Node]) -> bool:
    """Whether only backwards read the statistics, and input and gradients are dense in one layout.

    CuDNN requires and keeps the layout. Eager copies tensors of another; such batch norms are rare, and stay
    with torch's own kernel.
    """
    if any(node.target is not aten.native_batch_norm_backward.default for node in backwards):
        return False
    last = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.ndim, [])
    tensors = [x, *(args_of(backward)[0].meta["val"] for backward in backwards)]
    layouts = [torch.contiguous_format, *last]
    return any(all(t.is_contiguous(memory_format=layout) for t in tensors) for layout in layouts)


def _replace(
    graph: Graph, node: Node, target: Callable[..., Any], given: tuple[Any, ...], backwards: list[Node]
) -> None:
    output, mean, deviation, *new_statistics = node.meta["val"]
    with graph.inserting_before(node):
        norm = graph.call_function(target, given)
    # Only cuDNN knows how long the reserve is; it is measured with the costs.
    reserve = output.new_empty(0, dtype=torch.uint8)
    norm.meta = {**node.meta, "val": (output, mean, deviation, reserve, *new_statistics)}
    for item in list(node.users):
        place = args_of(item)[1]
        item.args = (norm, place + 1 if place > 2 else place)
    with graph.inserting_after(norm):
        kept = graph.call_function(getitem, (norm, 3))
    kept.meta = {**node.meta, "val": reserve}
    for backward in backwards:
        gradient, x, weight, *statistics, _, eps, _ = args_of(backward)
        with graph.inserting_before(backward):  # a new node, which is named after its operator
            new = graph.call_function(
                aten.cudnn_batch_norm_backward.default, (x, gradient, weight, *statistics, eps, kept)
            )
        new.meta = dict(backward.meta)
        backward.replace_all_uses_with(new)
        graph.erase_node(backward)
    graph.erase_node(node)
