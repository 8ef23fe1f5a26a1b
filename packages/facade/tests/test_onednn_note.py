"""A plan notes memory that its budget does not cover: that of oneDNN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from remat_executor import step_graph
from remat_facade import Hiremate
from remat_facade.planning.onednn_note import onednn_note
from remat_graph.platforms.base import Flops


class Last(nn.Module):
    """An LSTM that returns its outputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "convolution": (_convolution, torch.ones(2, 3, 6, 6), 2),
    "lstm": (Last, torch.ones(3, 2, 4), 2),
    "bfloat16": (lambda: _linear().bfloat16(), torch.ones(2, 4).bfloat16(), 2),
    "float32": (_linear, torch.ones(2, 4), 0),
    "float64": (lambda: _convolution().double(), torch.ones(2, 3, 6, 6).double(), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_of_onednn_are_counted(case: str, tmp_path: Path) -> None:
    """Kinds of operators, forward and backward, are counted; a model without them has no note."""
    make, x, kinds = CASES[case]
    graph = step_graph(make(), (x,), platform=Flops(), cache_dir=tmp_path)
    said = " ".join(onednn_note(graph))
    assert (kinds > 0) == (f"for {kinds} kinds of operators" in said)
    assert (kinds > 0) == bool(said)


def test_nothing_is_said_without_onednn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own kernels allocate through torch."""
    make, x, _ = CASES["convolution"]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert onednn_note(step_graph(make(), (x,), platform=Flops(), cache_dir=tmp_path)) == ()


def test_a_plan_shows_the_line(tmp_path: Path) -> None:
    """The summary has the note."""
    make, x, _ = CASES["convolution"]
    planned = Hiremate(make(), x, "100%", platform=Flops(), cache_dir=tmp_path, time_limit_s=1.0)
    assert "compiled kernels of oneDNN" in planned.plan.summary()
