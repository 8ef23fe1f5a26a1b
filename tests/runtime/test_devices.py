"""On a GPU as on the CPU: exact with fused attention, within the budget, usable after a shortage."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat_executor import allocator_peak
from remat_facade import Hiremate
from remat_graph import OpCost

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
ATTENTION = "aten._scaled_dot_product_"
WIDTH, LENGTH, HEADS, BATCH = 64, 128, 2, 4


class Attention(nn.Module):
    """Two blocks of attention with dropout inside the kernel, where the device has such a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for into, norm in zip(self.inputs, self.norms, strict=True):
            query, key, value = into(norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(2, 3)
            dropped = 0.1 if x.device.type == "cuda" else 0.0  # the CPU has no fused kernel with dropout
            found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
            x = x + F.dropout(found.transpose(1, 2).flatten(-2), 0.1)
        return x.float().square().mean()


def built(device: str) -> tuple[nn.Module, Tensor]:
    """The model and a batch; half precision on a GPU, whose quickest kernels want it."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, x = Attention().to(device, dtype), torch.randn(BATCH, LENGTH, WIDTH)
    return model, x.to(device, dtype)


def step(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Loss and gradients, and what the generator draws after it."""
    module.zero_grad()
    torch.manual_seed(3)
    loss: Tensor = module(x)
    loss.backward()
    drawn = torch.rand(4, device=x.device)
    return loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None), drawn


def planned(model: nn.Module, x: Tensor, cache: Path) -> Hiremate:
    """A plan after a short search."""
    return Hiremate(model, x, "70%", cache_dir=cache, time_limit_s=2.0)


@pytest.mark.parametrize("device", DEVICES)
def test_fused_attention(device: str, tmp_path: Path) -> None:
    """One op in the forward, one in the backward, repeated with the same dropout, to the bit."""
    model, x = built(device)
    original = copy.deepcopy(model)
    module = planned(model, x, tmp_path)
    kernels = [op for op in module.graph.ops if op.target.startswith(ATTENTION)]
    assert [op.backward for op in kernels] == [False, False, True, True]
    assert len(module.plan.schedule.order) > len(module.graph.ops)
    expected, found = step(original, x), step(module, x)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_seeds_of_attention(kernel: SDPBackend, tmp_path: Path) -> None:
    """Attention with dropout plans and steps with each kernel: it may return its seeds on the host.

    On the CPU test_arguments.py has an operator that reads the seeds of its forward on the host.
    """
    model, x = built("cuda")
    if kernel is SDPBackend.EFFICIENT_ATTENTION:
        model, x = model.float(), x.float()
    original = copy.deepcopy(model)
    with sdpa_kernel(kernel):
        module = planned(model, x, tmp_path)
        backward = [op for op in module.graph.ops if op.target.startswith(ATTENTION) and op.backward]
        assert len(backward) == 2
        expected, found = step(original, x), step(module, x)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("device", DEVICES)
def test_the_allocator_stays_within_the_budget(device: str, tmp_path: Path) -> None:
    """By the device's own count, from the second step on, when what is set up once is there."""
    model, x = built(device)
    module = planned(model, x, tmp_path)
    step(module, x)
    module.zero_grad()

    def run() -> Tensor:
        loss: Tensor = module(x)
        loss.backward()
        return loss

    peak_nbytes = allocator_peak(run, torch.device(device)).peak_nbytes
    assert 0.9 * module.plan.peak_nbytes <= peak_nbytes <= module.plan.budget_nbytes


@attrs.frozen(kw_only=True)
class SlowHost:
    """A platform whose host needs longer to issue an op than the device to run it."""

    name: str = "slow host"

    def time_s(self, cost: OpCost) -> float:
        """One microsecond."""
        return 1e-6

    def issue_s(self, cost: OpCost) -> float:
        """Ten."""
        return 1e-5


@pytest.mark.parametrize(
    ("device", "runtime"),
    [
        ("cpu", "eager"),
        pytest.param("cuda", "eager", marks=pytest.mark.cuda),
        pytest.param("cuda", "cudagraph", marks=pytest.mark.cuda),
    ],
)
def test_a_small_model_is_launch_bound(device: str, runtime: str, tmp_path: Path) -> None:
    """Its plan says so and predicts the time of issuing; recorded graphs are issued at once."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(device)
    x = torch.randn(4, 8, device=device)
    module = Hiremate(model, x, "64KiB", runtime=runtime, platform=SlowHost(), cache_dir=tmp_path)
    plan = module.plan
    assert ("launch-bound" in plan.summary()) == (runtime == "eager")
    assert (plan.issue_s > 0.0) == (runtime == "eager")
    assert plan.time_s == pytest.approx((1e-5 if plan.issue_s else 1e-6) * len(plan.schedule.order))


@pytest.mark.cuda
def test_the_time_of_issuing_on_a_gpu(tmp_path: Path) -> None:
    """It is measured, and a step is not predicted to be shorter; test_device_timer.py simulates it."""
    model, x = built("cuda")
    plan = planned(model, x, tmp_path).plan
    assert 0.0 < plan.issue_s <= plan.time_s


def blocks_that_fit(nbytes: int) -> Iterator[Tensor]:
    """Blocks until no further one fits: segments that are reserved already have room."""
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            yield torch.empty(nbytes, dtype=torch.uint8, device="cuda")


@pytest.mark.cuda
def test_a_shortage_on_a_gpu(tmp_path: Path) -> None:
    """A fraction that holds the plan lets it run; one that does not is an error, and the next step is right.

    On the CPU test_failures.py plants the same error in any op.
    """
    model, x = built("cuda")
    module = planned(model, x, tmp_path)
    expected = step(module, x)
    module.zero_grad()
    torch.cuda.empty_cache()
    total_nbytes = torch.cuda.get_device_properties(0).total_memory
    room_nbytes = torch.cuda.memory_reserved() + 2 * module.plan.budget_nbytes + (64 << 20)
    try:
        torch.cuda.set_per_process_memory_fraction(room_nbytes / total_nbytes)
        assert all(map(torch.equal, expected, step(module, x)))
        module.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total_nbytes)
        filled = [block for nbytes in (8 << 20, 2 << 20, 1 << 19, 512) for block in blocks_that_fit(nbytes)]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(module, x)
        assert "the plan needs" in caught.value.__notes__[0]
        del caught
        del filled
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(map(torch.equal, expected, step(module, x)))
