"""Find the batch norms that may be repeated: a repeat then leaves the running statistics alone.

A train-mode batch norm may be repeated if its new statistics only replace buffers of the caller, so that
nothing else reads them. `translation` gives such an op a second implementation without statistics.
"""

import torch
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item


def repeatable_batch_norms(captured: Captured) -> tuple[dict[Node, tuple[Node, Node]], dict[Node, Node]]:
    """The train-mode batch norms whose new statistics only replace a buffer of the caller.

    Returns:
        The buffers with the running mean and variance of each batch norm; and the statistic behind each new
        value of a buffer, which may be cast to the buffer's dtype: the kernel writes buffers of any dtype
        itself, so such a cast is not an op.
    """
    found: dict[Node, tuple[Node, Node]] = {}
    latest: dict[Node, Node] = {}  # new statistic -> buffer, through repeated use of one norm
    casts: dict[Node, Node] = {}
    for node in captured.graph_module.graph.nodes:
        if node.target is not torch.ops.aten._native_batch_norm_legit_functional.default:
            continue
        buffers = []
        for place, argument in ((3, args_of(node)[3]), (4, args_of(node)[4])):
            buffer = latest.get(argument, argument if argument.op == "placeholder" else None)
            news = [u for u in node.users if is_item(u) and u.args[1] == place]
            if buffer is None or len(news) != 1:
                break
            new = _cast_back(news[0], buffer)
            if not _only_statistic(new):
                break
            buffers.append((buffer, new))
            casts[new] = news[0]
        if len(buffers) == 2 and node.args[5] is True:
            found[node] = (buffers[0][0], buffers[1][0])
            latest.update({new: buffer for buffer, new in buffers})
    written = {target for target, _ in captured.mutations}
    if not all({m, v} <= written for m, v in found.values()):
        return {}, {}
    return found, {new: casts[new] for new in latest}


def _cast_back(new: Node, buffer: Node) -> Node:
    """The cast of a new statistic to its buffer's dtype, if there is one: torch infers float32."""
    users = list(new.users)
    cast = users[0] if len(users) == 1 else new
    back = (
        cast.target is torch.ops.aten._to_copy.default and cast.meta["val"].dtype == buffer.meta["val"].dtype
    )
    return cast if back else new


def _only_statistic(new: Node) -> bool:
    """Whether a batch norm's new statistic is read only by other norms and its buffer."""
    norms = (
        torch.ops.aten._native_batch_norm_legit_functional.default,
        torch.ops.aten.native_batch_norm_backward.default,
    )
    return all(user.op == "output" or user.target in norms for user in new.users)


def drops_statistics(node: Node) -> bool:
    """Whether a node is the backward of a train-mode batch norm, which reads no running statistics."""
    return node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[7] is True
