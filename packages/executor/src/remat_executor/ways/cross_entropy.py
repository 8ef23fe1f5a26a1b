"""Find the cross entropies of a captured step: a log-softmax, the losses that read it, and their backward.

`nn.CrossEntropyLoss` and Hugging Face's losses on rows of logits, and on images, whose classes are dimension
1. The log-softmax may be read by the loss of the target's class and, with label smoothing, by a sum over
classes; both may be weighted by class.
"""

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item, meta_tensors
from remat_executor.torch_private.tensors import storage_id

aten = torch.ops.aten

_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_LOSS_BACKWARDS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


@attrs.frozen(kw_only=True, eq=False)
class Smoothing:
    """The calls of label smoothing: minus the sum over all classes, weighted or not.

    Attributes:
        total: the sum over classes, one number a row.
        product: the log-softmax times the weights, which is summed.
        row_gradient: one number a row, which is added to the gradient of every class.
        gradient_product: this number times the weights.
        add: the sum of both gradients of the log-softmax.
    """

    total: Node
    product: Node | None = None
    row_gradient: Node | None = None
    gradient_product: Node | None = None
    add: Node | None = None

    @property
    def before(self) -> tuple[Node, ...]:
        """Its calls in the forward."""
        return tuple(call for call in (self.product, self.total) if call is not None)

    @property
    def after(self) -> tuple[Node, ...]:
        """Its calls of the logits' size in the backward."""
        return tuple(call for call in (self.gradient_product, self.add) if call is not None)


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """The calls of one cross entropy.

    Attributes:
        logits: what it reads, in the dtype in which they exist.
        up: changes the dtype of the logits.
        log_softmax: of the logits.
        loss: the loss of the targets' classes.
        smoothing: the loss of all classes.
        loss_backward: None, as the two below, if the logits need no gradient.
        backward: of the log-softmax.
        down: changes the dtype of the gradient.
    """

    logits: Node
    up: Node | None
    log_softmax: Node
    loss: Node
    smoothing: Smoothing | None = None
    loss_backward: Node | None = None
    backward: Node | None = None
    down: Node | None = None

    @property
    def last(self) -> Node | None:
        """The call that makes the logits' gradient."""
        return self.down or self.backward

    @property
    def weight(self) -> Node | None:
        """The weights of the classes."""
        found: Node | None = args_of(self.loss)[2]
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the log-softmax: rows and classes, or images, classes and their size."""
        made: Tensor = self.log_softmax.meta["val"]
        return (
            tuple(made.shape)
            if _is_image(self.loss)
            else (made.numel() // max(1, made.shape[-1]), made.shape[-1])
        )

    @property
    def before(self) -> tuple[Node, ...]:
        """The calls up to the log-softmax."""
        return tuple(call for call in (self.up, self.log_softmax) if call is not None)

    @property
    def forward(self) -> tuple[Node, ...]:
        """All calls of the forward."""
        return (*self.before, self.loss, *(self.smoothing.before if self.smoothing else ()))

    @property
    def after(self) -> tuple[Node, ...]:
        """The calls of the backward."""
        middle = self.smoothing.after if self.smoothing else ()
        calls = (self.loss_backward, *middle, self.backward, self.down)
        return tuple(call for call in calls if call is not None)


class Readers:
    """The calls that read a node's storage, and what the graph returns."""

    def __init__(self, captured: Captured) -> None:
        output = captured.graph_module.graph.output_node()
        self.returned = {
            storage_id(t) for n in output.all_input_nodes for t in meta_tensors(n.meta.get("val"))
        }

    def of(self, node: Node) -> list[Node] | None:
        """The calls that read the storage of a node, through views; None if the graph returns it."""
        storage = storage_id(node.meta["val"])
        if storage in self.returned:
            return None
        found: dict[Node, None] = {}
        names = [node]
        for name in names:  # grows meanwhile
            for user in name.users:
                made = meta_tensors(user.meta.get("val"))
                if not is_item(user) and any(storage_id(tensor) == storage for tensor in made):
                    names.append(user)
                else:
                    found[user] = None
        return list(found)

    def only(self, node: Node, *targets: object) -> Node | None:
        """The only reader of a node's storage, if it calls one of `targets`."""
        readers = self.of(node)
        return (
            readers[0] if readers is not None and len(readers) == 1 and readers[0].target in targets else None
        )


def find_heads(captured: Captured, readers: Readers) -> Iterator[Head]:
    """All cross entropies whose log-softmax nothing else reads."""
    for node in captured.graph_module.graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        head = _find(node, readers)
        if head is not None:
            yield head


def _find(node: Node, readers: Readers) -> Head | None:
    made: Tensor = node.meta["val"]
    x, dim, _ = args_of(node)
    found = readers.of(node) or []
    calls = {reader.target: reader for reader in found}
    loss = next((calls.pop(target) for target in _LOSSES if target in calls), None)
    loss_backward = next((calls.pop(target) for target in _LOSS_BACKWARDS if target in calls), None)
    backward = calls.pop(aten._log_softmax_backward_data.default, None)
    if loss is None or (loss_backward is None) != (backward is None) or len(found) > 4:
        return None
    wanted = 1 if _is_image(loss) else made.ndim - 1
    if dim % made.ndim != wanted or (_is_image(loss) and made.ndim != 4):
        return None
    read = [x, args_of(loss)[0]]
    if loss_backward is not None and backward is not None:
        read += [args_of(loss_backward)[1], args_of(backward)[1]]
    if not all(_is_whole(each, made) for each in read):
        return None
    smoothing = None
    if calls:
        smoothing = _smoothing(node, loss, loss_backward, list(calls.values()), readers)
        if smoothing is None:
            return None
    if loss_backward is not None:
        source = smoothing.add if smoothing is not None and smoothing.add is not None else loss_backward
        if readers.only(source, aten._log_softmax_backward_data.default) is not backward:
            return None
    logits, up = _with_upcast(node, readers)
    down = None if backward is None else _downcast(backward, logits, readers)
    if backward is not None and down is None:  # the gradient is made as the log-softmax is
        logits, up = x, None
    return Head(
        logits=logits,
        up=up,
        log_softmax=node,
        loss=loss,
        smoothing=smoothing,
        loss_backward=loss_backward,
        backward=backward,
        down=down,
    )


def _is_image(loss: Node) -> bool:
    return loss.target is aten.nll_loss2d_forward.default


def _is_whole(node: object, like: Tensor) -> bool:
    """Whether a node shows all of `like` in rows, or the same numbers in another dtype."""
    value = node.meta["val"] if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or not value.is_contiguous() or value.numel() != like.numel():
        return False
    return value.shape == like.shape or value.shape[-1:] == like.shape[-1:]


def _smoothing(
    node: Node, loss: Node, loss_backward: Node | None, others: list[Node], readers: Readers
) -> Smoothing | None:
    """The calls of label smoothing, if the others that read a log-softmax are of it."""
    total = others[0]
    product = None
    weight = args_of(loss)[2]
    if len(others) != 1 or not (_is_image(loss) or node.meta["val"].ndim == 2):
        return None
    if weight is not None:
        product = total
        if product.target is not aten.mul.Tensor or not _is_scaled(product, node, weight):
            return None
        summed = readers.only(product, aten.sum.dim_IntList)
        if summed is None:
            return None
        total = summed
    if total.target is not aten.sum.dim_IntList or args_of(total)[1:] != ([1],) or total.kwargs:
        return None
    if args_of(total)[0] is not (product or node):
        return None
    if loss_backward is None:
        return Smoothing(total=total, product=product)
    add = readers.only(loss_backward, aten.add.Tensor)
    if add is None or add.kwargs or args_of(add)[1] is not loss_backward:
        return None
    expanded = args_of(add)[0]
    gradient_product = None
    if weight is not None and isinstance(expanded, Node) and expanded.target is aten.mul.Tensor:
        gradient_product = expanded
        expanded = args_of(gradient_product)[0]
        if not _is_scaled(gradient_product, expanded, weight) or readers.of(gradient_product) != [add]:
            return None
    if (gradient_product is None) != (weight is None) or expanded.target is not aten.expand.default:
        return None
    row_gradient = args_of(expanded)[0]
    made: Tensor = node.meta["val"]
    if row_gradient.meta["val"].shape != (made.shape[0], 1, *made.shape[2:]):
        return None
    return Smoothing(
        total=total, product=product, row_gradient=row_gradient, gradient_product=gradient_product, add=add
    )


def _is_scaled(product: Node, scaled: object, weight: Node) -> bool:
    """Whether a call multiplies a node with the weights, one a class."""
    first, second = args_of(product)[:2]
    if first is not scaled or not isinstance(second, Node) or product.kwargs:
        return False
    given: Tensor = second.meta["val"]
    same = storage_id(given) == storage_id(weight.meta["val"])
    return same and given.shape[1:2] == weight.meta["val"].shape and given.numel() == given.shape[1]


def _with_upcast(log_softmax: Node, readers: Readers) -> tuple[Node, Node | None]:
    """The logits in the dtype in which they must exist, and the call that changes it."""
    x: Node = args_of(log_softmax)[0]
    up = maker_of(x, aten._to_copy.default)
    if up is not None and _is_cast(up) and readers.only(up, aten._log_softmax.default) is log_softmax:
        source: Node = args_of(up)[0]
        return source, up
    return x, None


def _downcast(backward: Node, logits: Node, readers: Readers) -> Node | None:
    down = readers.only(backward, aten._to_copy.default)
    if down is None or not _is_cast(down):
        return None
    made, wanted = down.meta["val"], logits.meta["val"]
    return down if (made.dtype, made.shape) == (wanted.dtype, wanted.shape) else None


def maker_of(node: Node, *targets: object) -> Node | None:
    """The call of one of `targets` that made the storage of a node, if the node shows all of it."""
    shown: Tensor = node.meta["val"]
    storage = storage_id(shown)
    while node.target not in targets:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
            return None
        if storage_id(source.meta["val"]) != storage:
            return None
        node = source
    return node if node.meta["val"].numel() == shown.numel() else None


def _is_cast(node: Node) -> bool:
    """Whether a copy changes nothing but the dtype of a contiguous tensor."""
    source = args_of(node)[0].meta["val"]
    made = node.meta["val"]
    same: bool = source.device == made.device and source.shape == made.shape
    return same and source.is_contiguous() and made.is_contiguous()
