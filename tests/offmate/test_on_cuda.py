"""Offmate on CUDA trains as plain training does, in both styles, with values that move."""

from __future__ import annotations

import pytest
import torch

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


def test_to_the_host_and_back() -> None:
    """While the memory that the values left is written, and the host block is used again."""
    assert round_trip_distance() == 0.0
    assert straight_back_distance() == 0.0
    assert reused_block_distance() == 0.0
