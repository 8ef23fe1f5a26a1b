"""Recipes: how an op of the IR is carried out. `translate` binds one to each op, and `lower` emits it."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from remat_executor.translation.inplace import InPlace
from remat_executor.ways.substitution import Change


@attrs.frozen(eq=False)
class CallOperator:
    """Call an fx node's target on its arguments."""

    node: torch.fx.Node


@attrs.frozen(eq=False)
class Draw:
    """Call a random target: the first run draws from the generator, a repeat from a saved state."""

    node: torch.fx.Node
    device: str
    state: int  # value index of the generator state


@attrs.frozen(eq=False)
class ReadGenerator:
    """Read the generator's state so that the following draw can be repeated."""

    device: str


@attrs.frozen(eq=False)
class TrainBatchNorm:
    """Batch norm that updates its running statistics in place; a repeat leaves them alone."""

    node: torch.fx.Node
    mean: torch.fx.Node
    variance: torch.fx.Node


@attrs.frozen(eq=False)
class WriteBack:
    """Copy new content into a tensor of the caller that the forward mutates."""

    target: torch.fx.Node
    source: torch.fx.Node


@attrs.frozen(eq=False)
class WriteInPlace:
    """Call an fx node's in-place form, which overwrites its first argument: a tensor of the caller."""

    node: torch.fx.Node
    form: InPlace


@attrs.frozen(eq=False)
class OwnGradient:
    """Copy a gradient into a storage of its own, laid out so that autograd takes it over."""

    source: torch.fx.Node
    size: tuple[int, ...]
    stride: tuple[int, ...]


@attrs.frozen(eq=False)
class RunKernel:
    """Run the kernel of another way in place of a call; it has none if the way leaves the call out."""

    change: Change


Recipe = (
    CallOperator | Draw | ReadGenerator | TrainBatchNorm | WriteBack | WriteInPlace | OwnGradient | RunKernel
)


def own_copy(source: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A copy with a storage of its own and the given layout."""
    return torch.empty_strided(size, stride, dtype=source.dtype, device=source.device).copy_(source)
