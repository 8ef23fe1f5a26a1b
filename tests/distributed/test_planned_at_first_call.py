"""`limit_memory(..., ranks="together")` without a sample: ranks share the plan of their first call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat_executor import RanksDiffer, RematWarning
from remat_facade import limit_memory, planned
from tests.helpers.ranks import Ranks, gathered

WIDTH = 32


class Net(nn.Module):
    """Blocks with batch norm and dropout; it may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in range(3)
        )
        self.drop = nn.Dropout(0.2)
        self.problem = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.problem:
            raise ValueError(self.problem)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x.square().mean()


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def limited(cache: Path, **options: Any) -> Net:
    known = {"ranks": "together", "cache_dir": cache, "time_limit_s": 60.0, "zoo": False}
    return limit_memory(build(), "60%", **known | options)


def batch(rank: int, step: int, size: int = 64) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def train(rank: int, model: nn.Module, sizes: tuple[int, ...] = (64, 64, 64)) -> list[Tensor]:
    """Losses, gradients and at the end all that the model holds."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step, size in enumerate(sizes):
        loss = model(batch(rank, step, size))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks for all tests here."""
    with Ranks(2) as started:
        yield started


def _one_plan(rank: int, cache: Path) -> None:
    expected = train(rank, DistributedDataParallel(build()))
    inside = limited(cache)
    outside = DistributedDataParallel(build())
    limit_memory(outside, "60%", ranks="together", cache_dir=cache, time_limit_s=60.0, zoo=False)
    for model, wrapped in ((inside, DistributedDataParallel(inside)), (outside.module, outside)):
        if rank == 1:  # a call without gradients plans nothing, so rank 0 is not waited for
            with torch.no_grad():
                model.eval()(batch(rank, 9))
            model.train()
        assert planned(model) is None
        assert same(expected, train(rank, wrapped))
        found = planned(model)
        assert found is not None
        assert found.runs["planned"] == 3
        assert found.plan.overhead > 0
        one, other = gathered((found.plan.schedule, found.plan.budget_nbytes))
        assert one == other


def test_the_first_call_makes_one_plan_for_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Limited before DDP and after, with the bits of DDP alone."""
    ranks.run(_one_plan, tmp_path)


def _later_shapes(rank: int, cache: Path) -> None:
    sizes = ((64, 48, 64), (64, 64, 48))[rank]
    expected = train(rank, DistributedDataParallel(build()), sizes)
    model = limited(cache)
    with pytest.warns(RematWarning, match="planning again"):
        actual = train(rank, DistributedDataParallel(model), sizes)
    assert same(expected, actual)
    found = planned(model)
    assert found is not None
    assert found.runs == {"planned": 3, "replanned": 1}


def test_a_later_shape_is_planned_by_its_rank_alone(ranks: Ranks, tmp_path: Path) -> None:
    """No rank waits for another that meets the shape at another step, or never."""
    ranks.run(_later_shapes, tmp_path)


def _failures(rank: int, cache: Path) -> None:
    model = limited(cache)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RanksDiffer, match=r"rank 1 has bytes \d+ and rank 0 has \d+"):
        wrapped(batch(rank, 0, 64 - 16 * rank))
    model.problem = "no reason" * rank
    with pytest.raises(Exception, match="no reason"):
        wrapped(batch(rank, 0))
    model.problem = ""
    assert planned(model) is None
    assert same(train(rank, DistributedDataParallel(build())), train(rank, wrapped))
    found = planned(model)
    assert found is not None
    assert found.runs == {"planned": 3}


def test_what_fails_at_a_first_call_is_raised_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Other shapes, an error of the model on one rank; the next call plans."""
    ranks.run(_failures, tmp_path)
