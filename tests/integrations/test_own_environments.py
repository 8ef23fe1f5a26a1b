"""Trainers that demand other versions of transformers than the tests: each in an environment of its own."""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks.integrations.scenario import Run
from remat_executor import RematWarning
from tests.helpers.example import run

SCENARIOS = {"llamafactory": "llamafactory_stages", "axolotl": "axolotl_yaml"}


@pytest.mark.parametrize("others", [(), ("--lora",)], ids=["full", "lora"])
@pytest.mark.parametrize("tool", ["llamafactory", "axolotl"])
def test_one_line_changes_nothing_but_the_memory(tool: str, others: tuple[str, ...], tmp_path: Path) -> None:
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is in the environment `{tool}` only")
    expected, _ = run(f"with_{tool}", *others, cache=tmp_path)
    losses, said = run(f"with_{tool}", *others, "--budget", "60%", cache=tmp_path)
    assert len(losses) == 8
    assert losses == expected
    assert "within a budget of" in said


def parts_only(trainer: Any, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
    """A loss from the parts of a model, past the model."""
    hidden = model.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    logits = model.lm_head(hidden.last_hidden_state)
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


@pytest.mark.parametrize("tool", SCENARIOS)
def test_a_training_of_the_parts_alone_warns(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both derive from the trainer of transformers; axolotl writes warnings to its log."""
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is in the environment `{tool}` only")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    monkeypatch.setattr(importlib.import_module("transformers").Trainer, "compute_loss", parts_only)
    scenarios = importlib.import_module(f"benchmarks.integrations.{SCENARIOS[tool]}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", RematWarning)
        scenarios.train(Run(planned=True, folder=tmp_path, cache=tmp_path), max_steps=2)
    ours = [str(each.message) for each in caught if issubclass(each.category, RematWarning)]
    ours += [line for line in "".join(capfd.readouterr()).splitlines() if ": RematWarning: " in line]
    assert len(ours) == 1
    assert "was not called" in ours[0]
