"""Cross entropy by chunks: nothing of the logits' size is made but their gradient, written over them.

As captured, a language model's loss makes three 32-bit tensors of the logits' size: the logits' copy, their
log-softmax, which is kept for the backward, and its gradient. Each row is independent until the mean, so the
forward can pick the targets' log-probabilities chunk by chunk, and the backward can make the log-softmax of a
chunk again. These are the kernels of the original on fewer rows, and they give the same bits. A chunk of a
segmentation's loss is some of the images.

The way: the copy, the log-softmax and all of its backward but the last call are left out; the loss and that
last call run by chunks, as does the sum of label smoothing, in the same pass as the loss. The log-softmax is
computed twice. A chunk is allocated once, and a second one if the gradient has another dtype.

The weights of classes are multiplied before the sum of the loss, which a GPU's kernel may fuse with it, so
weighted losses have a way on the CPU alone.
"""

from collections.abc import Iterator

import attrs

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.ways.chunked_loss import (
    ROW_GRADIENT,
    WEIGHT,
    chunked_gradient,
    chunked_gradient_over,
    chunked_loss,
)
from remat_executor.ways.cross_entropy import Head, Readers, find_heads
from remat_executor.ways.substitution import Change, Substitution

CHUNKS = (
    16  # of rows, at most, where launching kernels takes time; on the CPU, small chunks stay in its caches
)
LEAST_NBYTES = 1 << 20  # of a chunk of the log-softmax: below it, launching kernels takes longer than they do
ALIGNED_ROWS = 16  # of a chunk, so that each begins where a row of the whole would be aligned alike


def loss_head(captured: Captured, least_nbytes: int = LEAST_NBYTES) -> Iterator[Substitution]:
    """A way for each cross entropy whose log-softmax nothing else reads.

    Args:
        captured: the step.
        least_nbytes: bytes of log-softmax in a chunk; a loss of one chunk is left alone.
    """
    for head in find_heads(captured, Readers(captured)):
        on_cpu = head.log_softmax.meta["val"].device.type == "cpu"
        rows = chunk_rows(head, head.shape[0] if on_cpu else CHUNKS, least_nbytes)
        if rows < head.shape[0] and (on_cpu or head.weight is None):
            yield from _way(head, rows)


def chunk_rows(head: Head, chunks: int, least_nbytes: int) -> int:
    """Rows of a chunk, or images."""
    count, *rest = head.shape
    nbytes: int = max(1, head.log_softmax.meta["val"].element_size())
    for size in rest:
        nbytes *= max(1, size)
    wanted = max(-(-count // max(1, chunks)), -(-least_nbytes // nbytes), 1)
    aligned = ALIGNED_ROWS if len(rest) == 1 else 1
    return -(-wanted // aligned) * aligned


def _way(head: Head, rows: int) -> Iterator[Substitution]:
    made = head.log_softmax.meta["val"]
    _, target, weight, reduction, ignored = args_of(head.loss)
    half_to_float = bool(args_of(head.log_softmax)[2])
    smoothing = head.smoothing
    constants = (smoothing is not None, head.shape, reduction, ignored, made.dtype, half_to_float, rows)
    weights = () if weight is None else (weight,)
    names = (WEIGHT,) * len(weights)
    chunk_nbytes = made.element_size() * made.numel() // head.shape[0] * rows
    loss = Change(
        node=head.loss,
        kernel=chunked_loss,
        reads=(head.logits, target, *weights),
        constants=(names, *constants),
        counts_as=head.forward,
        workspace_nbytes=chunk_nbytes + _rows_nbytes(head),
    )
    if smoothing is not None:
        items = {args_of(user)[1]: user for user in head.loss.users if is_item(user)}
        if set(items) != {0, 1}:
            return
        loss = attrs.evolve(loss, makes=(items[0], items[1], smoothing.total))
    changes = [loss]
    if head.loss_backward is not None and head.last is not None:
        tangent, _, again, _, _, _, total = args_of(head.loss_backward)
        if smoothing is not None and smoothing.row_gradient is not None:
            weights = (*weights, smoothing.row_gradient)
            names = (*names, ROW_GRADIENT)
        held = (made.dtype != head.logits.meta["val"].dtype) + (len(names) == 2) + 1
        changes.append(
            Change(
                node=head.last,
                kernel=chunked_gradient,
                over_kernel=chunked_gradient_over,
                over=head.logits,
                reads=(tangent, head.logits, again, total, *weights),
                constants=(names, *constants),
                counts_as=(*head.before, *head.after),
                workspace_nbytes=held * chunk_nbytes,
            )
        )
    kept = [change.node for change in changes]
    gone = [call for call in (*head.forward, *head.after) if call not in kept]
    yield Substitution(family="loss_head", changes=(*changes, *(Change(node=call) for call in gone)))


def _rows_nbytes(head: Head) -> int:
    """What the loss holds for each row, or point of an image, while it runs."""
    made = head.log_softmax.meta["val"]
    points = made.numel() // max(1, head.shape[1])
    nbytes: int = points * (made.element_size() * (1 + 2 * (head.weight is not None)) + 2 * 8 + 1)
    return nbytes + 64
