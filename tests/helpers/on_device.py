"""Checks of the parts that only a device has: copies, generators, workspaces, the current device.

Each returns how far a run is from the right one, so that tests can require that nothing differs, and plant a
mistake and require that something does.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from remat_executor import allocator_peak
from remat_executor.costs.measure import measure
from remat_facade import Hiremate
from remat_graph import Lane
from remat_offload import CudaMachine, HostPool
from tests.helpers.offmates import MODELS, Run, offmate


def moved(batch: Any, device: str) -> Any:
    """The tensors of a batch on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def distance(expected: Tensor, found: Tensor) -> float:
    """The largest difference in terms of the largest number; infinite if a number is none."""
    expected, found = (t.detach().double().cpu() for t in (expected, found))
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), 1e-30)
    worst = float((expected - found).abs().max()) / scale
    return worst if math.isfinite(worst) else math.inf


def offmate_distance(
    name: str, budget: str, *, in_backward: bool, device: str = "cuda", steps: int = 3, **options: Any
) -> float:
    """How far training by `Offmate` is from plain training: losses, parameters, buffers and states.

    Host and device add in other orders, so a GPU is a few ulp away; the test device is not.
    """
    make, batches = MODELS[name]
    runs = []
    for ours in (False, True):
        model = make() if ours else make().to(device)
        # One tensor at a time, as the host does it: a group of tensors is updated in another order.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        called: Any = model
        if ours:
            sample = moved(batches(0), device)
            called = offmate(
                model, sample, budget, optimizer=optimizer, optimizer_in_backward=in_backward, **options
            )
        run = Run(called, optimizer, lambda step: moved(batches(step), device), in_backward=in_backward)
        runs.append(run.train(steps))
    plain, ours_ = runs
    called.synchronize()
    pairs = [(torch.tensor(plain.losses), torch.tensor(ours_.losses))]
    pairs += zip(plain.model.state_dict().values(), ours_.model.state_dict().values(), strict=True)
    for index, state in plain.optimizer.state_dict()["state"].items():
        other = ours_.optimizer.state_dict()["state"][index]
        pairs += [(torch.as_tensor(value), torch.as_tensor(other[key])) for key, value in state.items()]
    worst = max(distance(a, b) for a, b in pairs)
    called.close()
    return worst


def round_trip_distance(steps: int = 5) -> float:
    """How far values are that went to the host and back, while the memory that they left was written."""
    worst = 0.0
    with HostPool(2**22, device="cuda") as pool, CudaMachine() as machine:
        for step in range(steps):
            x = machine.allocate((64, 1024), (1024, 1), torch.float32).fill_(step + 1)
            x.mul_(3)
            host = pool.allocate((64, 1024), torch.float32)
            saved = machine.copy(Lane.TO_HOST, host, x)
            machine.wait_on_compute(saved)
            del x
            noise = torch.full((64, 1024), -1.0, device="cuda")
            y = machine.allocate((64, 1024), (1024, 1), torch.float32)
            back = machine.copy(Lane.TO_DEVICE, y, host, after=[saved])
            machine.wait_on_compute(back)
            pool.release(host, after=back)
            worst = max(worst, distance(torch.full((64, 1024), 3.0 * (step + 1)), y))
            del noise
    return worst


def straight_back_distance() -> float:
    """How far a value is that is copied back at once, without any compute in between that waits."""
    with HostPool(2**20, device="cuda") as pool, CudaMachine() as machine:
        x = torch.full((64, 1024), 3.0, device="cuda")
        y, host = torch.empty_like(x), pool.allocate((64, 1024), torch.float32).fill_(0)
        saved = machine.copy(Lane.TO_HOST, host, x)
        back = machine.copy(Lane.TO_DEVICE, y, host, after=[saved])
        machine.wait_on_compute(back)
        pool.release(host, after=back)
        machine.wait_on_compute(saved)
        return distance(x, y)


def reused_block_distance() -> float:
    """How far a value is whose host block was released with its copy pending, and written by the next."""
    with HostPool(2**14, device="cuda") as pool, CudaMachine() as machine:
        first = pool.allocate(2**14).fill_(1)
        x = machine.allocate((2**14,), (1,), torch.uint8)
        copied = machine.copy(Lane.TO_DEVICE, x, first)
        pool.release(first, after=copied)
        second = pool.allocate(2**14).fill_(2)
        machine.wait_on_compute(copied)
        found = distance(torch.ones(2**14), x)
        pool.release(second)
    return found


class Dropping(nn.Module):
    """Layers with dropout, cheap to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(nn.functional.gelu(layer(x)), 0.2)
        return x.square().mean()


def dropout_distance(cache: Path, device: str = "cuda") -> float:
    """How far a plan with repeated dropout is from eager: losses, gradients and the generator, two steps."""
    torch.manual_seed(0)
    eager = Dropping().to(device)
    x = torch.randn(256, 64, device=device)
    planned = Hiremate(copy.deepcopy(eager), x, "60%", cache_dir=cache, time_limit_s=1.0, zoo=False)
    assert len(planned.plan.schedule.order) > len(planned.graph.ops)
    found = []
    for module in (eager, planned):
        torch.manual_seed(1)
        seen = []
        for _ in range(2):
            module.zero_grad()
            loss = module(x)
            loss.backward()
            seen += [loss, *(p.grad for p in module.parameters() if p.grad is not None)]
        found.append([*seen, torch.rand(8, device=device)])
    return max(map(distance, *found))


def other_device_ratio() -> float:
    """The time of an op on a second device, as a multiple of its time while that device is current."""

    def product() -> Any:
        x = torch.randn(256, 256, device="cuda:1")
        return lambda: x @ x

    with torch.cuda.device(1):
        same = measure({"mm": product}, "cuda:1")["mm"].time_s
    return measure({"mm": product}, "cuda:1")["mm"].time_s / same


def first_step_excess_nbytes(cache: Path) -> int:
    """Bytes above its budget that the first step of a plan takes, with workspaces not yet there."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces")  # noqa: B009 - not a name of every build
    clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    x = torch.randn(32, 64, device="cuda")
    planned = Hiremate(model, x, "100%", cache_dir=cache, time_limit_s=1.0, zoo=False)
    tangent = torch.ones(32, 64, device="cuda")
    record = allocator_peak(lambda: planned(x).backward(tangent), "cuda")
    return max(0, record.peak_nbytes - planned.plan.budget_nbytes)
