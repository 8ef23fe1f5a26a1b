"""Give a captured cross entropy with class weights and label smoothing the rounding of eager.

The mean is over the weights of the labels that are not ignored. Eager selects these and adds them up. A
trace cannot have a result whose size depends on data, so torch then adds zeros for the ignored labels, which
changes the order of the additions. On a GPU it stays so: the selection would wait for the device.
"""

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.rewrites import erase_unread
from remat_executor.fx_nodes import args_of

aten = torch.ops.aten


def sum_of_weights(weight: Tensor, labels: Tensor, ignored: Tensor) -> Tensor:
    """The sum of the classes' weights over the labels that are not ignored, in eager's order.

    It is measured with no label ignored, and then needs most memory; an ignored one may be no class.
    """
    weights = weight.gather(0, labels.clamp(0, len(weight) - 1).flatten())
    return weights.masked_select(~ignored.flatten()).sum()


def traceable_sum_of_weights(weight: Tensor, labels: Tensor, ignored: Tensor) -> Tensor:
    """The same with sizes that do not depend on data; its last bit may be another."""
    weights = weight.gather(0, labels.clamp(0, len(weight) - 1).flatten())
    return weights.masked_fill(ignored.flatten(), 0).sum()


def use_eager_sums(graph: torch.fx.Graph) -> None:
    """Replace sums of weights that were traced, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.default):
        found = _weights_of_labels(node)
        if found is not None and node.meta["val"].device.type == "cpu":
            traced = node.all_input_nodes
            node.target, node.args = sum_of_weights, found
            erase_unread(traced)


def _weights_of_labels(node: Node) -> tuple[Node, Node, Node] | None:
    """The weights, the labels and which are ignored; None if it is another sum, as of the user's own loss."""
    if len(node.args) != 1 or node.kwargs:
        return None
    gathered = _filled(args_of(node)[0])
    if gathered is None or gathered[0].target is not aten.gather.default:
        return None
    weight, dim, inside = args_of(gathered[0])
    labels = _filled(_source(inside))
    if dim != 0 or labels is None or _source(labels[1]) is not _source(gathered[1]):
        return None
    found = weight, labels[0], labels[1]
    return found if any(_is_mean(user, node, found) for user in node.users) else None


def _is_mean(user: Node, total: Node, found: tuple[Node, Node, Node]) -> bool:
    """Whether a call divides what `cross_entropy` adds to the loss of the same labels by their weights."""
    if user.target is not aten.div.Tensor or args_of(user)[1] is not total:
        return False
    summed = args_of(user)[0]
    kept = _filled(args_of(summed)[0]) if summed.target is aten.sum.default else None
    if kept is None or kept[1] is not found[2] or kept[0].target is not aten.neg.default:
        return False
    of_rows = args_of(kept[0])[0]
    weighted = args_of(of_rows)[0] if of_rows.target is aten.sum.dim_IntList else None
    if weighted is None or weighted.target is not aten.mul.Tensor:
        return False
    losses = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
    readers = [each for each in args_of(weighted)[0].users if each.target in losses]
    return any(args_of(each)[1:3] == (found[1], found[0]) for each in readers)


def _filled(node: Node) -> tuple[Node, Node] | None:
    """What a call fills with zeros, and where."""
    if node.target is not aten.masked_fill.Scalar or args_of(node)[2] != 0:
        return None
    return args_of(node)[0], args_of(node)[1]


def _source(node: Node) -> Node:
    """What a flattened tensor views."""
    while node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        node = args_of(node)[0]
    return node
