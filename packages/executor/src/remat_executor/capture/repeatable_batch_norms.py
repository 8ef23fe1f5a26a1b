"""Find the batch norms that may be repeated: a repeat then leaves the running statistics alone.

A train-mode batch norm may be repeated if its new statistics only replace buffers of the caller, so that
nothing else reads them. `translation` gives such an op a second implementation without statistics.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.cudnn_batch_norms import cudnn_batch_norm
from remat_executor.fx_nodes import args_of, is_item

aten = torch.ops.aten
_NORMS = (aten._native_batch_norm_legit_functional.default, cudnn_batch_norm)
_BACKWARDS = (aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default)


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
        if node.target not in _NORMS:
            continue
        buffers = []
        last = len(node.meta["val"]) - 1  # the new statistics are the last outputs
        for place, argument in ((last - 1, args_of(node)[3]), (last, args_of(node)[4])):
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
    return all(user.op == "output" or user.target in (*_NORMS, *_BACKWARDS) for user in new.users)


def arguments_read(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call without what it never reads: running statistics, in a train-mode backward."""
    native, cudnn = _BACKWARDS
    unread = node.target is cudnn or (node.target is native and node.args[7] is True)
    return (*args[:3], None, None, *args[5:]) if unread else args


def batch_norm_call(
    node: Node, tensors: tuple[Any, Any, Any], statistics: tuple[Any, Any] | None
) -> tuple[Any, tuple[Any, ...]]:
    """The operator and arguments that run a repeatable batch norm.

    Args:
        node: the batch norm.
        tensors: input, weight and bias.
        statistics: the buffers that the operator writes; None for a repeat.
    """
    rest = node.args[5:]
    if node.target is cudnn_batch_norm:
        return aten.cudnn_batch_norm.default, (*tensors, *(statistics or (None, None)), *rest)
    if statistics is None:
        kept = node.args[3].meta["val"].dtype  # type: ignore[union-attr]
        if node.args[1] is None and kept != node.args[0].meta["val"].dtype:  # type: ignore[union-attr]
            return repeat_with_other_statistics, (tensors[0], kept, *rest)
        return aten._native_batch_norm_legit.no_stats, (*tensors, *rest)
    return aten._native_batch_norm_legit.default, (*tensors, *statistics, *rest)


def repeat_with_other_statistics(x: Tensor, dtype: torch.dtype, *rest: Any) -> tuple[Tensor, ...]:
    """A batch norm without weight and bias, with running statistics that are thrown away.

    Their dtype decides how the CPU's kernel rounds if it is not that of the input, and their numbers nothing.
    """
    mean, variance = (x.new_zeros(x.shape[1], dtype=dtype) for _ in range(2))
    made: tuple[Tensor, ...] = aten._native_batch_norm_legit.default(x, None, None, mean, variance, *rest)
    return made
