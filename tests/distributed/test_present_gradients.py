"""Under DDP with `gradient_as_bucket_view`, every `.grad` exists from the second step on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat_executor import MemoryMeter, PlannedModule
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Grads, get_platform, simulate
from tests.helpers.ranks import Ranks

SCALING_NBYTES = 12  # while DDP divides a gradient by the number of ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


class Chain(nn.Module):
    """Large layers, so that gradients take more than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return x.square().mean()


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def _bucket_views(rank: int) -> None:
    sample = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    planner = RecomputePlanner(budget="60%", method=Method(parameters={"moves": 2000}))
    options = {"platform": get_platform("flops"), "part_nbytes": 0}
    planned = PlannedModule(chain(), (sample,), {}, planner, gradients="present", **options)
    # A plan for gradients that are there, in a budget that does not hold new ones with it.
    assert simulate(planned.graph, planned.plan.schedule).peak_nbytes > planned.plan.peak_nbytes
    ddp = [
        DistributedDataParallel(each, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
        for each in (planned, chain())
    ]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in ddp]
    states = []
    for step in range(4):
        for each, optimizer in zip(ddp, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            gc.collect()
            with MemoryMeter(each, sample) as meter:
                each(sample).backward()
            if each is ddp[0]:
                states.append(planned.plan.grads)
                if step:
                    assert meter.peak_nbytes <= planned.plan.live_peak_nbytes + SCALING_NBYTES
            optimizer.step()
        for mine, theirs in zip(ddp[0].parameters(), ddp[1].parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(mine.grad, theirs.grad)
    assert states[1:] == [Grads.PRESENT] * 3


def test_a_plan_for_bucket_views(ranks: Ranks) -> None:
    """Bits are eager DDP's, and peaks those of the plan."""
    ranks.run(_bucket_views)
