"""The callback of transformers' Trainer: evaluation, the best model, resuming and saving as without it."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_facade import planned, release
from remat_graph import BadBudget
from remat_solvers import UnknownSolver
from tests.helpers.models import import_transformers
from tests.helpers.offmates import PLATFORM
from tests.helpers.small_llama import WORDS, small_llama
from tests.helpers.trainers import QUIET, history

hf = import_transformers()


pytestmark = pytest.mark.usefixtures("only_our_warnings_count")


def sentences() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def callback(cache: Path, budget: str = "60%", **options: Any) -> Any:
    from remat_facade.integrations.transformers import RematCallback

    return RematCallback(budget, platform=PLATFORM, cache_dir=cache, time_limit_s=1.0, zoo=False, **options)


def trained(
    model: nn.Module, folder: Path, callbacks: list[Any], *, resume: bool = False, **options: Any
) -> Any:
    settings = hf.TrainingArguments(str(folder), **(QUIET | options))
    data = sentences()
    trainer = hf.Trainer(model, settings, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    "options",
    [
        EVALUATED | {"load_best_model_at_end": True},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "save_strategy": "no"},
        {"bf16": True, "gradient_checkpointing": True, "save_strategy": "no"},
    ],
    ids=["evaluated", "accumulated", "16 bits, checkpointing"],
)
def test_the_same_training(options: dict[str, Any], tmp_path: Path) -> None:
    plain, model = small_llama(), small_llama()
    expected = trained(plain, tmp_path / "plain", [], num_train_epochs=2, **options)
    trainer = trained(model, tmp_path / "planned", [callback(tmp_path)], num_train_epochs=2, **options)
    kept = [entry for entry in history(trainer) if entry]
    assert kept == [entry for entry in history(expected) if entry]
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 8
    assert found.plan.overhead > 0
    pairs = zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    (figures,) = [entry for entry in trainer.state.log_history if "remat/peak_nbytes" in entry]
    assert 0 < figures["remat/peak_nbytes"] <= figures["remat/budget_nbytes"]
    assert figures["step"] <= 1


def test_outputs_that_a_trainer_drops(tmp_path: Path) -> None:
    """A Trainer holds the loss alone when the backward begins: no warning, the same training."""
    plain, model = small_llama(), small_llama()
    options = {"max_steps": 2, "save_strategy": "no"}
    trained(plain, tmp_path / "plain", [], **options)
    trained(model, tmp_path / "planned", [callback(tmp_path, outputs="dropped")], **options)
    found = planned(model)
    assert found is not None
    assert found.graph.dropped
    assert found.runs["planned"] == 2
    pairs = zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Plugin:
    """Stands for axolotl's class of plugins, which needs an environment of its own."""


def test_the_keys_of_axolotls_yaml_reach_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left out keep their defaults; a wrong word is refused where the YAML is read."""
    base: Any = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = Plugin
    monkeypatch.setitem(sys.modules, "axolotl", types.ModuleType("axolotl"))
    monkeypatch.setitem(sys.modules, "axolotl.integrations", types.ModuleType("axolotl.integrations"))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    ours: Any = importlib.import_module("remat_facade.integrations.axolotl")
    monkeypatch.delitem(sys.modules, ours.__name__)

    def options(**keys: object) -> dict[str, object]:
        (made,) = ours.RematPlugin().add_callbacks_pre_trainer(ours.RematArgs(**keys), None)
        found: dict[str, object] = made.options
        return found

    given = options(remat_budget="1GiB", remat_outputs="dropped", remat_gradients="present")
    assert ("dropped", "present") == (given["outputs"], given["gradients"])
    assert {None} == set(options(remat_budget="1GiB").values())
    with pytest.raises(ValueError, match=r"remat_outputs\n.*'kept' or 'dropped'"):
        options(remat_outputs="gone")


def test_a_checkpoint_is_resumed_and_loads_plainly(tmp_path: Path) -> None:
    """Also by a model that was never planned, and by transformers alone."""
    options = {"save_steps": 2, "lr_scheduler_type": "constant"}
    plain, begun, resumed = small_llama(), small_llama(), small_llama()
    trained(plain, tmp_path / "plain", [], max_steps=4, **options)
    folder = tmp_path / "planned"
    trained(begun, folder, [callback(tmp_path)], max_steps=2, **options)
    trained(resumed, folder, [callback(tmp_path)], max_steps=4, resume=True, **options)
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
    release(resumed)
    assert type(loaded) is type(resumed) is type(plain)
    for other in (resumed, loaded):
        pairs = zip(plain.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def test_trackers_get_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases by its run, if one is active."""
    pytest.importorskip("accelerate")  # it looks for the real one while it is imported
    given: dict[str, Any] = {}
    run = types.SimpleNamespace(summary=given)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    ours = callback(tmp_path)
    model = small_llama()
    for _ in range(2):
        trained(model, tmp_path / "planned", [ours], max_steps=1, save_strategy="no")
    assert given["remat/calls_planned"] == 1.0
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 2  # the second training keeps the plan
    assert given["remat/plan"] == found.plan.summary()


def test_wrong_arguments_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user wrote them, not after the data are loaded."""
    from remat_facade.integrations.transformers import RematCallback

    for budget, advice in (
        ("forty", "give whole"),
        ("40", "did you mean"),
        (0, "give whole"),
        (-1, "give whole"),
    ):
        with pytest.raises(BadBudget, match=advice):
            RematCallback(budget)
    with pytest.raises(TypeError, match=r"RematCallback\(\) got an unexpected keyword argument 'bugdet'"):
        RematCallback(bugdet="40%")  # type: ignore[call-arg]
    with pytest.raises(UnknownSolver):
        RematCallback("40%", solver="none")
    monkeypatch.setenv("REMAT_BUDGET", "many")
    with pytest.raises(BadBudget, match="many"):
        RematCallback()
