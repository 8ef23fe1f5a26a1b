"""The backward of batch norm by chunks of channels, written over the gradient that it reads.

The call needs a third tensor of the input's size for its result, and a fourth while it runs; its `out` form
allocates both too. But channels are independent: the kernel runs on a copy of some channels, and the result
is written where the gradient of these channels was.

Which bits come out depends on the loops that torch's kernel takes. Held against the whole on the CPU:

* Rows of pixels (contiguous): each channel is a loop of its own. Any chunk gives the same bits if it is a
  contiguous copy; a view of some channels takes another kernel, and differs.
* Channels last: the loops go over channels in vectors, with a remainder that rounds differently. Chunks are
  multiples of the longest vector, and the last one has the remainder of the whole.
* One pixel an image has both layouts, and which kernel runs differs. It is left alone, as are two dimensions.

CUDA's batch norms are other kernels, which do not promise any of this: there is no way on another device.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.repeatable_batch_norms import arguments_read
from remat_executor.fx_nodes import args_of
from remat_executor.ways.substitution import Change, Substitution

aten = torch.ops.aten

LEAST_NBYTES = 1 << 20  # of a chunk: below it, launching kernels takes longer than they do
LEAST_PARTS = 5  # the call needs two tensors beyond what it reads; the way one, and four chunks while it runs
VECTORS = 64  # channels: a multiple of the numbers in any vector register
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Parts = tuple[tuple[int, int], ...]


def batch_norms(
    captured: Captured, least_nbytes: int = LEAST_NBYTES, least_parts: int = LEAST_PARTS
) -> Iterator[Substitution]:
    """A way for each backward of a batch norm whose channels fill several chunks.

    Args:
        captured: the step.
        least_nbytes: bytes of a chunk.
        least_parts: a batch norm of fewer chunks is left alone.
    """
    calls = captured.graph_module.graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    )
    for node in calls:
        gradient, x, *vectors, train, epsilon, mask = arguments_read(node, args_of(node))
        layout = _layout(node)
        if layout is None or not mask[0]:
            continue
        fake = x.meta["val"]
        parts = parts_of(fake, layout, least_nbytes)
        given = tuple(each for each in vectors if each is not None)
        if len(parts) < least_parts or not all(each.meta["val"].is_contiguous() for each in given):
            continue
        channels = max(end - start for start, end in parts)
        change = Change(
            node=node,
            kernel=chunked_gradient,
            over_kernel=chunked_gradient_over,
            over=gradient,
            reads=(gradient, x, *given),
            constants=(
                tuple(each is not None for each in vectors),
                parts,
                layout,
                train,
                epsilon,
                tuple(mask),
            ),
            # Two copies, the call on them, and a copy of its result. The call makes its result twice.
            counts_as=(node, node, node),
            workspace_nbytes=4 * channels * (fake.nbytes // fake.shape[1]),
        )
        yield Substitution(family="batch_norms", changes=(change,))


def _layout(node: Node) -> torch.memory_format | None:
    """The layout of gradient, input and result, if they are laid out alike on the CPU; None otherwise."""
    gradient, x, *_ = (each.meta["val"] for each in args_of(node)[:2])
    made: Tensor = node.meta["val"][0]
    same = gradient.dtype == x.dtype == made.dtype and gradient.stride() == x.stride() == made.stride()
    if not same or x.device.type != "cpu" or prod(x.shape[2:]) <= 1 or not x.numel():
        return None
    formats = [torch.contiguous_format, *([_LAST[x.ndim]] if x.ndim in _LAST else [])]
    return next((each for each in formats if x.is_contiguous(memory_format=each)), None)


def parts_of(x: Tensor, layout: torch.memory_format, least_nbytes: int) -> Parts:
    """The first and the last channel (excluded) of each chunk.

    Args:
        x: the input.
        layout: of the input.
        least_nbytes: of a chunk.
    """
    channels = x.shape[1]
    step = max(1, -(-least_nbytes // (x.nbytes // channels)))
    if layout is torch.contiguous_format:
        starts = list(range(0, channels, step))
    else:
        step = -(-step // VECTORS) * VECTORS
        starts = [start for start in range(0, channels, step) if start == 0 or channels - start >= step]
    return tuple(zip(starts, [*starts[1:], channels], strict=True))


def chunked_gradient(gradient: Tensor, *rest: Any) -> list[Tensor | None]:
    """The gradients of a batch norm's input, weight and bias.

    Args:
        gradient: of the batch norm's result.
        *rest: the input; those of weight, running mean and variance, saved mean and inverse deviation that
            the call has; whether it has each; the chunks; the layout; whether it is in train mode; epsilon;
            which gradients are wanted.
    """
    return _write(torch.empty_like(gradient), gradient, *rest)


def chunked_gradient_over(gradient: Tensor, *rest: Any) -> list[Tensor | None]:
    """`chunked_gradient`, written over the gradient."""
    return _write(gradient, gradient, *rest)


def _write(made: Tensor, gradient: Tensor, x: Tensor, *rest: Any) -> list[Tensor | None]:
    *vectors, present, parts, layout, train, epsilon, mask = rest
    found = []
    for start, end in parts:
        given = iter(vectors)
        sliced = [next(given)[start:end] if there else None for there in present]
        some = [each[:, start:end].contiguous(memory_format=layout) for each in (gradient, x)]
        one, *others = aten.native_batch_norm_backward.default(*some, *sliced, train, epsilon, mask)
        made[:, start:end].copy_(one)
        found.append(others)
        del some, one
    weight, bias = (
        torch.cat(each) if wanted else None
        for each, wanted in zip(zip(*found, strict=True), mask[1:], strict=True)
    )
    return [made, weight, bias]
