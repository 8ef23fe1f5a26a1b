"""Training loops as people write them: hooks, clipping, scalers, autocast, compilers, repeated backwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.residual import Block, normal
from tests.helpers.steps import pair


def _doubled(heard: list[tuple[str, str]], name: str, gradient: Tensor) -> Tensor:
    heard.append(("before", name))
    return 2 * gradient


def _heard(heard: list[tuple[str, str]], name: str, parameter: Tensor) -> None:
    heard.append(("after", name))


def test_hooks_clipping_and_accumulation(tmp_path: Path) -> None:
    """Both kinds of hooks of parameters, clipping, two micro-batches: as eager, in eager's numbers."""
    torch.manual_seed(0)
    original, planned = pair(nn.Sequential(*(Block() for _ in range(3))).train(), tmp_path, normal(4, 8))
    results = []
    for module in (original, planned):
        heard: list[tuple[str, str]] = []
        for name, parameter in module.named_parameters():
            parameter.register_hook(partial(_doubled, heard, name))
            parameter.register_post_accumulate_grad_hook(partial(_heard, heard, name))
        module.zero_grad()
        torch.manual_seed(3)
        for scale in (1.0, 0.5):
            module(scale * normal(4, 8)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        results.append((sorted(heard), norm, [p.grad for p in module.parameters()]))
    (heard, norm, gradients), (found_heard, found_norm, found) = results
    assert heard == found_heard
    assert torch.equal(norm, found_norm)
    assert all(map(torch.equal, gradients, found))


def test_an_optimizer_in_the_backward(tmp_path: Path) -> None:
    """Each parameter is updated and its gradient dropped as soon as it is there."""
    torch.manual_seed(0)
    original, planned = pair(nn.Sequential(*(Block() for _ in range(3))).train(), tmp_path, normal(4, 8))
    for module in (original, planned):
        for parameter in module.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01)

            def update(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        torch.manual_seed(3)
        for _ in range(2):
            module(normal(4, 8)).square().mean().backward()
        assert all(p.grad is None for p in module.parameters())
    assert all(map(torch.equal, original.parameters(), planned.parameters()))


def test_a_scaler(tmp_path: Path) -> None:
    """Autocast in fp16 and a GradScaler around the planned module."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2))).train()
    with torch.autocast("cpu", dtype=torch.float16):
        original, planned = pair(model, tmp_path, normal(4, 8))
    for module in (original, planned):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(3)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = module(normal(4, 8)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert all(map(torch.equal, original.parameters(), planned.parameters()))
    assert planned.runs == {"planned": 2}


class Attending(nn.Module):
    """Attention with dropout, which eager computes in float32 also under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).chunk(3, dim=-1)
        found: Tensor = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return found


def test_autocast_ends_before_the_backward(tmp_path: Path) -> None:
    """Products of the backward in float32 stay so: as in eager, to the bit."""
    torch.manual_seed(0)
    x = normal(2, 16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        original, planned = pair(Attending(), tmp_path, x)
    for module in (original, planned):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(x).float().square().sum()
        loss.backward()
    assert torch.equal(original.projection.weight.grad, planned.module.projection.weight.grad)
    assert planned.runs == {"planned": 1}


class Judged(nn.Module):
    """Half precision into a norm whose weights are in full, turned around, and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), norm, nn.Linear(8, 8)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.first(x)).transpose(0, 1)).transpose(0, 1)
        return self.loss(y.float(), x)


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 4)], ids=["layer", "group"])
@pytest.mark.parametrize("loss", LOSSES)
def test_norms_and_losses_under_autocast(loss: str, norm: nn.Module, dtype: Any, tmp_path: Path) -> None:
    """Kernels give what torch's rules do not say, and a loss reduces as it does outside of autocast."""
    torch.manual_seed(0)
    x = normal(3, 4, 8).sigmoid()
    with torch.autocast("cpu", dtype=dtype):
        original, planned = pair(Judged(getattr(nn.functional, loss), copy.deepcopy(norm)), tmp_path, x)
    for module in (original, planned):
        with torch.autocast("cpu", dtype=dtype):
            found = module(x)
        assert found.shape == ()
        found.backward()
    for one, other in zip(original.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert planned.runs == {"planned": 1}


AROUND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda module: module,
    "a model": lambda module: nn.Sequential(module, nn.Tanh()),
    "a function": lambda module: lambda x: 2 * module(x),
}


@pytest.mark.parametrize("where", AROUND)
def test_torch_compile_around_a_planned_module_leaves_it_alone(where: str, tmp_path: Path) -> None:
    """It breaks the graph there, and the plan runs."""
    torch.manual_seed(0)
    original, planned = pair(nn.Sequential(nn.Linear(8, 8), nn.GELU()), tmp_path, normal(4, 8))
    around = AROUND[where]
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo marks the module, which is captured anew
        compiled = torch.compile(around(planned), backend="eager")
        output = compiled(normal(4, 8))
    assert torch.equal(output, around(original)(normal(4, 8)))
    output.sum().backward()
    assert planned.runs["planned"] == 1
    assert planned.runs["original"] == 0


def test_retain_graph_twice(tmp_path: Path) -> None:
    """Three backwards of one forward, with the same gradients each time."""
    torch.manual_seed(0)
    original, planned = pair(nn.Sequential(Block(), Block()).train(), tmp_path, normal(4, 8))
    results = []
    for module in (original, planned):
        torch.manual_seed(3)
        loss = module(normal(4, 8)).square().mean()
        for keep in (True, True, False):
            loss.backward(retain_graph=keep)
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))
