"""The repeat of an activation behind a batch norm, from the norm's input and saved statistics. It rounds.

A plan that drops an activation and the norm's result repeats both: the norm reads its input twice, for the
statistics and for the result, which the activation reads. The statistics are kept for the backward, so the
repeat needs neither the first pass nor the result: a chunk of the input at a time is normalized as in
evaluation, the other summand of a residual block is added, and the activation runs over the chunk in place.
On the CPU a chunk stays in the cache, so memory is passed once. Elsewhere each call passes it.

The saved statistic is the inverse of a root; its square is inverted once more, which rounds. Statistics in 16
bits, as in models whose norms are, would lose more and are left alone.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.cudnn_batch_norms import cudnn_batch_norm
from remat_executor.fx_nodes import args_of, is_item, source_of
from remat_executor.ways.substitution import Change, Substitution

aten = torch.ops.aten

CHUNK_NBYTES = 1 << 19  # of the result: with its input it fits the cache of a core
_TRAINING = {  # the place of the argument
    aten._native_batch_norm_legit_functional.default: 5,
    aten._native_batch_norm_legit.no_stats: 3,
    cudnn_batch_norm: 5,
}
_IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.silu.default: aten.silu_.default,
    aten.hardswish.default: aten.hardswish_.default,
}
_BY_NAME = {str(target): in_place for target, in_place in _IN_PLACE.items()}


def norm_activations(captured: Captured) -> Iterator[Substitution]:
    """A way for each activation behind a batch norm in training mode, or behind a sum with its result."""
    for node in captured.graph_module.graph.nodes:
        found = _find(node) if node.target in _IN_PLACE else None
        if found is not None:
            yield _way(found)


@attrs.frozen(kw_only=True, eq=False)
class _Activation:
    """An activation, the norm before it, and the sum in between."""

    node: Node
    norm: Node
    statistics: tuple[Node, Node]
    add: Node | None
    other: Node | None


def _find(node: Node) -> _Activation | None:
    source, *options = args_of(node)
    if node.kwargs or not all(isinstance(option, int | float) for option in options):
        return None
    norm, add, other = _norm_of(source), None, None
    if norm is None and source.target is aten.add.Tensor and not source.kwargs:
        add = source
        one, two = args_of(add)[:2]
        norm, other = _norm_of(one), two
        if norm is None:
            norm, other = _norm_of(two), one
        if not isinstance(other, Node) or not _alike(other, node):
            return None
    if norm is None or not _alike(args_of(norm)[0], node) or None in args_of(norm)[:3]:
        return None
    items = {args_of(user)[1]: user for user in norm.users if is_item(user)}
    # Fake tensors may have the input's dtype for statistics; they have that of the weight.
    if 1 not in items or 2 not in items or args_of(norm)[1].meta["val"].dtype.itemsize < 4:
        return None
    return _Activation(node=node, norm=norm, statistics=(items[1], items[2]), add=add, other=other)


def _norm_of(node: object) -> Node | None:
    """The batch norm whose result a node is."""
    if not isinstance(node, Node) or not is_item(node) or args_of(node)[1] != 0:
        return None
    norm = source_of(node)
    place = _TRAINING.get(norm.target)
    return norm if place is not None and args_of(norm)[place] is True else None


def _alike(one: Node, other: Node) -> bool:
    """Whether two tensors have the same layout, which is dense, with the channels first or last."""
    first, second = one.meta["val"], other.meta["val"]
    same: bool = (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
    dense = first.is_contiguous() or (
        first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last)
    )
    return same and dense and first.is_floating_point()


def _way(found: _Activation) -> Substitution:
    x, weight, bias = args_of(found.norm)[:3]
    others = () if found.other is None else (found.other,)
    on_cpu = found.node.meta["val"].device.type == "cpu"
    # Away from the CPU's cache, each of the calls reads and writes a tensor of this size.
    counts_as = None if on_cpu else (found.node, *(() if found.add is None else (found.add,)), found.node)
    change = Change(
        node=found.node,
        on_repeat=True,
        kernel=normalized_activation,
        reads=(x, weight, bias, *found.statistics, *others),
        constants=(str(found.node.target), *args_of(found.node)[1:]),
        counts_as=counts_as,
        workspace_nbytes=2 * weight.meta["val"].numel() * found.statistics[0].meta["val"].element_size() + 64,
    )
    return Substitution(family="norm_activations", changes=(change,), exact=False)


def normalized_activation(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, *rest: Any
) -> Tensor:
    """An activation of a normalized tensor, and of its sum with another one.

    Args:
        x: the norm's input; the channels are dimension 1.
        weight: one number a channel.
        bias: one number a channel.
        mean: of the batch, one number a channel.
        inverse: of the root of the variance and epsilon, one number a channel.
        *rest: the other summand, if there is one; the name of the activation's operator, and its options.
    """
    others = [each for each in rest if isinstance(each, Tensor)]
    name, *options = rest[len(others) :]
    activate = _BY_NAME[name]
    variance = inverse.square().reciprocal_()
    made = torch.empty_like(x)
    unused = mean.new_empty(0), mean.new_empty(0)
    for channels, place in _chunks(x):
        part = made[place]
        given = [each[channels] for each in (weight, bias, mean, variance)]
        aten.native_batch_norm.out(
            x[place], *given, False, 0.0, 0.0, out=part, save_mean=unused[0], save_invstd=unused[1]
        )
        for other in others:
            part.add_(other[place])
        activate(part, *options)
    return made


def _chunks(x: Tensor) -> Iterator[tuple[slice, tuple[slice, ...]]]:
    """The channels and the place of parts of at most a chunk, or of one channel of one image."""
    if x.device.type != "cpu":
        yield slice(None), (slice(None),)
        return
    size = max(1, x[:1].numel() * x.element_size())  # of an image
    images = max(1, CHUNK_NBYTES // size)
    channels = x.shape[1]
    if size > CHUNK_NBYTES and x.is_contiguous():
        channels = max(1, CHUNK_NBYTES * channels // size)
    for start in range(0, len(x), images):
        for first in range(0, x.shape[1], channels):
            part = slice(first, first + channels)
            yield part, (slice(start, start + images), part)
