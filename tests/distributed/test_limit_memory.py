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

from remat_executor import MemoryMeter, RanksDiffer, RematWarning
from remat_facade import limit_memory, planned
from tests.helpers.ranks import Ranks, gathered


class Net(nn.Module):
    """Blocks with norms and dropout under a loss; it may fail."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2))]
        blocks += [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)]
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(32, 4)
        self.problem = ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.problem:
            raise ValueError(self.problem)
        return F.cross_entropy(self.last(self.blocks(x)), y)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Other numbers for each rank and step."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    x = torch.randn(size, 32, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def train(model: nn.Module, sizes: tuple[int, ...] = (64, 64, 64)) -> list[Tensor]:
    """The losses and gradients of three steps."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step, size in enumerate(sizes):
        loss = model(*batch(step, size))
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


def limited(cache: Path) -> Net:
    return limit_memory(build(), "60%", ranks="together", cache_dir=cache, time_limit_s=60.0)


def _other_first_calls(rank: int, cache: Path) -> None:
    """Rank 1 evaluates first, and the ranks meet another shape at different steps."""
    sizes = ((64, 48, 64), (64, 64, 48))[rank]
    expected = train(DistributedDataParallel(build()), sizes)
    model = limited(cache)
    if rank == 1:
        with torch.no_grad():
            model.eval()(*batch(9))
        model.train()
    assert planned(model) is None
    with pytest.warns(RematWarning, match="planning again"):
        actual = train(DistributedDataParallel(model), sizes)
    assert all(map(torch.equal, expected, actual))
    found = planned(model)
    assert found is not None
    assert found.runs == {"planned": 3, "replanned": 1}


def test_only_the_first_planned_call_waits_for_the_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_other_first_calls, tmp_path)


def _failures(rank: int, cache: Path) -> None:
    model = limited(cache)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RanksDiffer, match=r"rank 1 has bytes \d+ and rank 0 has \d+"):
        wrapped(*batch(0, 64 - 16 * rank))
    model.problem = "no reason" * rank
    with pytest.raises(Exception, match="no reason"):
        wrapped(*batch(0))
    model.problem = ""
    assert planned(model) is None
    assert all(map(torch.equal, train(DistributedDataParallel(build())), train(wrapped)))
    found = planned(model)
    assert found is not None
    assert found.runs == {"planned": 3}


def test_what_fails_at_a_first_call_is_raised_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Other shapes, an error of the model on one rank; the next call plans."""
    ranks.run(_failures, tmp_path)
