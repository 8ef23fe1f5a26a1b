"""Wrap random draws as operators that a compiler can neither inspect nor reorder.

The operator of a draw takes a token and returns the next one, so draws stay in the order of the schedule and
none is dropped. A draw from a given generator state is a pure function of that state and needs no token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from remat_executor.capture.cudnn_batch_norms import cudnn_batch_norm
from remat_executor.capture.dropout_rounding import noise_dropout, replay_noise_dropout
from remat_executor.capture.recurrent import recording_lstm_layer
from remat_executor.capture.smoothed_loss import sum_of_weights, traceable_sum_of_weights
from remat_executor.fx_nodes import may_draw, switches_dropout_off, target_of
from remat_executor.generator_state import default_generator, read_state, replay
from remat_executor.torch_private.dispatch import schema_text
from remat_executor.translation.recipes import own_copy

Operator = Callable[..., Any]
aten = torch.ops.aten
_CUDNN = (cudnn_batch_norm, aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default)
_LOSS_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
_MEAN = 1  # of torch's reductions


class Opaque(Interpreter):
    """Runs a lowered graph as a function of flat tensors and a token, with draws as opaque operators.

    Created before the graph is traced, since operators cannot be registered during a trace.

    Attributes:
        ordered: whether the graph draws or reads a generator, so that tokens matter.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        self.with_token = {node: made for node in calls if (made := _operator_with_token(node)) is not None}
        self.pure = {node: made for node in calls if (made := _pure_operator(node)) is not None}
        self.ordered = bool(self.with_token)
        self.token: Tensor | None = None

    def flat(self, *tensors: Tensor) -> list[Tensor]:
        """Run the graph on its tensors, with a token as last input and last result if `ordered`."""
        inputs = list(tensors)
        self.token = inputs.pop() if self.ordered else None
        results = list(self.run(inputs))
        return [*results, self.token] if self.token is not None else results

    def run_node(self, n: Node) -> Any:
        """Call the opaque operator of a node, if it has one."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in _CUDNN:
            return _fusible_batch_norm(n.target, args)
        if n.target is sum_of_weights:  # the sizes of its parts depend on data
            return traceable_sum_of_weights(*args)
        if n.target in _LOSS_BACKWARD:
            return _fusible_loss_backward(*args)
        if n in self.with_token:
            *results, self.token = self.with_token[n](self.token, *args, **kwargs)
            return results[0] if len(results) == 1 else tuple(results)
        if n.target is replay:
            args = (*args[:2], *args[3:])  # the target is in the operator
        return self.pure[n](*args, **kwargs) if n in self.pure else super().run_node(n)


def _operator_with_token(node: Node) -> Operator | None:
    """The operator of a node that draws or reads a generator; None for other nodes."""
    target = target_of(node)
    if target is read_state:
        return _reader(str(node.args[0]))
    draws = target is noise_dropout or (may_draw(target) and not switches_dropout_off(node))
    return _draw(target) if draws else None


def _pure_operator(node: Node) -> Operator | None:
    """The operator of a node that a compiler must leave alone and that needs no token."""
    target = target_of(node)
    if target is replay or target is replay_noise_dropout:
        return _redraw(noise_dropout if target is replay_noise_dropout else node.args[2])
    if target is own_copy:
        return _own_copy()
    return _lstm_layer() if target is recording_lstm_layer else None


def _fusible_batch_norm(target: Any, args: tuple[Any, ...]) -> Any:
    """What a batch norm by cuDNN computes, by an operator that compilers fuse; its reserve is empty."""
    if target is aten.cudnn_batch_norm_backward.default:
        x, gradient, weight, *statistics, eps, _ = args
        backward = aten.native_batch_norm_backward.default
        return backward(gradient, x, weight, *statistics, True, eps, [True, True, True])
    x, weight, bias, mean, variance, *rest = args
    reserve = x.new_empty(0, dtype=torch.uint8)
    if target is cudnn_batch_norm:  # a compiler would not see that the kernel writes the copied statistics
        *made, new_mean, new_variance = aten._native_batch_norm_legit_functional.default(*args)
        return (*made, reserve, new_mean, new_variance)
    if mean is None:
        made = aten._native_batch_norm_legit.no_stats(x, weight, bias, *rest)
    else:
        made = aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, *rest)
    return (*made, reserve)


def _fusible_loss_backward(
    gradient: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: Tensor,
) -> Tensor:
    """The backward of a negative log likelihood, element by element.

    Torch's own scatters into zeros, which a compiler holds as one more tensor of the input's size. This fuses
    with the backward of the softmax.
    """
    channel = 0 if x.ndim == 1 else 1
    shape = [-1 if dimension == channel else 1 for dimension in range(x.ndim)]
    at = target.unsqueeze(channel)
    if reduction == _MEAN:
        gradient = gradient / total_weight
    if 0 < gradient.ndim < x.ndim:
        gradient = gradient.unsqueeze(channel)
    if weight is not None:
        gradient = gradient * weight.view(shape)
    places = torch.arange(x.shape[channel], device=x.device).view(shape)
    return torch.where((places == at) & (at != ignored), -gradient, 0.0).to(x.dtype)


def _reader(device: str) -> Operator:
    """The operator of `read_state` for a device."""
    size = default_generator(torch.device(device)).get_state().numel()

    def run(token: Tensor, device: str) -> tuple[Tensor, Tensor]:
        return read_state(device), token.clone()

    def fake(token: Tensor, device: str) -> tuple[Tensor, Tensor]:
        return torch.empty(size, dtype=torch.uint8), token.clone()

    kind = torch.device(device).type
    return _operator(f"read_{kind}", "(Tensor token, str device) -> (Tensor, Tensor)", run, fake)


def _draw(target: Any) -> Operator:
    """The operator of a random target, with tokens."""
    arguments, results = _signature(target)

    def run(token: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        drawn = target(*args, **kwargs)
        returned = () if drawn is None else drawn if isinstance(drawn, tuple) else (drawn,)
        return *returned, token.clone()

    returned = ", ".join(filter(None, (results, "Tensor")))
    return _operator(f"draw_{_name(target)}", f"(Tensor token, {arguments}) -> ({returned})", run, run)


def _redraw(target: Any) -> Operator:
    """The operator of a random target that draws from a given state."""
    arguments, results = _signature(target)

    def run(state: Tensor, device: str, *args: Any, **kwargs: Any) -> Any:
        return replay(state, device, target, *args, **kwargs)

    def fake(state: Tensor, device: str, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    schema = f"(Tensor state, str device, {arguments}) -> ({results})"
    return _operator(f"redraw_{_name(target)}", schema, run, fake)


def _own_copy() -> Operator:
    """The operator of `own_copy`, which a compiler would drop for an equal layout."""
    schema = "(Tensor source, SymInt[] size, SymInt[] stride) -> Tensor"
    return _operator("own_copy", schema, own_copy, own_copy)


def _lstm_layer() -> Operator:
    target = torch.ops.aten.mkldnn_rnn_layer.default
    arguments, results = _signature(target)
    schema = f"({arguments}) -> ({results})"
    return _operator("recording_lstm_layer", schema, recording_lstm_layer, target)


def _signature(target: Any) -> tuple[str, str]:
    """The arguments and the results of an operator or function, as schema text.

    Results need not be tensors: CUDA's flash attention returns two lengths, a user's operator a list, say.

    Raises:
        NotImplementedError: the target is torch's wrapper of an operator that writes to its arguments.
    """
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NotImplementedError("a repeat of an operator that may draw and writes to its arguments")
    if hasattr(target, "overloadpacket"):
        text = schema_text(target)
    else:
        text = torch.library.infer_schema(target, mutates_args=())
    arguments, _, returned = text.partition(" -> ")
    return arguments.partition("(")[2].removesuffix(")"), returned.removeprefix("(").removesuffix(")")


def _name(target: Any) -> str:
    name = str(target) if hasattr(target, "overloadpacket") else target.__name__
    return name.replace(".", "_").replace("::", "_")


def _operator(name: str, schema: str, run: Operator, fake: Operator) -> Operator:
    """The operator ``remat::name``, registered at first use."""
    if not hasattr(torch.ops.remat, name):
        torch.library.define(f"remat::{name}", schema)
        torch.library.impl(f"remat::{name}", "default", run)
        torch.library.register_fake(f"remat::{name}", fake)
    operator: Operator = getattr(torch.ops.remat, name).default
    return operator
