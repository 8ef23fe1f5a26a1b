"""Kernels of a cross entropy by chunks: the calls of the original on some of the rows, or images, at a time.

All functions take first the logits and what the original reads, in the order of their signatures, then the
tensors that `names` lists, then the constants of `_Loss`.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

aten = torch.ops.aten

IGNORED = -100
WEIGHT, ROW_GRADIENT = "weight", "row_gradient"


@attrs.frozen(kw_only=True)
class _Loss:
    """What a cross entropy computes.

    Attributes:
        names: of the optional tensors: weights of the classes, and a number a row that is added to the
            gradient of every class.
        smoothed: whether the log-softmax is also summed over the classes.
        shape: of the log-softmax: rows and classes, or images, classes and their size.
        reduction: 0, 1 or 2 for none, mean, sum.
        ignored: the class that counts nothing.
        dtype: of the log-softmax.
        half_to_float: whether its kernel reads the logits in their dtype.
        rows: of a chunk, or images.
        tensors: the optional tensors by name.
    """

    names: tuple[str, ...]
    smoothed: bool
    shape: tuple[int, ...]
    reduction: int
    ignored: int
    dtype: torch.dtype
    half_to_float: bool
    rows: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, rest: tuple[Any, ...]) -> "_Loss":
        """From the arguments after those that every kernel has."""
        fields = [field.name for field in attrs.fields(cls)][:-1]
        given = dict(zip(fields, rest[-len(fields) :], strict=True))
        tensors = dict(zip(given["names"], rest[: -len(fields)], strict=True))
        return cls(**given, tensors=tensors)

    @property
    def weight(self) -> Tensor | None:
        """Of the classes."""
        return self.tensors.get(WEIGHT)

    def chunks(self, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The parts of a table of this shape."""
        for start in range(0, len(table), self.rows):
            place = slice(start, start + self.rows)
            yield place, table[place]

    def buffer(self, table: Tensor) -> Tensor:
        """One chunk in the dtype of the log-softmax."""
        return table.new_empty((min(self.rows, len(table)), *self.shape[1:]), dtype=self.dtype)

    def log_softmax(self, part: Tensor, buffer: Tensor) -> Tensor:
        """Of a chunk, in the buffer or, if its kernel changes the dtype, in a new tensor."""
        made: Tensor
        if self.half_to_float:
            made = aten._log_softmax.default(part, 1, True)
            return made
        made = buffer[: len(part)]
        source = part if part.dtype is self.dtype else made.copy_(part)
        aten._log_softmax.out(source, 1, False, out=made)
        return made


def chunked_loss(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """`nll_loss_forward` of the log-softmax of logits; with label smoothing, also its sum over the classes.

    Args:
        logits: contiguous; any shape whose numbers are those of `shape` one after the other.
        target: one class a row, or a point of an image.
        *rest: the weights of the classes, if any, and the constants.

    Raises:
        IndexError: a target is no class, on the CPU; kernels of a device stop the process's work on it.
    """
    loss = _Loss.of(rest)
    table = logits.view(loss.shape)
    counts = target != loss.ignored
    index = class_index(target, counts, loss.shape[1])
    picked = table.new_empty((len(target), 1, *loss.shape[2:]), dtype=loss.dtype)
    totals = picked[:, 0].clone() if loss.smoothed else picked
    buffer = None if loss.half_to_float else loss.buffer(table)
    for place, part in loss.chunks(table):
        made = loss.log_softmax(part, part if buffer is None else buffer)
        torch.gather(made, 1, index[place], out=picked[place])
        if loss.smoothed:
            weight = loss.weight
            if weight is not None:
                torch.mul(made, weight.view(1, -1, *[1] * (made.ndim - 2)), out=made)
            torch.sum(made, [1], out=totals[place])
        del made
    found = reduced_loss(picked, index, counts, loss.weight, loss.reduction)
    return (*found, totals) if loss.smoothed else found


def class_index(target: Tensor, counts: Tensor, classes: int) -> Tensor:
    """The classes of the targets that count, and 0 for the others, with a dimension for the classes.

    Raises:
        IndexError: a target is no class, on the CPU.
    """
    if target.device.type == "cpu":
        wrong = counts & ((target < 0) | (target >= classes))
        if wrong.any():
            raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
    return torch.where(counts, target, 0).unsqueeze(1)


def reduced_loss(
    picked: Tensor, index: Tensor, counts: Tensor, weight: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor]:
    """The loss and its total weight, by the original's kernel on one class.

    Args:
        picked: the log-probabilities of the targets, with a dimension for the class; may be written over.
        index: the targets, with this dimension.
        counts: which of them count.
        weight: of the classes.
        reduction: 0, 1 or 2 for none, mean, sum.
    """
    run = aten.nll_loss2d_forward.default if picked.ndim > 2 else aten.nll_loss_forward.default
    classes = torch.where(counts, 0, IGNORED)
    made: tuple[Tensor, Tensor]
    if weight is None:
        made = run(picked, classes, None, reduction, IGNORED)
        return made
    # The weights differ by row, so the products are made first; sums are those of the kernel, in its order.
    weights = weight[index]
    picked.mul_(weights)
    if not reduction:
        made = run(picked, classes, None, 0, IGNORED)
        return made
    summed, _ = run(picked, classes, None, 2, IGNORED)
    total, _ = run(weights.neg_(), classes, None, 2, IGNORED)
    return (summed / total if reduction == 1 else summed), total


def chunked_gradient(tangent: Tensor, logits: Tensor, target: Tensor, total: Tensor, *rest: Any) -> Tensor:
    """The logits' gradient of `chunked_loss`.

    Args:
        tangent: of the loss.
        logits: as for the loss.
        target: as for the loss.
        total: the second result of the loss.
        *rest: the optional tensors and the constants.
    """
    made = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return _write_gradient(made, tangent, logits, target, total, _Loss.of(rest))


def chunked_gradient_over(
    tangent: Tensor, logits: Tensor, target: Tensor, total: Tensor, *rest: Any
) -> Tensor:
    """`chunked_gradient`, written over the logits."""
    return _write_gradient(logits, tangent, logits, target, total, _Loss.of(rest))


def _write_gradient(
    made: Tensor, tangent: Tensor, logits: Tensor, target: Tensor, total: Tensor, loss: _Loss
) -> Tensor:
    table, written = logits.view(loss.shape), made.view(loss.shape)
    in_place = made.dtype is loss.dtype
    buffer = None if loss.half_to_float else loss.buffer(table)
    other = None if in_place else loss.buffer(table)
    for place, part in loss.chunks(table):
        outputs = loss.log_softmax(part, part if buffer is None else buffer)
        gradient = written[place] if other is None else other[: len(part)]
        loss_gradient(
            gradient,
            tangent if loss.reduction else tangent[place],
            outputs,
            target[place],
            loss.weight,
            loss.reduction,
            loss.ignored,
            total,
        )
        if ROW_GRADIENT in loss.tensors:
            _add_row_gradient(gradient, loss.tensors[ROW_GRADIENT][place], loss.weight)
        if loss.half_to_float:
            written[place].copy_(aten._log_softmax_backward_data.default(gradient, outputs, 1, part.dtype))
        else:
            aten._log_softmax_backward_data.out(gradient, outputs, 1, loss.dtype, out=gradient)
            if not in_place:
                written[place].copy_(gradient)
        del outputs
    return made


def loss_gradient(
    made: Tensor,
    tangent: Tensor,
    outputs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
) -> None:
    """Write the backward of the loss of a chunk into `made`."""
    image = outputs.ndim > 2
    run = aten.nll_loss2d_backward.grad_input if image else aten.nll_loss_backward.grad_input
    run(tangent, outputs, target, weight, reduction, ignored, total, grad_input=made)


def _add_row_gradient(gradient: Tensor, rows: Tensor, weight: Tensor | None) -> None:
    if weight is None:
        torch.add(rows.expand_as(gradient), gradient, out=gradient)
        return
    scaled = rows.expand_as(gradient) * weight.view(1, -1, *[1] * (gradient.ndim - 2))
    torch.add(scaled, gradient, out=gradient)
