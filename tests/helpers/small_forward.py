"""A small model whose forward is given, and two steps of training with and without a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from tests.helpers.acceptance import same_bits
from tests.helpers.planners import repeat_at_random

Forward = Callable[[Any, Tensor], Tensor]


class Small(nn.Module):
    """Two layers, a buffer and plainly held tensors; its forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))
        self.table = torch.linspace(0, 1, 16)
        self.tables = [torch.ones(16), self.first.weight]
        self.by_name = {"left": torch.full((16,), 2.0)}
        self.extra: nn.Module | None = None
        self.compute = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def twice(self, x: Tensor) -> Tensor:
        """Calls itself."""
        return self(x) * 2

    def middle(self, x: Tensor) -> Tensor:
        """The part that most forwards share."""
        return self.last(torch.relu(self.first(x)))


def planned(model: nn.Module, cache: Path, *args: Any) -> PlannedModule:
    """The model under a plan that repeats ops at random."""
    return PlannedModule(model, args, {}, repeat_at_random(12), cache_dir=cache)


def assert_trains_alike(forward: Forward, cache: Path, extra: Callable[[], nn.Module] | None = None) -> None:
    """Two steps of training: every number as without a plan, what is plainly held included."""
    x = torch.randn(8, 16)
    found = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = Small(forward)
        model.extra = extra() if extra is not None else None
        module = planned(model, cache, x.clone()) if plan else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        results = []
        for _ in range(2):
            optimizer.zero_grad()
            output = module(x.clone())
            output.backward()
            optimizer.step()
            results += [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            results += [b.clone() for b in model.buffers()]
            results += [model.table.clone(), model.tables[0].clone(), model.by_name["left"].clone()]
        found.append([*results, torch.get_rng_state()])
        if plan:
            assert module.runs == {"planned": 2}
    expected, actual = found
    assert len(expected) == len(actual)
    assert all(same_bits(a, b) for a, b in zip(expected, actual, strict=True))
