"""Compare one training step of a model with the same step of its planned copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from tests.helpers.planners import repeat_at_random


def pair(model: nn.Module, cache: Path, *args: Any, **options: Any) -> tuple[nn.Module, PlannedModule]:
    """An untouched copy, and the planned module."""
    torch.manual_seed(0)
    return copy.deepcopy(model), PlannedModule(
        model, args, {}, repeat_at_random(12), cache_dir=cache, **options
    )


def step(module: nn.Module, *args: Any, loss: Callable[[Any], Tensor] | None = None) -> Any:
    """The output of one forward and backward from a fixed seed."""
    module.zero_grad()
    torch.manual_seed(5)
    output = module(*args)
    (loss(output) if loss is not None else output.float().square().mean()).backward()
    return output


def assert_same_step(
    original: nn.Module, planned: nn.Module, *args: Any, loss: Callable[[Any], Tensor] | None = None
) -> None:
    """One forward and backward each from the same seed: same numbers everywhere."""
    expected, actual = (step(module, *args, loss=loss) for module in (original, planned))
    if isinstance(expected, Tensor):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)
    named = dict(planned.named_parameters())
    for name, parameter in original.named_parameters():
        if parameter.grad is None:
            assert named[name].grad is None, name
        else:
            assert torch.equal(parameter.grad, named[name].grad), name
    for name, buffer in original.named_buffers():
        assert torch.equal(buffer, dict(planned.named_buffers())[name]), name


def assert_planned_step(original: nn.Module, planned: PlannedModule, *args: Any) -> None:
    """The same numbers, and no call has run the original."""
    assert_same_step(original, planned, *args)
    assert planned.runs["original"] == 0
