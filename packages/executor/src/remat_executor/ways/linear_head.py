"""A linear layer inside the chunks of its cross entropy: no logits exist but those of a chunk. It rounds.

The forward makes a chunk's logits, its loss and, while the logits are there, its part of the gradients: those
of the hidden rows, and a sum over chunks for the weight and the bias, in 32 bits. All gradients of a loss
that is a sum or a mean are proportional to its tangent, so the backward only multiplies them. The products
are as many as in the original, and nothing of the logits' size is kept until the backward: what is kept has
the size of the layer's gradients.

The idea is known from Liger (Hsu et al. 2024) and cut cross entropy (Wijmans et al. 2025). Float16 is left
alone: gradients that no loss scale has multiplied yet fall below its range. A loss without a reduction has a
tangent for each row, and logits that something else reads must exist: both are left alone too.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.torch_private.tensors import storage_id
from remat_executor.ways.chunked_loss import class_index, loss_gradient, reduced_loss
from remat_executor.ways.cross_entropy import Head, Readers, find_heads, maker_of
from remat_executor.ways.loss_head import ALIGNED_ROWS, LEAST_NBYTES, chunk_rows
from remat_executor.ways.substitution import Change, Substitution, new_tensor

aten = torch.ops.aten

CHUNKS = 8  # of rows, at most: each reads the weight, and reads and writes the sum of its gradient
BLOCK_NBYTES = 1 << 20  # of log-softmax at a time, on the CPU
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def linear_head(captured: Captured, least_nbytes: int = LEAST_NBYTES) -> Iterator[Substitution]:
    """A way for each cross entropy of a linear layer whose logits nothing else reads.

    Args:
        captured: the step.
        least_nbytes: bytes of log-softmax in a chunk; a loss of one chunk is left alone.
    """
    readers = Readers(captured)
    for head in find_heads(captured, readers):
        rows = _rows(head, least_nbytes)
        layer = _layer(head, readers) if len(head.shape) == 2 and rows < head.shape[0] else None
        if layer is not None:
            yield _way(head, layer, rows)


def _rows(head: Head, least_nbytes: int) -> int:
    """Rows of a chunk: enough that adding the weight's gradient costs little compared with the logits."""
    rows = chunk_rows(head, CHUNKS, least_nbytes)
    call = maker_of(head.logits, aten.mm.default, aten.addmm.default)
    width = 0 if call is None else args_of(call)[-1].meta["val"].shape[0]
    return max(rows, -(-min(width, head.shape[0] // 2) // ALIGNED_ROWS) * ALIGNED_ROWS)


@attrs.frozen(kw_only=True, eq=False)
class _Layer:
    """The calls of a linear layer.

    Attributes:
        call: makes the logits.
        bias: None if the layer has none.
        hidden: its input, a row for each row of logits.
        weight: one column for each class.
        of_hidden: the gradient of the hidden rows; None, as those below, if it is not wanted.
        of_weight: the gradient of the weight, or of its transpose.
        of_bias: the gradient of the bias, summed over rows.
    """

    call: Node
    bias: Node | None
    hidden: Node
    weight: Node
    of_hidden: Node | None = None
    of_weight: Node | None = None
    of_bias: Node | None = None

    @property
    def gradients(self) -> tuple[Node, ...]:
        """The calls that make gradients."""
        return tuple(call for call in (self.of_hidden, self.of_weight, self.of_bias) if call is not None)


def _layer(head: Head, readers: Readers) -> _Layer | None:
    """The linear layer of a head, if the way applies to it."""
    reduction = args_of(head.loss)[3]
    call = maker_of(head.logits, aten.mm.default, aten.addmm.default)
    items = {args_of(user)[1] for user in head.loss.users if is_item(user)}
    if call is None or head.last is None or head.smoothing is not None or not reduction or items != {0, 1}:
        return None
    first = head.up or head.log_softmax
    if readers.only(call, first.target) is not first or call.kwargs:
        return None
    *bias, hidden, weight = args_of(call)
    made: Tensor = call.meta["val"]
    biased = bias and bias[0].meta["val"].shape != made.shape[1:]
    if made.dtype not in DTYPES or made.shape != head.shape or biased:
        return None
    found = _Layer(call=call, bias=bias[0] if bias else None, hidden=hidden, weight=weight)
    for reader in readers.of(head.last) or []:
        name = _role(reader, head.last, found)
        if name is None or getattr(found, name) is not None:
            return None
        found = attrs.evolve(found, **{name: reader})
    return found if found.gradients else None


def _role(reader: Node, last: Node, layer: _Layer) -> str | None:
    """Which gradient of the layer a call makes from the logits' gradient."""
    args = args_of(reader)
    if reader.kwargs:
        return None
    if reader.target is aten.sum.dim_IntList:
        whole = layer.bias is not None and _shows(args[0], last)
        return "of_bias" if whole and args[1:] == ([0], True) else None
    if reader.target is not aten.mm.default:
        return None
    one, other = args
    hidden, weight = layer.hidden, layer.weight
    if _shows(one, last) and _shows(other, weight, transposed=True):
        return "of_hidden"
    if _shows(one, last, transposed=True) and _shows(other, hidden):
        return "of_weight"
    if _shows(other, last) and _shows(one, hidden, transposed=True):
        return "of_weight"
    return None


def _shows(node: Node, source: Node, *, transposed: bool = False) -> bool:
    """Whether a matrix has the numbers of another one's storage, in rows or transposed."""
    one, other = node.meta["val"], source.meta["val"]
    if storage_id(one) != storage_id(other) or one.ndim != 2 or one.numel() != other.numel():
        return False
    other = other if other.ndim == 2 else other.reshape(-1, other.shape[-1])
    other = other.t() if transposed else other
    same: bool = one.shape == other.shape and one.stride() == other.stride()
    return same and one.storage_offset() == other.storage_offset()


def _way(head: Head, layer: _Layer, rows: int) -> Substitution:
    _, target, class_weight, reduction, ignored = args_of(head.loss)
    logits: Tensor = layer.call.meta["val"]
    wide = _wide(logits.dtype)
    sums = {
        call: new_tensor(
            f"{call.name}_unscaled",
            call.meta["val"].new_empty(
                call.meta["val"].shape, dtype=None if call is layer.of_hidden else wide
            ),
        )
        for call in layer.gradients
    }
    given = {"bias": layer.bias, "class_weight": class_weight}
    tensors = {name: node for name, node in given.items() if node is not None}
    wanted = tuple(name for name in ("of_hidden", "of_weight", "of_bias") if getattr(layer, name) is not None)
    items = {args_of(user)[1]: user for user in head.loss.users if is_item(user)}
    loss = Change(
        node=head.loss,
        kernel=linear_loss,
        reads=(layer.hidden, layer.weight, target, *tensors.values()),
        constants=(
            tuple(tensors),
            wanted,
            layer.of_weight is not None
            and _shows(args_of(layer.of_weight)[0], layer.hidden, transposed=True),
            reduction,
            ignored,
            rows,
            items[0].meta["val"].dtype,
        ),
        makes=(items[0], items[1], *sums.values()),
        counts_as=(layer.call, *head.forward, *head.after, *layer.gradients),
        more_nbytes=_more_nbytes(layer, -(-logits.shape[0] // rows)),
        workspace_nbytes=_workspace_nbytes(layer, rows),
    )
    tangent = args_of(head.loss_backward)[0] if head.loss_backward is not None else None
    assert tangent is not None, head.loss
    scaled = [
        Change(
            node=call,
            kernel=scaled_gradient,
            over_kernel=scaled_gradient_over,
            over=made if made.meta["val"].dtype == call.meta["val"].dtype else None,
            reads=(made, tangent),
            constants=(call.meta["val"].dtype,),
        )
        for call, made in sums.items()
    ]
    kept = (head.loss, *sums)
    gone = [call for call in (layer.call, *head.forward, *head.after) if call not in kept]
    changes = (loss, *scaled, *(Change(node=call) for call in gone))
    return Substitution(family="linear_head", changes=changes, exact=False)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-softmax and of sums."""
    return torch.float32 if dtype is torch.bfloat16 else dtype


def _more_nbytes(layer: _Layer, chunks: int) -> int:
    """Bytes that chunks read and write again: the weight, for both products, and the sum of its gradient."""
    weight = layer.weight.meta["val"]
    size = weight.element_size()
    again = (chunks - 1) * size * (1 + (layer.of_hidden is not None))
    if layer.of_weight is not None:
        # A product in 16 bits is written, read, and added to the sum; one in more bits adds to it itself.
        product = 2 * size if size == 2 else 0
        again += chunks * (product + 2 * _wide(weight.dtype).itemsize)
    nbytes: int = again * weight.numel()
    return nbytes


def _block(rows: int, weight: Tensor) -> int:
    """Rows whose log-softmax is made at a time."""
    if weight.device.type != "cpu":
        return rows
    return min(rows, max(ALIGNED_ROWS, BLOCK_NBYTES // (weight.shape[1] * _wide(weight.dtype).itemsize)))


def _workspace_nbytes(layer: _Layer, rows: int) -> int:
    """A chunk's logits, log-softmax and, in 16 bits, gradient; a product of the weight's size."""
    logits, weight = layer.call.meta["val"], layer.weight.meta["val"]
    size, wide = logits.element_size(), _wide(logits.dtype).itemsize
    block = min(_block(rows, weight), rows)
    held: int = logits.shape[1] * (rows * size + block * wide * (2 if size == 2 else 1))
    if layer.of_weight is not None and size == 2:
        # The library copies an operand into its layout; a part of the product is copied to be summed.
        held += weight.numel() * (2 * size + wide // CHUNKS + 1)
    return held + len(logits) * (2 * 8 + 2 + 4 * wide)


def linear_loss(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The loss of a linear layer, its total weight, and the gradients of the layer for a tangent of 1.

    Args:
        hidden: rows.
        weight: a column a class.
        target: one class a row.
        *rest: the tensors that `names` lists, then: names, the gradients that are wanted, whether that of the
            weight has its shape or the transposed one, the reduction (1 for mean, 2 for sum), the ignored
            class, the rows of a chunk, and the loss's dtype.

    Raises:
        IndexError: a target is no class, on the CPU.
    """
    *tensors, names, wanted, as_weight, reduction, ignored, rows, dtype = rest
    given = dict(zip(names, tensors, strict=True))
    layer = _Chunks(hidden, weight, given.get("bias"), wanted, as_weight=as_weight)
    counts = target != ignored
    index = class_index(target, counts, weight.shape[1])
    class_weight = given.get("class_weight")
    if class_weight is not None:
        class_weight = class_weight.to(layer.wide)
    picked = hidden.new_zeros((len(hidden), 1), dtype=layer.wide)
    _, total = reduced_loss(picked, index, counts, class_weight, reduction)
    one = picked.new_ones(())
    for start in range(0, len(hidden), rows):
        place = slice(start, start + rows)
        chunk = layer.logits(place, rows)
        for first in range(0, len(chunk), layer.block(rows)):
            logits = chunk[first : first + layer.block(rows)]
            part = slice(start + first, start + first + len(logits))
            outputs, gradient = layer.buffers(logits, rows)
            aten._log_softmax.out(_as(logits, outputs), 1, False, out=outputs)
            torch.gather(outputs, 1, index[part], out=picked[part])
            loss_gradient(gradient, one, outputs, target[part], class_weight, reduction, ignored, total)
            aten._log_softmax_backward_data.out(gradient, outputs, 1, layer.wide, out=gradient)
            layer.add_bias(gradient)
            if gradient.dtype is not logits.dtype:
                logits.copy_(gradient)
        layer.add_gradients(place, chunk)
    loss, total = reduced_loss(picked, index, counts, class_weight, reduction)
    return (loss.to(dtype), total.to(dtype), *layer.made.values())


def _as(source: Tensor, made: Tensor) -> Tensor:
    """A chunk in the dtype of the log-softmax: itself, or copied to where that is written."""
    return source if source.dtype is made.dtype else made.copy_(source)


class _Chunks:
    """The layer's products, chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[str, ...],
        *,
        as_weight: bool,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.wide, self.as_weight = _wide(hidden.dtype), as_weight
        self.made: dict[str, Tensor] = {}
        self.held: Tensor | None = None
        self.outputs: Tensor | None = None
        classes = weight.shape[1]
        if "of_hidden" in wanted:
            self.made["of_hidden"] = hidden.new_empty(hidden.shape)
        if "of_weight" in wanted:
            shape = weight.shape if as_weight else weight.t().shape
            self.made["of_weight"] = hidden.new_zeros(shape, dtype=self.wide)
        if "of_bias" in wanted:
            self.made["of_bias"] = hidden.new_zeros((1, classes), dtype=self.wide)

    def block(self, rows: int) -> int:
        """Rows whose log-softmax is made at a time: on the CPU it stays in the cache."""
        return _block(rows, self.weight)

    def buffers(self, logits: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """For the log-softmax of a block and its gradient, which takes the logits' place if it can."""
        same = logits.dtype is self.wide
        shape = (1 if same else 2, min(self.block(rows), len(self.hidden)), logits.shape[1])
        if self.outputs is None:
            self.outputs = logits.new_empty(shape, dtype=self.wide)
        held = self.outputs[:, : len(logits)]
        return held[0], logits if same else held[1]

    def logits(self, place: slice, rows: int) -> Tensor:
        """The product of a chunk."""
        hidden = self.hidden[place]
        if self.held is None:
            self.held = hidden.new_empty((min(rows, len(self.hidden)), self.weight.shape[1]))
        logits = self.held[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight, out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight, out=logits)
        return logits

    def add_bias(self, gradient: Tensor) -> None:
        """The bias's gradient from that of a block's logits."""
        if "of_bias" in self.made:
            self.made["of_bias"].add_(gradient.sum(0, True))

    def add_gradients(self, place: slice, gradient: Tensor) -> None:
        """The other gradients of the layer from that of a chunk's logits."""
        if "of_hidden" in self.made:
            torch.mm(gradient, self.weight.t(), out=self.made["of_hidden"][place])
        if "of_weight" in self.made:
            rows = self.hidden[place]
            one, other = (rows.t(), gradient) if self.as_weight else (gradient.t(), rows)
            self.add_product(self.made["of_weight"], one, other)

    def add_product(self, total: Tensor, one: Tensor, other: Tensor) -> None:
        """Add a product to a sum, in the sum's dtype where the device multiplies so."""
        if one.dtype is total.dtype:
            total.addmm_(one, other)
        elif total.device.type == "cuda":
            aten.addmm.dtype_out(total, one, other, total.dtype, out=total)
        else:
            # A sum of two dtypes copies the other operand.
            for part, summand in zip(total.chunk(CHUNKS), torch.mm(one, other).chunk(CHUNKS), strict=True):
                part.add_(summand)


def scaled_gradient(gradient: Tensor, tangent: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times the tangent of a loss, in another dtype.

    Args:
        gradient: for a tangent of 1.
        tangent: one number.
        dtype: of the result.
    """
    made = torch.empty_like(gradient, dtype=dtype)
    for part, written in zip(gradient.chunk(CHUNKS), made.chunk(CHUNKS), strict=True):
        written.copy_(part * _factor(tangent))
    return made


def scaled_gradient_over(gradient: Tensor, tangent: Tensor, dtype: torch.dtype) -> Tensor:
    """`scaled_gradient`, written over the gradient, whose dtype it has."""
    return torch.mul(gradient, _factor(tangent), out=gradient)


def _factor(tangent: Tensor) -> Tensor:
    # Devices round a number without dimensions to the dtype of the other operand first; the CPU does not.
    return tangent if tangent.device.type == "cpu" else tangent.view(1)
