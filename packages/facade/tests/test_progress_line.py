"""While a step is planned, a terminal shows the stage; pipes, notebooks and other callbacks get nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat_facade import limit_memory
from remat_facade.entrypoints import progress_line
from remat_graph import Roofline
from remat_solvers import InfeasibleBudget

ERASE = "\r\x1b[K"


class Terminal(io.StringIO):
    """What a program writes to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """On a terminal of 40 columns."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    return {"cache_dir": tmp_path, "platform": Roofline(), "zoo": False, "time_limit_s": 1.0}


def step(budget: str, **options: Any) -> None:
    """The first of a model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    limit_memory(model, budget, **options)(torch.randn(4, 8)).sum().backward()


def written(stream: io.StringIO, budget: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """To stderr during a first step."""
    monkeypatch.setattr(sys, "stderr", stream)
    step(budget, **options)
    return stream.getvalue()


def test_a_terminal_shows_the_stages(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in place of the last one, within the width; the line is empty at the end."""
    text = written(Terminal(), "1MiB", monkeypatch, **options)
    stages = text.split(ERASE)
    assert stages[0] == ""
    assert stages[1] == "remat: capture"
    assert any(each.startswith("remat: planning") for each in stages)
    assert stages[-1] == ""
    assert max(map(len, stages)) == 39
    assert "\n" not in text


def test_the_line_is_erased_after_an_error(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    with pytest.raises(InfeasibleBudget):
        written(stream, "64B", monkeypatch, **options)
    assert stream.getvalue().endswith(ERASE)


def test_nothing_elsewhere(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe, on a terminal that cannot erase, on the second rank, and with a callback of one's own."""
    assert written(io.StringIO(), "1MiB", monkeypatch, **options) == ""
    stages: list[str] = []
    assert written(Terminal(), "1MiB", monkeypatch, on_progress=stages.append, **options) == ""
    assert stages[0] == "capture"
    assert stages[-1].startswith("planned")
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    step("1MiB", **options)
    monkeypatch.setattr(progress_line, "_is_first_rank", lambda: False)
    assert written(Terminal(), "1MiB", monkeypatch, **options) == ""
    monkeypatch.undo()
    monkeypatch.setenv("TERM", "dumb")
    assert written(Terminal(), "1MiB", monkeypatch, **options) == ""
