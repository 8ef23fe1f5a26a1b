"""Cross entropy by chunks of rows: nothing of the logits' size is made but their gradient, written over them.

As captured, a language model's loss makes three 32-bit tensors of the logits' size: the logits' copy, their
log-softmax, which is kept for the backward, and its gradient. Each row is independent until the mean, so the
forward can pick the targets' log-probabilities chunk by chunk, and the backward can make the log-softmax of a
chunk again. These are the kernels of the original on fewer rows, and they give the same bits.

The way: the copy, the log-softmax and all of its backward but the last call are left out; `nll_loss_forward`
and that last call run by chunks. It holds two chunks, and computes the log-softmax twice.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item, meta_tensors
from remat_executor.torch_private.tensors import storage_id
from remat_executor.ways.substitution import Change, Substitution

aten = torch.ops.aten

CHUNKS = 16  # of rows, at most
LEAST_NBYTES = 1 << 20  # of a chunk of the log-softmax: below it, launching kernels takes longer than they do
ALIGNED_ROWS = 16  # of a chunk, so that each begins where a row of the whole would be aligned alike
IGNORED = -100


def loss_head(captured: Captured, least_nbytes: int = LEAST_NBYTES) -> Iterator[Substitution]:
    """A way for each cross entropy whose log-softmax nothing else reads.

    Args:
        captured: the step.
        least_nbytes: bytes of log-softmax in a chunk; a loss of one chunk is left alone.
    """
    readers = _Readers(captured)
    for node in captured.graph_module.graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        head = _find(node, readers)
        if head is None:
            continue
        rows = _rows(head, least_nbytes)
        if rows < len(node.meta["val"]):
            yield _way(head, rows)


@attrs.frozen(kw_only=True, eq=False)
class _Head:
    """The calls of one cross entropy; `up` and `down` change the dtype of logits and of their gradient."""

    logits: Node
    up: Node | None
    log_softmax: Node
    loss: Node
    loss_backward: Node
    backward: Node
    down: Node | None

    @property
    def last(self) -> Node:
        """The call that makes the logits' gradient."""
        return self.down or self.backward


class _Readers:
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

    def only(self, node: Node, target: object) -> Node | None:
        """The only reader of a node's storage, if it calls `target`."""
        readers = self.of(node)
        return readers[0] if readers is not None and [r.target for r in readers] == [target] else None


def _find(node: Node, readers: _Readers) -> _Head | None:
    """The cross entropy of a log-softmax."""
    made: Tensor = node.meta["val"]
    x, dim, _ = args_of(node)
    found = readers.of(node) or []
    targets = (
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten._log_softmax_backward_data.default,
    )
    calls = {reader.target: reader for reader in found}
    if made.ndim != 2 or dim not in (1, -1) or len(found) != 3 or set(calls) != set(targets):
        return None
    loss, loss_backward, backward = (calls[target] for target in targets)
    read = [args_of(loss)[0], args_of(loss_backward)[1], args_of(backward)[1]]
    if not all(_is_whole(each, made) for each in read) or not _is_whole(x, made):
        return None
    if args_of(loss)[2] is not None or args_of(loss_backward)[3] is not None:
        return None  # weights of classes
    if readers.only(loss_backward, aten._log_softmax_backward_data.default) is not backward:
        return None
    up = _maker(x)
    logits = x
    if up is not None and _is_cast(up) and readers.only(up, aten._log_softmax.default) is node:
        logits = args_of(up)[0]
    else:
        up = None
    down = readers.only(backward, aten._to_copy.default)
    if down is not None and not (_is_cast(down) and down.meta["val"].dtype == logits.meta["val"].dtype):
        down = None
    return _Head(
        logits=logits,
        up=up,
        log_softmax=node,
        loss=loss,
        loss_backward=loss_backward,
        backward=backward,
        down=down,
    )


def _is_whole(node: object, like: Tensor) -> bool:
    """Whether a node shows all of `like` in rows, or the same numbers in another dtype."""
    value = node.meta["val"] if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.shape == like.shape and value.is_contiguous()


def _maker(node: Node) -> Node | None:
    """The call of `_to_copy` that made the storage of a node, if the node shows all of it."""
    storage = storage_id(node.meta["val"])
    while node.target is not aten._to_copy.default:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
            return None
        if storage_id(source.meta["val"]) != storage:
            return None
        node = source
    return node


def _is_cast(node: Node) -> bool:
    """Whether a copy changes nothing but the dtype of a contiguous tensor."""
    source = args_of(node)[0].meta["val"]
    made = node.meta["val"]
    same: bool = source.device == made.device and source.shape == made.shape
    return same and source.is_contiguous() and made.is_contiguous()


def _rows(head: _Head, least_nbytes: int) -> int:
    """Rows of a chunk."""
    made: Tensor = head.log_softmax.meta["val"]
    rows, columns = made.shape
    nbytes = max(1, columns * made.element_size())
    wanted = max(-(-rows // CHUNKS), -(-least_nbytes // nbytes), 1)
    return -(-wanted // ALIGNED_ROWS) * ALIGNED_ROWS


def _way(head: _Head, rows: int) -> Substitution:
    made: Tensor = head.log_softmax.meta["val"]
    half_to_float = bool(args_of(head.log_softmax)[2])
    _, target, _, reduction, ignored = args_of(head.loss)
    tangent, _, again, _, _, _, total = args_of(head.loss_backward)
    constants = (reduction, ignored, made.dtype, half_to_float, made.shape[1], rows)
    chunk_nbytes = rows * made.shape[1] * made.element_size()
    before = [call for call in (head.up, head.log_softmax) if call is not None]
    after = [call for call in (head.loss_backward, head.backward, head.down) if call is not None]
    gone = [call for call in (*before, *after) if call is not head.last]
    return Substitution(
        family="loss_head",
        changes=(
            Change(
                node=head.loss,
                kernel=chunked_loss,
                reads=(head.logits, target),
                constants=constants,
                counts_as=(*before, head.loss),
                workspace_nbytes=chunk_nbytes + len(made) * (made.element_size() + 2 * 8),
            ),
            Change(
                node=head.last,
                kernel=chunked_gradient,
                over_kernel=chunked_gradient_over,
                over=head.logits,
                reads=(tangent, head.logits, again, total),
                constants=constants,
                counts_as=(*before, *after),
                workspace_nbytes=2 * chunk_nbytes,
            ),
            *(Change(node=call) for call in gone),
        ),
    )


def chunked_loss(
    logits: Tensor,
    target: Tensor,
    reduction: int,
    ignored: int,
    dtype: torch.dtype,
    half_to_float: bool,
    columns: int,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """`nll_loss_forward` of the log-softmax of logits.

    Args:
        logits: contiguous; any shape whose numbers are the rows one after the other.
        target: one class a row.
        reduction: 0, 1 or 2 for none, mean, sum.
        ignored: the class that counts nothing.
        dtype: of the log-softmax.
        half_to_float: whether its kernel reads the logits in their dtype.
        columns: number of classes.
        rows: of a chunk.

    Raises:
        IndexError: a target is no class, on the CPU; kernels of a device stop the process's work on it.
    """
    table = logits.view(len(target), columns)
    counts = target != ignored
    if target.device.type == "cpu":
        wrong = counts & ((target < 0) | (target >= columns))
        if wrong.any():
            raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")
    index = torch.where(counts, target, 0)[:, None]
    picked = table.new_empty((len(target), 1), dtype=dtype)
    for start, part in _chunks(table, rows):
        made = _log_softmax(part, dtype, half_to_float)
        torch.gather(made, 1, index[start : start + rows], out=picked[start : start + rows])
        del made
    classes = index[:, 0].zero_().masked_fill_(counts.logical_not_(), IGNORED)
    loss, total = aten.nll_loss_forward.default(picked, classes, None, reduction, IGNORED)
    return loss, total


def chunked_gradient(tangent: Tensor, logits: Tensor, target: Tensor, total: Tensor, *rest: Any) -> Tensor:
    """The logits' gradient of `chunked_loss`.

    Args:
        tangent: of the loss.
        logits: as for the loss.
        target: as for the loss.
        total: the second result of the loss.
        *rest: the other arguments of the loss.
    """
    made = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return _write_gradient(made, tangent, logits, target, total, *rest)


def chunked_gradient_over(
    tangent: Tensor, logits: Tensor, target: Tensor, total: Tensor, *rest: Any
) -> Tensor:
    """`chunked_gradient`, written over the logits."""
    return _write_gradient(logits, tangent, logits, target, total, *rest)


def _write_gradient(
    made: Tensor,
    tangent: Tensor,
    logits: Tensor,
    target: Tensor,
    total: Tensor,
    reduction: int,
    ignored: int,
    dtype: torch.dtype,
    half_to_float: bool,
    columns: int,
    rows: int,
) -> Tensor:
    table, written = logits.view(len(target), columns), made.view(len(target), columns)
    for start, part in _chunks(table, rows):
        end = start + rows
        outputs = _log_softmax(part, dtype, half_to_float)
        gradient = aten.nll_loss_backward.default(
            tangent if reduction else tangent[start:end],
            outputs,
            target[start:end],
            None,
            reduction,
            ignored,
            total,
        )
        if half_to_float:
            gradient = aten._log_softmax_backward_data.default(gradient, outputs, 1, part.dtype)
        else:
            aten._log_softmax_backward_data.out(gradient, outputs, 1, dtype, out=gradient)
        written[start:end].copy_(gradient)
        del outputs, gradient
    return made


def _chunks(table: Tensor, rows: int) -> Iterable[tuple[int, Tensor]]:
    return ((start, table[start : start + rows]) for start in range(0, len(table), rows))


def _log_softmax(part: Tensor, dtype: torch.dtype, half_to_float: bool) -> Tensor:
    made: Tensor
    if half_to_float:
        made = aten._log_softmax.default(part, 1, True)
        return made
    made = part.to(dtype, copy=True)
    aten._log_softmax.out(made, 1, False, out=made)
    return made
