"""Bit masks: a backward that only compares a tensor with bounds reads one bit for each of its elements.

The backwards of relu and of functions like it return the gradient where a tensor lies within bounds and zero
(or a multiple of the gradient) elsewhere, and the backward of dropout reads a byte for each element. If
nothing else in the backward reads this tensor, its bits are kept instead.

The forward packs the bits right after the tensor is made, and the backward unpacks them, chunk by chunk. Both
run the original's backward: the bits are where it lets a gradient of one pass, and it then compares not the
tensor but one number that passes or one that does not. So all results have the original's bits.

Where torch's kernels disagree whether a gradient passes at NaN (the last elements of a thread's share are not
vectorized), the bits are those of one call on the whole tensor, whose shares are the original's.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import pad

from remat_executor.capture.captured import Captured
from remat_executor.capture.dropout_rounding import noise_dropout_backward
from remat_executor.fx_nodes import args_of
from remat_executor.ways.chunks import chunk_numel, chunks, in_memory_order, is_dense
from remat_executor.ways.substitution import Change, Substitution, new_tensor
from remat_executor.ways.uses import Uses

aten = torch.ops.aten

LEAST_NBYTES = 1 << 16  # of a tensor for whose bits there is a way
_INF = float("inf")
_GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: their bits are the product's highest byte


@attrs.frozen
class _Compares:
    """A backward that compares its second argument; two numbers stand for all that it can be.

    Attributes:
        call: the backward.
        stops: a number where no gradient passes, or only a part.
        passes: from the backward's other arguments, a number where it passes.
        whole: whether its kernels disagree about NaN.
    """

    call: Callable[..., Tensor]
    stops: float
    passes: Callable[..., float]
    whole: bool = False


def _middle(low: float, high: float) -> float:
    return low + (high - low) / 2


COMPARES: Mapping[str, _Compares] = {
    "threshold_backward": _Compares(aten.threshold_backward.default, -_INF, lambda threshold: _INF),
    "leaky_relu_backward": _Compares(aten.leaky_relu_backward.default, -1.0, lambda slope, is_result: 1.0),
    "hardsigmoid_backward": _Compares(aten.hardsigmoid_backward.default, -_INF, lambda: 0.0),
    "hardtanh_backward": _Compares(aten.hardtanh_backward.default, -_INF, _middle, whole=True),
    "hardshrink_backward": _Compares(aten.hardshrink_backward.default, 0.0, lambda bound: _INF, whole=True),
    "softshrink_backward": _Compares(aten.softshrink_backward.default, 0.0, lambda bound: _INF, whole=True),
}
DROPOUTS: Mapping[str, Callable[..., Tensor]] = {
    "native_dropout_backward": aten.native_dropout_backward.default,
    "noise_dropout_backward": noise_dropout_backward,
}
_NAME_OF: Mapping[Any, str] = {compares.call: name for name, compares in COMPARES.items()} | {
    call: name for name, call in DROPOUTS.items()
}
_SHAPE_READERS = (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
)


def masks(captured: Captured, least_nbytes: int = LEAST_NBYTES) -> Iterator[Substitution]:
    """A way for each tensor that the backward reads for its bits only.

    Args:
        captured: the step.
        least_nbytes: smaller tensors are left alone.
    """
    uses = Uses(captured)
    readers: dict[Node, list[Node]] = {}
    for node in uses.nodes:
        if node.target in _NAME_OF and node in uses.gradients:
            readers.setdefault(uses.base(args_of(node)[1]), []).append(node)
    for base, nodes in readers.items():
        large = base.meta["val"].nbytes >= least_nbytes
        if large and _is_for_its_bits(base, nodes, uses) and all(map(_may_read_bits, nodes)):
            yield _way(nodes, uses)


def _is_for_its_bits(base: Node, nodes: list[Node], uses: Uses) -> bool:
    """Whether the forward makes a tensor that would not be kept if these calls did not read it."""
    if base.op != "call_function" or base in uses.returned or uses.flow.maker(base) in uses.gradients:
        return False
    # Pooling reads its input for its shape; the family of pools leaves it out.
    others = [other.target for other in uses.backward_readers(base) if other not in nodes]
    return all(target in _SHAPE_READERS for target in others)


def _may_read_bits(node: Node) -> bool:
    """Whether gradient, result and what is compared lie alike in memory, and bits can stand for this."""
    gradient, read = (each.meta["val"] for each in args_of(node)[:2])
    made = node.meta["val"]
    alike = read.shape == made.shape == gradient.shape and read.stride() == made.stride() == gradient.stride()
    return alike and is_dense(read) and read.storage_offset() == 0 and _has_numbers(node, made.dtype)


def _has_numbers(node: Node, dtype: torch.dtype) -> bool:
    """Whether the two numbers of this type do what they stand for, with the bounds of this call."""
    name, scalars = _NAME_OF[node.target], args_of(node)[2:]
    if name in DROPOUTS:
        return True
    compares = COMPARES[name]
    numbers = torch.tensor([compares.stops, compares.passes(*scalars)], dtype=dtype)
    stopped, passed = compares.call(torch.ones_like(numbers), numbers, *scalars).tolist()
    return stopped != passed and isfinite(stopped)


def _way(nodes: list[Node], uses: Uses) -> Substitution:
    packs, reads = zip(*(_changes(node, uses) for node in nodes), strict=True)
    return Substitution(family="masks", changes=(*packs, *reads))


def _changes(node: Node, uses: Uses) -> tuple[Change, Change]:
    """The call that packs what a backward compares, and the backward."""
    name = _NAME_OF[node.target]
    gradient, x, *scalars = args_of(node)
    read = x.meta["val"]
    size = chunk_numel(read.device)
    part = min(size, read.numel())
    bits = new_tensor(
        f"{uses.base(x).name}_bits_for_{node.name}",
        read.new_empty((_bytes_of(read.numel()),), dtype=torch.uint8),
    )
    constants = (name, *scalars, size)
    pack = Change(
        node=uses.flow.maker(x),
        added=True,
        kernel=pack_mask if name in DROPOUTS else pack_comparison,
        reads=(x,),
        constants=(size,) if name in DROPOUTS else constants,
        makes=(bits,),
        workspace_nbytes=_pack_workspace(name, read, part),
    )
    backward = Change(
        node=node,
        kernel=masked_gradient,
        over_kernel=masked_gradient_over,
        over=gradient,
        reads=(gradient, bits),
        constants=constants,
        workspace_nbytes=_backward_workspace(name, part, node.meta["val"].element_size()),
    )
    return pack, backward


def _pack_workspace(name: str, read: Tensor, part: int) -> int:
    """Bytes of the words of a chunk's bools, and for a comparison of these, of ones, and of what it makes."""
    if name in DROPOUTS:
        return part + 64
    itemsize = read.element_size()
    made = itemsize * read.numel() + part if COMPARES[name].whole else 2 * itemsize * part
    return made + part + 64


def _backward_workspace(name: str, part: int, itemsize: int) -> int:
    """Bytes of what a chunk compares, as numbers or bools, of gradients, and of the table that makes them."""
    if name in DROPOUTS:
        return part * (1 + 2 * itemsize) + 2048 + 64
    return (2 * part + 2048) * itemsize + 64


def _bytes_of(numel: int) -> int:
    """Bytes that hold this many bits."""
    return -(-numel // 8)


def pack_comparison(x: Tensor, name: str, *rest: Any) -> tuple[Tensor]:
    """The bits of what a backward compares.

    Args:
        x: dense, with storage.
        name: of the backward, in `COMPARES`.
        *rest: its other arguments, and elements of a chunk.

    Returns:
        A byte for eight elements in their order in memory.
    """
    *scalars, size = rest
    compares = COMPARES[name]
    stopped = compares.call(x.new_ones(1), x.new_full((1,), compares.stops), *scalars)
    flat, bits = in_memory_order(x), x.new_empty((_bytes_of(x.numel()),), dtype=torch.uint8)
    if compares.whole:
        made = compares.call(x.new_ones(1).expand(len(flat)), flat, *scalars)
        for start, part in chunks(made, size):
            _pack(part.ne(stopped), _bits_at(bits, start, size))
        return (bits,)
    ones = x.new_ones(min(size, len(flat)))
    for start, part in chunks(flat, size):
        passed = compares.call(ones[: len(part)], part, *scalars).ne(stopped)
        _pack(passed, _bits_at(bits, start, size))
        del passed
    return (bits,)


def pack_mask(mask: Tensor, size: int) -> tuple[Tensor]:
    """The bits of a dense mask of bools, a byte for eight in their order in memory."""
    bits = mask.new_empty((_bytes_of(mask.numel()),), dtype=torch.uint8)
    for start, part in chunks(in_memory_order(mask), size):
        _pack(part, _bits_at(bits, start, size))
    return (bits,)


def masked_gradient(gradient: Tensor, bits: Tensor, name: str, *rest: Any) -> Tensor:
    """A backward that reads bits.

    Args:
        gradient: dense.
        bits: of the tensor that the original reads, which is laid out as the gradient.
        name: of the backward, in `COMPARES` or `DROPOUTS`.
        *rest: its other arguments, and elements of a chunk.
    """
    return _write(torch.empty_like(gradient), gradient, bits, name, *rest)


def masked_gradient_over(gradient: Tensor, bits: Tensor, name: str, *rest: Any) -> Tensor:
    """`masked_gradient`, written over the gradient."""
    return _write(gradient, gradient, bits, name, *rest)


def _write(made: Tensor, gradient: Tensor, bits: Tensor, name: str, *rest: Any) -> Tensor:
    *scalars, size = rest
    table = _eight_bits(bits.device)
    if name in DROPOUTS:
        call = DROPOUTS[name]
    else:
        compares = COMPARES[name]
        call = compares.call
        stops, passes = gradient.new_full((), compares.stops), compares.passes(*scalars)
        table = torch.where(table, gradient.new_full((), passes), stops)
    written = in_memory_order(made)
    for start, part in chunks(in_memory_order(gradient), size):
        compared = table.index_select(0, _bits_at(bits, start, size).int()).view(-1)[: len(part)]
        written[start : start + size].copy_(call(part, compared, *scalars))
        del compared
    return made


def _bits_at(bits: Tensor, start: int, size: int) -> Tensor:
    """Where a chunk has its bits."""
    return bits[start // 8 : (start + size) // 8]


def _eight_bits(device: torch.device) -> Tensor:
    """For each byte the bools of its bits, the lowest first: (256, 8)."""
    numbers, places = torch.arange(256, device=device), torch.arange(8, device=device)
    return (numbers[:, None] >> places).bitwise_and_(1).bool()


def _pack(mask: Tensor, bits: Tensor) -> None:
    """Write a bit for each bool."""
    words = pad(mask, (0, -len(mask) % 8)).view(torch.int64) if len(mask) % 8 else mask.view(torch.int64)
    bits.copy_(words.mul(_GATHER_BITS).bitwise_right_shift_(56))
