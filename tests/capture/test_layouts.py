"""Inputs that are not contiguous: the trace's strides are the kernels', and the views on them can be made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule
from tests.helpers.planners import repeat_at_random

CHANNELS, LENGTH = 6, 8


class Turned(nn.Module):
    """Applies an op to a transposed tensor and a matrix product, which begins with a view, to the result."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(4, CHANNELS)
        self.norm = op if isinstance(op, nn.Module) else None
        self.after = nn.Linear(CHANNELS, 3)
        self.__dict__["op"] = op

    def forward(self, x: Tensor) -> Tensor:
        """The input is of (batch, length, 4)."""
        turned = self.before(x).transpose(1, 2)
        found = self.norm(turned) if self.norm is not None else self.__dict__["op"](turned)
        loss: Tensor = self.after(found.transpose(1, 2)).square().mean()
        return loss


def _classes(x: Tensor) -> Tensor:
    return x * F.cross_entropy(x, torch.zeros(x.shape[0], x.shape[2], dtype=torch.long))


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": nn.BatchNorm1d(CHANNELS),
    "batch norm without statistics": nn.BatchNorm1d(CHANNELS, track_running_stats=False),
    "batch norm in eval mode": nn.BatchNorm1d(CHANNELS).eval(),
    "instance norm": nn.InstanceNorm1d(CHANNELS, affine=True),
    "layer norm": nn.LayerNorm(LENGTH),
    "group norm": nn.GroupNorm(2, CHANNELS),
    "log softmax": lambda x: x.log_softmax(1),
    "softmax": lambda x: x.softmax(-1),
    "cross entropy": _classes,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "mse": lambda x: F.mse_loss(x, x.detach() * 2, reduction="none"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.detach() * 2, reduction="none"),
    "huber": lambda x: F.huber_loss(x, x.detach() * 2, reduction="none"),
    "power of a number": lambda x: 2.0**x,
    "log of a sum": lambda x: torch.logaddexp(x, x[:1].detach()),
    "product with a log": lambda x: torch.xlogy(x, x.detach().abs().contiguous() + 1),
    "copied sign": lambda x: torch.copysign(x, torch.tensor(-1.0)),
    "divided and floored": lambda x: x + torch.div(x, 0.3 * torch.ones(1, 1, LENGTH), rounding_mode="floor"),
    "reflected": lambda x: F.pad(x[..., None], (0, 0, 1, 1), mode="reflect")[..., 0],
    "replicated": lambda x: F.pad(x[..., None], (1, 1, 1, 1), mode="replicate")[..., 0],
    "reflected in 3d": lambda x: F.pad(x[:, :, None, None], (1, 1, 0, 0, 0, 0), mode="reflect")[:, :, 0, 0],
    "replicated in 3d": lambda x: F.pad(x[:, :, None, None], (1, 1, 1, 1, 1, 1), mode="replicate")[
        :, :, 1, 1
    ],
    "max pool": lambda x: F.max_pool1d(x, 2),
    "convolution": nn.Conv1d(CHANNELS, CHANNELS, 3),
    "upsampled": lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"),
    "cumulated": lambda x: x.cumsum(1),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_on_a_transposed_tensor_is_as_in_eager(name: str, tmp_path: Path) -> None:
    """Loss, gradients and buffers to the bit, with nothing and with much recomputed."""
    torch.manual_seed(0)
    model = Turned(copy.deepcopy(OPS[name]))
    x = torch.randn(5, LENGTH, 4, requires_grad=True)
    for repeats in (0, 5, 20):
        original = copy.deepcopy(model)
        planner = repeat_at_random(repeats)
        planned = PlannedModule(copy.deepcopy(model), (x,), {}, planner, cache_dir=tmp_path)
        for _ in range(2):
            results: list[Any] = []
            for module in (original, planned):
                given = x.detach().clone().requires_grad_()
                module(given).backward()
                results.append([given.grad, *(p.grad for p in module.parameters()), *module.buffers()])
            assert all(map(torch.equal, *results))


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_in_either_format(channels_last: bool, tmp_path: Path) -> None:
    """Convolutions, batch norms and activations whose rules are unsure, in both memory formats."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.ReflectionPad2d(1),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.BatchNorm2d(8),
        nn.ELU(),
        nn.ReplicationPad2d(1),
        nn.ChannelShuffle(2),
        nn.Hardtanh(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    x = torch.randn(2, 3, 8, 8)
    model(x)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
    original = copy.deepcopy(model)
    planned = PlannedModule(model, (x,), {}, repeat_at_random(3), cache_dir=tmp_path)
    for module in (original, planned):
        module(x).square().mean().backward()
    for right, found in zip(original.parameters(), planned.parameters(), strict=True):
        assert torch.equal(right.grad, found.grad)
