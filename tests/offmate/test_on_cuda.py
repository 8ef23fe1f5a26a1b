"""Offmate on CUDA trains as plain training does, in both styles, with values that move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat_facade import Offmate
from remat_offload import CudaMachine, HostPool
from tests.helpers.offmates import LINKS
from tests.helpers.on_device import (
    offmate_distance,
    reused_block_distance,
    round_trip_distance,
    straight_back_distance,
)

pytestmark = pytest.mark.cuda
CLOSE = 1e-4  # host and device add in other orders; a missing wait changes the first digits


@pytest.mark.parametrize(
    ("name", "budget", "in_backward"),
    [("llama", "35%", False), ("llama", "60%", True), ("convolutions", "60%", True)],
)
def test_numbers_of_plain_training(
    name: str, budget: str, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert offmate_distance(name, budget, in_backward=in_backward) < CLOSE


def test_the_second_device() -> None:
    """While the first one is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert offmate_distance("llama", "60%", in_backward=True, device="cuda:1") < CLOSE


def test_small_tensors_are_within_the_budget() -> None:
    """Buffers, inputs and the counts of steps that a fused optimizer keeps on the device, each in a block."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU())]
    before_nbytes = torch.cuda.memory_allocated()
    model, x = nn.Sequential(*layers), torch.randn(4, 48, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    machine, pool = CudaMachine("cuda"), HostPool(1 << 26, device="cuda")
    options = {"machine": machine, "pool": pool, "links": LINKS, "optimizer_in_backward": True}
    module = Offmate(model, x, "80%", optimizer=optimizer, zoo=False, **options)
    module(x).square().mean().backward()  # takes the workspaces of libraries
    module.synchronize()
    held_nbytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        module(x).square().mean().backward()
    module.synchronize()
    counts = [state["step"] for state in optimizer.state.values() if state["step"].is_cuda]
    assert len(counts) > 10
    libraries_nbytes = workspaces_nbytes(held_nbytes)
    asked_nbytes = module.plan.budget_nbytes + module._remat_training.external_nbytes
    assert torch.cuda.max_memory_allocated() - before_nbytes - libraries_nbytes <= asked_nbytes


def workspaces_nbytes(held_nbytes: int) -> int:
    """What cuBLAS keeps of the bytes that are allocated."""
    torch._C._cuda_clearCublasWorkspaces()
    return held_nbytes - torch.cuda.memory_allocated()


def test_to_the_host_and_back() -> None:
    """While the memory that the values left is written, and the host block is used again."""
    assert round_trip_distance() == 0.0
    assert straight_back_distance() == 0.0
    assert reused_block_distance() == 0.0
