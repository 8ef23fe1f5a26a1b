"""Hold a step with other ways to run its ops against eager's, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.ways.substitution import Family
from tests.helpers.bits import bits_of
from tests.helpers.planners import all_switched


def assert_same(one: Tensor, other: Tensor) -> None:
    """Equal in layout, dtype and every bit."""
    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert torch.equal(bits_of(one), bits_of(other))


def with_channels_last(model: nn.Module, x: Tensor) -> tuple[Any, Tensor]:
    """A model and its sample of images or volumes, both with channels last."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[x.ndim]
    return model.to(memory_format=layout), x.to(memory_format=layout)  # type: ignore[call-overload]


def three_steps(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Losses, gradients of parameters and inputs, and buffers of three steps."""
    found: list[Tensor] = []
    for seed in range(3):
        model.zero_grad()
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
        torch.manual_seed(seed)
        loss = model(*given)
        loss.backward()
        found.append(loss.detach())
        found += [t.grad.clone() for t in (*given, *model.parameters()) if t.grad is not None]
        found += [b.clone() for b in model.buffers()]
    return found


def assert_exact(
    model: nn.Module,
    inputs: tuple[Any, ...],
    families: Iterable[Family],
    *,
    switches: int,
    seeds: Iterable[int | None] = (None, 1),
) -> None:
    """Plans with all ways on, without and with repeats, give eager's bits."""
    families = list(families)
    wanted = three_steps(copy.deepcopy(model), inputs)
    for seed in seeds:
        module = PlannedModule(copy.deepcopy(model), inputs, {}, all_switched(seed), ways=families)
        assert switches == len(module.graph.switches)
        assert set(module.graph.switches) == set(module.plan.switched)
        found = three_steps(module, inputs)
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            assert_same(one, other)
