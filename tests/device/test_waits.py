"""How often the host waits for the device in a planned step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from remat_executor import RematWarning
from remat_facade import Hiremate
from tests.device.plugin import Device
from tests.helpers.offmates import offmate
from tests.offmate.test_left_out_outputs import WIDTH, TwoOutputs

pytestmark = pytest.mark.cuda


def test_a_planned_step_waits_for_nothing(test_device: Device, tmp_path: Path) -> None:
    """The first may; with dropout, whose states are read, and with recomputation."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(256, 64, device="cuda", requires_grad=True)
    planned = Hiremate(model, x, "70%", cache_dir=tmp_path, time_limit_s=1.0, zoo=False)
    assert planned.plan.overhead > 0
    planned(x).sum().backward()
    test_device.reset_counts()
    planned(x).sum().backward()
    assert test_device.launches()["aten::addmm"] >= 4
    assert test_device.syncs() == {}


def test_one_wait_where_gradients_move(test_device: Device, tmp_path: Path) -> None:
    """One read of a value for the gradients on the host and one for those on the device, for all parts."""
    model, x = TwoOutputs().cuda(), torch.ones(4, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ours = offmate(model, x, "24KiB", optimizer=optimizer, cache_dir=tmp_path, part_nbytes=0)
    assert ours.parts > 4
    loss = ours(x)[0].sum()
    test_device.reset_counts()
    loss.backward()
    assert 1 <= test_device.syncs().get("aten::_local_scalar_dense", 0) <= 2
    ours.close()


def test_planning_warns_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuDNN would try algorithms in the first backward."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    with pytest.warns(RematWarning, match="cudnn.benchmark is on"):
        Hiremate(model, x, "100%", cache_dir=tmp_path, time_limit_s=1.0, zoo=False)
