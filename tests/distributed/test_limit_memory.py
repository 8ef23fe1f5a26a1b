"""`limit_memory` on several ranks: planned at the first call, alone or by one plan for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat_executor import MemoryMeter
from remat_facade import limit_memory, planned
from tests.helpers.ranks import Ranks, gathered


class Net(nn.Module):
    """Blocks with norms and dropout under a loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2))]
        blocks += [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)]
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.blocks(x)), y)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Other numbers for each rank and step."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    x = torch.randn(64, 32, generator=generator)
    return x, torch.randint(0, 4, (64,), generator=generator)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def train(model: nn.Module) -> list[Tensor]:
    """The losses and gradients of three steps."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(3):
        loss = model(*batch(step))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _limited(rank: int, cache: Path, wrapper_first: bool, together: str) -> None:
    expected = train(DistributedDataParallel(build()))
    options: dict[str, Any] = {"ranks": together, "cache_dir": cache, "time_limit_s": 60.0}
    if wrapper_first:
        model = limit_memory(DistributedDataParallel(build()), "60%", **options)
    else:
        model = DistributedDataParallel(limit_memory(build(), "60%", **options))
    limited = model.module
    assert planned(limited) is None
    assert all(map(torch.equal, expected, train(model)))
    found = planned(limited)
    assert found is not None
    assert found.runs == {"planned": 3}
    if together == "together":
        one, other = gathered((found.plan.schedule, found.plan.budget_nbytes))
        assert one == other
    model.broadcast_buffers = False
    x, y = batch(5)
    with MemoryMeter() as meter:
        model(x, y).backward()
    assert meter.peak_nbytes == found.plan.live_peak_nbytes
    assert found.plan.recomputed_s > 0


@pytest.mark.parametrize("together", ["together", "alone"])
@pytest.mark.parametrize("wrapper_first", [False, True], ids=["model", "wrapper"])
def test_ranks_that_plan_at_the_first_call(
    ranks: Ranks, tmp_path: Path, wrapper_first: bool, together: str
) -> None:
    ranks.run(_limited, tmp_path, wrapper_first, together)
