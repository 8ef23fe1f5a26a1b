"""The memory of tensors: the bytes of a storage, the layout of a tensor in it, views, and overlaps."""

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor, nn


@attrs.frozen
class Layout:
    """The position of a tensor in its storage, and its dtype."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def on(self, whole: Tensor) -> Tensor:
        """Return the tensor of this layout on a storage, given as bytes."""
        return whole.view(self.dtype).as_strided(self.size, self.stride, self.offset)

    @property
    def reach_nbytes(self) -> int:
        """The bytes from the first element to the last."""
        steps = (stride * (size - 1) for size, stride in zip(self.size, self.stride, strict=True))
        return (1 + sum(steps)) * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def rebind_storage(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor use the memory of `values`; it stays the same object, with its attributes and hooks."""
    if not tensor.is_meta:
        tensor.data = values
        return
    # Torch cannot set `data` of a meta tensor. `values.data` has a version counter of its own, so that
    # updates of the memory do not count as writes by the user.
    data = values.data
    made = nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data
    made.requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor without gaps or overlaps, 0 where the size is 0 or 1; else ``None``.

    Tensors of one shape and one order have corresponding elements at corresponding positions. No operator is
    called: modes of the calling thread would see it.
    """
    if tensor.layout != torch.strided:
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size < 2:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(0 if size < 2 else n for n, size in zip(tensor.stride(), tensor.shape, strict=True))


def share_order(first: Tensor, *others: Tensor) -> bool:
    """Whether tensors have one shape and one order in memory, so that their flat views correspond."""
    order = memory_order(first)
    return order is not None and all(t.shape == first.shape and memory_order(t) == order for t in others)


def flat_view(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that has a ``memory_order``: its elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of two strided tensors that share memory of an element; None if no two do."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + Layout.of(tensor).reach_nbytes, place)
        for place, tensor in enumerate(tensors)
        if tensor.numel() and not tensor.is_meta
    )
    near: list[int] = []  # positions of tensors with overlapping spans
    last, reached = "", 0
    for device, begin, end, place in spans:
        if device != last or begin >= reached:
            if (found := _first_overlap(tensors, near)) is not None:
                return found
            near, reached = [], 0
        near.append(place)
        last, reached = device, max(reached, end)
    return _first_overlap(tensors, near)


def _first_overlap(tensors: Sequence[Tensor], places: Sequence[int]) -> tuple[int, int] | None:
    """As `overlapping`, for overlapping spans: columns of one matrix, for example, share no element."""
    if len(places) < 2:
        return None
    begin = min(tensors[place].data_ptr() for place in places)
    end = max(tensors[place].data_ptr() + Layout.of(tensors[place]).reach_nbytes for place in places)
    offsets = {place: tensors[place].data_ptr() - begin for place in places}
    unit = math.gcd(*offsets.values(), *(tensors[place].itemsize for place in places))
    taken = torch.zeros((end - begin) // unit, dtype=torch.int32)
    for place, offset in offsets.items():
        tensor, units = tensors[place], tensors[place].itemsize // unit
        strides = [stride * units for stride in tensor.stride()]
        mine = taken.as_strided((*tensor.shape, units), (*strides, 1), offset // unit)
        if (other := int(mine.max())) > 0:
            return other - 1, place
        mine.fill_(place + 1)
    return None
