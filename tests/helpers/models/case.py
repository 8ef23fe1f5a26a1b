"""What a model case is: a model, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.helpers.models.samples import Sample


def mean_square(output: Any) -> Tensor:
    """Loss of any nest of outputs: the mean square of each differentiable leaf, summed."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def returned_loss(output: Any) -> Tensor:
    """The loss that the model computed itself: its output, or the `loss` of that."""
    loss = output if isinstance(output, Tensor) else output.loss
    assert isinstance(loss, Tensor)
    return loss


@attrs.frozen(kw_only=True)
class ModelCase:
    """One model, its batches and its loss.

    `sample(seed)` gives the same `(args, kwargs)` every time and, as `build`, leaves the global random state
    alone. `ci` marks the quick cut.
    """

    name: str
    family: str = attrs.field(validator=attrs.validators.in_(("transformers", "torchvision", "own")))
    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    loss: Callable[[Any], Tensor] = mean_square
    ci: bool = False
    note: str = ""

    def build(self) -> nn.Module:
        """A new module in train mode, with the same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1234)
            return self.make().train()

    @property
    def returns_loss(self) -> bool:
        """Whether the model computes its loss, so that a plan of it covers the whole step."""
        return self.loss is returned_loss
