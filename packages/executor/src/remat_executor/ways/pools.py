"""Max pooling that keeps a byte for each window, and not the index of 64 bits nor the input.

The index of a window's maximum lies at one of a few distances from the window's first element. Modulo some
number no two of them are equal, and this remainder is kept in a byte. The forward pools chunk by chunk and
keeps the bytes of a chunk's indices; the backward makes the indices of a chunk again.

The backward of pooling takes its input for the shape only, so the result's own memory stands for it. This was
verified on the CPU. CUDA's kernels, too, are documented to read indices and gradients only; it has not run
there.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.fx_nodes import args_of, is_item
from remat_executor.torch_private.dispatch import argument_names
from remat_executor.ways.chunks import chunk_numel, in_memory_order, is_dense
from remat_executor.ways.substitution import Change, Substitution, new_tensor

aten = torch.ops.aten

LEAST_NBYTES = 1 << 16  # of input and indices of a pooling for which there is a way
MOST_CODES = 256  # in a byte


@attrs.frozen
class _Kind:
    """A kind of pooling: its calls, and those that write where the caller says."""

    call: Any
    backward: Any
    forward_into: Callable[..., Any]
    backward_into: Callable[..., Any]
    dims: int
    adaptive: bool = False


def _kind(call: Any, backward: Any, dims: int, adaptive: bool = False) -> _Kind:
    return _Kind(call.default, backward.default, call.out, backward.grad_input, dims, adaptive)


KINDS: Mapping[str, _Kind] = {
    "max_pool2d": _kind(aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, 2),
    "max_pool3d": _kind(aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward, 3),
    "adaptive_max_pool2d": _kind(
        aten.adaptive_max_pool2d, aten.adaptive_max_pool2d_backward, 2, adaptive=True
    ),
    "adaptive_max_pool3d": _kind(
        aten.adaptive_max_pool3d, aten.adaptive_max_pool3d_backward, 3, adaptive=True
    ),
}
_NAME_OF = {kind.call: name for name, kind in KINDS.items()}


def pools(captured: Captured, least_nbytes: int = LEAST_NBYTES) -> Iterator[Substitution]:
    """A way for each max pooling whose indices one backward reads and nothing else.

    Args:
        captured: the step.
        least_nbytes: poolings with fewer bytes of input and indices are left alone.
    """
    for node in captured.graph_module.graph.nodes:
        found = _find(node) if node.target in _NAME_OF else None
        if (
            found is not None
            and found.x.meta["val"].nbytes + found.indices.meta["val"].nbytes >= least_nbytes
        ):
            yield _way(found)


@attrs.frozen(kw_only=True, eq=False)
class _Pool:
    """A pooling, its results, and its backward; `planes` says whether it is cut within an image."""

    name: str
    call: Node
    x: Node
    made: Node
    indices: Node
    backward: Node
    gradient: Node
    window: tuple[Any, ...]
    divisor: int
    planes: bool


def _find(node: Node) -> _Pool | None:
    name = _NAME_OF[node.target]
    kind = KINDS[name]
    items = {user.args[1]: user for user in node.users if is_item(user)}
    if set(items) != {0, 1} or len(items[1].users) != 1:
        return None
    backward = next(iter(items[1].users))
    if backward.target is not kind.backward or backward.args[-1] is not items[1]:
        return None
    x, gradient = args_of(node)[0], args_of(backward)[0]
    fakes = [each.meta["val"] for each in (*items.values(), backward)]
    given: Tensor = x.meta["val"]
    window = _window(node, kind)
    places = distances(name, window, tuple(given.shape[-kind.dims :]))
    divisor = divisor_of(places)
    planes = all(each.is_contiguous() for each in (given, gradient.meta["val"], *fakes))
    # With channels last, torch's kernel for three dimensions may give an index outside of its window.
    images = given.ndim == kind.dims + 2 and (kind.dims == 2 or kind.adaptive)
    if divisor is None or not all(map(is_dense, fakes)) or not (planes or images):
        return None
    return _Pool(
        name=name,
        call=node,
        x=x,
        made=items[0],
        indices=items[1],
        backward=backward,
        gradient=gradient,
        window=window,
        divisor=divisor,
        planes=planes,
    )


def _window(node: Node, kind: _Kind) -> tuple[Any, ...]:
    """The arguments of a pooling after its input, all of them, with a number for each dimension."""
    names = argument_names(node.target)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}

    def numbers(value: Any) -> tuple[int, ...]:
        listed = [value] if isinstance(value, int) else list(value)
        return tuple(listed * kind.dims if len(listed) == 1 else listed)

    if kind.adaptive:
        return (numbers(given["output_size"]),)
    kernel = numbers(given["kernel_size"])
    stride = numbers(given.get("stride") or kernel)
    padding, dilation = numbers(given.get("padding", 0)), numbers(given.get("dilation", 1))
    return (kernel, stride, padding, dilation, bool(given.get("ceil_mode", False)))


def distances(name: str, window: tuple[Any, ...], size: tuple[int, ...]) -> list[int]:
    """How far an index can lie after that of the window's first element, without repeats.

    Args:
        name: of the pooling, in `KINDS`.
        window: its arguments after the input.
        size: of the input, the last dimensions.
    """
    if KINDS[name].adaptive:
        steps = [range(_longest(n, count)) for n, count in zip(size, window[0], strict=True)]
    else:
        kernel, _, _, dilation, _ = window
        steps = [range(0, k * d, d) for k, d in zip(kernel, dilation, strict=True)]
    pitches = _pitches(size)
    return sorted({sum(a * b for a, b in zip(at, pitches, strict=True)) for at in product(*steps)})


def divisor_of(places: list[int]) -> int | None:
    """The largest number up to 256 for which all remainders of distances differ; None if there is none."""
    for divisor in range(MOST_CODES, 0, -1):
        if len({place % divisor for place in places}) == len(places):
            return divisor
    return None


def _longest(size: int, count: int) -> int:
    """Elements of the longest of `count` windows over `size` elements."""
    return max(-(-(i + 1) * size // count) - i * size // count for i in range(count))


def _pitches(size: tuple[int, ...]) -> list[int]:
    """How much an index grows with each coordinate."""
    return [prod(size[i + 1 :]) for i in range(len(size))]


def _way(pool: _Pool) -> Substitution:
    given, made, indices = (each.meta["val"] for each in (pool.x, pool.made, pool.indices))
    dims = KINDS[pool.name].dims
    size = tuple(given.shape[-dims:])
    unit = prod(size) if pool.planes else given[0].numel()
    units = given.numel() // unit
    step = max(1, min(units, chunk_numel(given.device) // unit))
    part = indices.numel() // units * step
    constants = (pool.name, pool.window, size, pool.divisor, pool.planes, step)
    codes = new_tensor(f"{pool.call.name}_codes", torch.empty_like(indices, dtype=torch.uint8))
    corners = 8 * prod(indices.shape[-dims:]) + 64
    back = pool.backward.meta["val"]
    return Substitution(
        family="pools",
        changes=(
            Change(
                node=pool.call,
                kernel=pool_to_codes,
                reads=(pool.x,),
                constants=(tuple(made.shape), made.stride(), *constants),
                makes=(pool.made, codes),
                workspace_nbytes=8 * part + corners,
            ),
            Change(
                node=pool.backward,
                kernel=pool_gradient,
                reads=(pool.gradient, codes),
                constants=(tuple(back.shape), back.stride(), *constants),
                workspace_nbytes=(8 + 4) * part + corners + 8 * MOST_CODES,
            ),
        ),
    )


def pool_to_codes(
    x: Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    name: str,
    window: tuple[Any, ...],
    size: tuple[int, ...],
    divisor: int,
    planes: bool,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Max pooling, with a byte for each index.

    Args:
        x: what is pooled.
        shape: of the result.
        stride: of the result, which is dense.
        name: of the pooling, in `KINDS`.
        window: its arguments after `x`.
        size: of `x`, the dimensions that are pooled.
        divisor: all `distances` have other remainders.
        planes: whether a chunk is some planes, and not some images.
        step: planes or images of a chunk.
    """
    kind = KINDS[name]
    made = x.new_empty_strided(shape, stride)
    codes = torch.empty_like(made, dtype=torch.uint8)
    corners = _corners(kind, window, size, tuple(shape[-kind.dims :]), x.device)
    for part, out, code in _parts((x, made, codes), kind, planes, step):
        indices = torch.empty_like(out, dtype=torch.int64)
        kind.forward_into(part, *window, out=out, indices=indices)
        indices.sub_(corners)
        code.copy_(indices if divisor == MOST_CODES else indices.remainder_(divisor))
        del indices
    return made, codes


def pool_gradient(
    gradient: Tensor,
    codes: Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    name: str,
    window: tuple[Any, ...],
    size: tuple[int, ...],
    divisor: int,
    planes: bool,
    step: int,
) -> Tensor:
    """The backward of `pool_to_codes`, with the same arguments; `shape` and `stride` are of the result."""
    kind = KINDS[name]
    made = gradient.new_empty_strided(shape, stride)
    corners = _corners(kind, window, size, tuple(codes.shape[-kind.dims :]), codes.device)
    places = distances(name, window, size)
    table = [0] * MOST_CODES
    for place in places:
        table[place % divisor] = place
    distance_of = torch.tensor(table, device=codes.device)
    rest = () if kind.adaptive else window
    for part, out, code in _parts((gradient, made, codes), kind, planes, step):
        indices = distance_of.index_select(0, in_memory_order(code).int())
        indices = indices.as_strided(code.shape, code.stride()).add_(corners)
        kind.backward_into(part, out, *rest, indices, grad_input=out)
        del indices
    return made


def _parts(tensors: tuple[Tensor, ...], kind: _Kind, planes: bool, step: int) -> Iterator[tuple[Tensor, ...]]:
    """The chunks of tensors, together."""
    if planes:
        tensors = tuple(tensor.reshape(-1, *tensor.shape[-kind.dims :]) for tensor in tensors)
    for start in range(0, len(tensors[0]), step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


def _corners(
    kind: _Kind, window: tuple[Any, ...], size: tuple[int, ...], made: tuple[int, ...], device: torch.device
) -> Tensor:
    """The index of each window's first element, in the padding too."""
    found = torch.zeros((1,) * len(made), dtype=torch.int64, device=device)
    for i, (count, pitch) in enumerate(zip(made, _pitches(size), strict=True)):
        at = torch.arange(count, device=device)
        at = at * size[i] // count if kind.adaptive else at * window[1][i] - window[2][i]
        found = found + (at * pitch).view(-1, *(1,) * (len(made) - 1 - i))
    return found
