"""Make oneDNN's LSTM layer keep the workspace that its backward needs.

The kernel fills its workspace only while grad mode is on, and a planned module runs with grad mode off.
"""

from typing import Any

import torch
from torch import Tensor


def recording_lstm_layer(*args: Any) -> tuple[Tensor, ...]:
    """``aten.mkldnn_rnn_layer`` as eager runs it in training, with the operator's arguments."""
    detached = (a.detach() if isinstance(a, Tensor) else a for a in args)
    with torch.enable_grad():
        result: tuple[Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer.default(*detached)
    return result


def keep_workspaces(graph: torch.fx.Graph) -> None:
    """Make captured LSTM layers keep their workspaces, in place."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default):
        node.target = recording_lstm_layer


def reads_opaque_bytes(target: Any) -> bool:
    """Whether an operator follows addresses in a workspace that only its own forward can write."""
    aten = torch.ops.aten
    return target in (aten.mkldnn_rnn_layer_backward.default, aten._cudnn_rnn_backward.default)
