"""The plan is in the trackers of transformers' `Trainer`, in the real ones where they are installed."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.integrations.hf_trainer import trainer_of
from benchmarks.integrations.scenario import Run
from benchmarks.integrations.tiny import llama, tool
from remat_facade import planned
from remat_facade.integrations.plan_report import plan_figures, plan_text
from remat_facade.integrations.tensorboard import latest_run

ABSENT = "{} is in the environment `integrations` only"


def trained(tmp_path: Path, tracker: str) -> Any:
    """A trainer that reports to a tracker."""
    run = Run(planned=True, folder=tmp_path, cache=tmp_path)
    model = llama()
    callbacks = {"callbacks": run.callbacks("transformers", model)}
    trainer = trainer_of(run, model, max_steps=2, report_to=[tracker], trainer=callbacks)
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")  # what the tracker warns of is its own
def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the trainer's own run, whose file stays the only one of its folder."""
    pytest.importorskip("tensorboard", reason=ABSENT.format("tensorboard"))
    reader = tool("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    model = trained(tmp_path, "tensorboard").model
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert len([path for path in run.iterdir() if path.is_file()]) == 1
    events = reader.EventAccumulator(str(run / "remat")).Reload()
    figures = plan_figures(model)
    for name in ("remat/budget_nbytes", "remat/peak_nbytes", "remat/overhead"):
        (event,) = events.Scalars(name)
        assert (event.step, event.value) == (1, pytest.approx(figures[name], rel=1e-6))  # kept in 32 bits
    (text,) = events.Tensors("remat/plan/text_summary")
    found = planned(model)
    assert found is not None
    assert text.tensor_proto.string_val[0].decode() == found.plan.summary()


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, in the summary of the run."""
    wandb = pytest.importorskip("wandb", reason=ABSENT.format("wandb"))
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    try:
        model = trained(tmp_path, "wandb").model
        assert wandb.run is not None
        figures = plan_figures(model) | {"remat/calls_planned": 1.0}  # as it was after the first step
        assert {name: wandb.run.summary[name] for name in figures} == figures
        assert wandb.run.summary["remat/plan"] == plan_text(model)
    finally:
        wandb.finish()


def events(folder: Path, age_s: int) -> None:
    """A folder with events that were written some seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "events.out.tfevents.1.machine"
    file.touch()
    os.utime(file, (1_000_000 - age_s,) * 2)


def test_the_run_is_the_one_with_the_newest_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the folders that an earlier plan made."""
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    arguments = types.SimpleNamespace(output_dir=str(tmp_path))
    assert latest_run(arguments) == tmp_path / "runs"
    for name, age_s in {"z": 30, "a": 20, "m": 25, "a/remat": 10}.items():
        events(tmp_path / "runs" / name, age_s)
    assert latest_run(arguments) == tmp_path / "runs" / "a"
    arguments.logging_dir = str(tmp_path / "named")  # an argument of older versions
    events(tmp_path / "named", 40)
    assert latest_run(arguments) == tmp_path / "named"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs" / "z"))
    assert latest_run(arguments) == tmp_path / "runs" / "z"
