"""Capture recurrent layers with the workspaces that their backward needs.

OneDNN's LSTM fills its workspace only while grad mode is on, and a planned module runs with grad mode off.

CuDNN's layers read their weights from one flat tensor, in an order that only cuDNN knows. Eager finds it by
the addresses of the weights, which a trace does not have, so a trace makes it of the weights. The layers
return it: the argument itself, which the schema does not say, or a new tensor. Torch has no shapes for their
backward.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.errors import CaptureError
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.stride_rules import steps_outside
from remat_executor.torch_private.dispatch import outside_of_modes

aten = torch.ops.aten
_MODES = {aten.rnn_relu.input: 0, aten.rnn_tanh.input: 1, aten.lstm.input: 2, aten.gru.input: 3}  # of cuDNN
_FLAT_WEIGHTS = 4  # among the results of cuDNN's layers
_ARGUMENT = 3  # of the layers and of their backward: the flat weights
_OUTPUT = 6  # of the backward: the layer's first result
_BATCH_FIRST, _BATCH_SIZES = 8, 12  # of the backward, behind its tensors of states


def recording_lstm_layer(*args: Any) -> tuple[Tensor, ...]:
    """``aten.mkldnn_rnn_layer`` as eager runs it in training, with the operator's arguments."""
    detached = (a.detach() if isinstance(a, Tensor) else a for a in args)
    with torch.enable_grad():
        result: tuple[Tensor, ...] = aten.mkldnn_rnn_layer.default(*detached)
    return result


def keep_workspaces(graph: torch.fx.Graph) -> None:
    """Make captured LSTM layers keep their workspaces, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = recording_lstm_layer


def cudnn_rnn_backward(*args: Any) -> tuple[Tensor, ...]:
    """``aten._cudnn_rnn_backward``, with the gradients of all weights behind the others."""
    *gradients, weights = aten._cudnn_rnn_backward.default(*args)
    return (*gradients, *weights)


def flatten_gradients(graph: torch.fx.Graph) -> None:
    """Make the backward of cuDNN's layers return no list, in place."""
    for node in graph.find_nodes(op="call_function", target=aten._cudnn_rnn_backward.default):
        node.target = cudnn_rnn_backward
        *gradients, weights = node.meta["val"]
        node.meta["val"] = (*gradients, *weights)
        for item in [user for user in node.users if is_item(user) and args_of(user)[1] == len(gradients)]:
            for inner in list(item.users):
                inner.args = (node, len(gradients) + args_of(inner)[1])
            graph.erase_node(item)


def _layer_of_cudnn(
    mode: int,
    run: Callable[..., Any],
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A recurrent layer as eager runs it on CUDA, but for the order of its flat weights."""
    with outside_of_modes():
        accepted = torch.cudnn_is_acceptable(torch.empty(1, dtype=x.dtype, device=x.device))
    if not accepted or not x.numel():
        options = (has_biases, layers, dropout, train, bidirectional, batch_first)
        result: tuple[Tensor, ...] = run(x, state, weights, *options)
        return result
    if dropout and train:
        raise CaptureError(
            problem="cuDNN's recurrent layers draw their dropout from a state of their own",
            advice="make one layer for each, with dropout=0, and nn.Dropout between them",
        )
    if torch.is_autocast_enabled("cuda"):
        raise CaptureError(
            problem="autocast gives cuDNN's recurrent layers copies of their weights that cannot be traced",
            advice="disable autocast around the layer, or cast the model",
        )
    hx, cx = (state, None) if isinstance(state, Tensor) else state
    hidden, projected = (hx if cx is None else cx).shape[-1], 0
    if hidden != hx.shape[-1]:
        projected = hx.shape[-1]
    each = 2 + 2 * has_biases + bool(projected)
    flat = torch.cat(
        [weight.detach().reshape(-1) for weight in weights]
    )  # in which order: `order_flat_weights`
    sizes: tuple[Any, ...] = (
        mode,
        hidden,
        projected,
        layers,
        batch_first,
        0.0,
        train,
        bidirectional,
        [],
        None,
    )
    output, *states = aten._cudnn_rnn.default(x, weights, each, flat, hx, cx, *sizes)[:3]
    return (output, *states[: 1 if cx is None else 2])


CHOSEN: Mapping[Any, Callable[..., Any]] = {
    layer: functools.partial(_layer_of_cudnn, mode) for layer, mode in _MODES.items()
}
"""Functions instead of overloads on CUDA; each gets the overload's own kernel first."""


def order_flat_weights(graph: torch.fx.Graph) -> None:
    """Let cuDNN's layers find their weights where they look for them in the flat ones, in place."""
    for node in graph.find_nodes(op="call_function", target=aten._cudnn_rnn.default):
        flat = args_of(node)[_ARGUMENT]
        (parts,) = flat.args
        flat.update_arg(0, [parts[place] for place in _order(node)])


def _order(node: Node) -> list[int]:
    """The weights of a layer in the order in which cuDNN reads them: it is asked to flatten numbers."""
    x, weights, a_layer, *_ = args_of(node)
    sizes, bidirectional = args_of(node)[6:11], args_of(node)[13]  # mode, sizes, layers, batch first
    fakes: list[Tensor] = [weight.meta["val"] for weight in weights]
    numbers = [
        torch.full(fake.shape, place, dtype=fake.dtype, device=fake.device)
        for place, fake in enumerate(fakes)
    ]
    flatten = aten._cudnn_rnn_flatten_weight.default
    with torch.no_grad():
        flat = flatten(numbers, a_layer, x.meta["val"].shape[-1], *sizes, bidirectional)
    found, lengths = torch.unique_consecutive(flat, return_counts=True)
    order = [int(number) for number in found.tolist()]
    if [fakes[place].numel() for place in order] != lengths.tolist():
        raise CaptureError(
            problem="cuDNN does not place the weights of a recurrent layer one behind the other",
            advice="set torch.backends.cudnn.enabled = False before planning",
        )
    return order


def separate_flat_weights(graph: torch.fx.Graph) -> None:
    """Let the backward of cuDNN's layers read the flat weights that were given or made, in place."""
    for node in graph.find_nodes(op="call_function", target=aten._cudnn_rnn.default):
        output, *states, reserve, _ = node.meta["val"]
        # Only cuDNN knows how long these are; they are measured with the costs.
        made = output.new_empty(0)
        node.meta["val"] = (output, *states, reserve, made)
        items = {args_of(user)[1]: user for user in node.users if is_item(user)}
        weights = args_of(node)[_ARGUMENT]
        if weights is None:
            with graph.inserting_after(node):
                weights = graph.call_function(getitem, (node, _FLAT_WEIGHTS))
            weights.meta = {**node.meta, "val": made}
        if _FLAT_WEIGHTS in items:
            items[_FLAT_WEIGHTS].replace_all_uses_with(weights)
            graph.erase_node(items[_FLAT_WEIGHTS])
        for backward in graph.find_nodes(op="call_function", target=aten._cudnn_rnn_backward.default):
            if args_of(backward)[_OUTPUT] is items.get(0):
                backward.update_arg(_ARGUMENT, weights)


def _backward_on_meta(
    x: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    flat: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | list[Tensor] | None, ...]:
    """The gradients of a layer of cuDNN."""
    states = (torch.empty_like(state) if state is not None else None for state in (hx, cx))
    batch_first, batch_sizes, mask = rest[_BATCH_FIRST], rest[_BATCH_SIZES], rest[-1]
    input_gradient = steps_outside(x) if batch_first and not batch_sizes else torch.empty_like(x)
    return (input_gradient, *states, [torch.empty_like(weight) for weight in weights if mask[-1]])


SHAPES: Mapping[Any, Callable[..., Any]] = {aten._cudnn_rnn_backward.default: _backward_on_meta}
"""Meta kernels of operators for which torch has none."""


def reads_opaque_bytes(target: Any) -> bool:
    """Whether an operator follows addresses in a workspace that only its own forward can write."""
    return target in (aten.mkldnn_rnn_layer_backward.default, cudnn_rnn_backward)
