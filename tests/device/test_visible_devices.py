"""Processes that CUDA_VISIBLE_DEVICES gives a part of the devices, or none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("test_device")]

SCRIPT = """
import sys
import torch
from torch import nn
from remat_executor import PlannedModule
from remat_facade import Hiremate, RematError

print(torch.cuda.device_count())
for name in ("cuda", "cuda:1"):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.ones(256, 64)
    try:
        if torch.cuda.device_count() > (name == "cuda:1"):
            planned = Hiremate(model.to(name), x.to(name), "100%", time_limit_s=1.0, zoo=False)
            planned(x.to(name)).sum().backward()
            print(name, next(planned.parameters()).grad.device)
        else:
            PlannedModule(model, (x,), {}, None, device=torch.device(name))
    except RematError as error:
        print(name, error)
"""


@pytest.mark.parametrize(
    ("visible", "lines"),
    [
        ("1", ["1", "cuda cuda:0", "cuda:1 the device is cuda:1, and this machine has 1 of that type"]),
        ("1,7,0", ["1", "cuda cuda:0", "cuda:1 the device is cuda:1, and this machine has 1 of that type"]),
        ("1,0", ["2", "cuda cuda:0", "cuda:1 cuda:1"]),
        ("", ["0", "cuda the device is cuda, and torch", "cuda:1 the device is cuda:1, and torch"]),
    ],
)
def test_the_visible_ones_are_the_machines(visible: str, lines: list[str], tmp_path: Path) -> None:
    """A device that is left out is one that the machine lacks: one line, never the end of the process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "tests.device", str(script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "REMAT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found
