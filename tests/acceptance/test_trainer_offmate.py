"""transformers' Trainer with `offmate`: its own optimizer, with values on the host, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_facade import Offmate, limit_memory, planned
from remat_offload import OffloadMisuse
from tests.helpers.models import import_transformers
from tests.helpers.offmates import LINKS, PLATFORM
from tests.helpers.small_llama import WORDS, small_llama
from tests.helpers.trainers import QUIET, history

hf = import_transformers()

pytestmark = pytest.mark.usefixtures("only_our_warnings_count")


class Unplaced(hf.TrainingArguments):  # type: ignore[name-defined]
    """For models that do not fit on the device."""

    place_model_on_device = False


def sentences() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def trainer_in(folder: Path, *, of_trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    kind = hf.TrainingArguments if options.pop("placed", True) else Unplaced
    settings = kind(str(folder), **(QUIET | {"max_steps": 4, "save_steps": 2} | options))
    settings._n_gpu = min(settings.n_gpu, 1)  # also where two devices are seen
    data = sentences()
    of_trainer = {"model": small_llama(), **(of_trainer or {})}
    return hf.Trainer(args=settings, train_dataset=data, eval_dataset=data, **of_trainer)


def offloaded(trainer: Any, cache: Path, **options: Any) -> Offmate:
    from remat_facade.integrations.transformers import offmate

    known: dict[str, Any] = {"host_budget": "64MiB", "platform": PLATFORM, "links": LINKS, "zoo": False}
    return offmate(trainer, "40%", cache_dir=cache, time_limit_s=1.0, **known | options)


def same_training(trainer: Any, other: Any) -> bool:
    """Losses, the norms of gradients, and weights."""
    logs = [
        [(e["loss"], e["grad_norm"]) for e in each.state.log_history if "loss" in e]
        for each in (trainer, other)
    ]
    states = [each.model.state_dict() for each in (trainer, other)]
    assert logs[0]
    assert history(trainer) == history(other)
    return logs[0] == logs[1] and all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"gradient_accumulation_steps": 2, "bf16": True, "max_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "optim": "sgd"},
    ],
    ids=["groups, clipping, schedule", "accumulation, 16 bits", "evaluation, best model"],
)
def test_the_same_training_by_one_plan(options: dict[str, Any], tmp_path: Path) -> None:
    plain = trainer_in(tmp_path / "plain", **options)
    plain.train()
    trainer = trainer_in(tmp_path / "ours", **options)
    model = offloaded(trainer, tmp_path)
    trainer.train()
    assert same_training(trainer, plain)
    assert dict(model.runs).get("replanned", 0) == 0
    assert model.runs["planned"] == 4
    assert planned(trainer.model) is model is trainer.model
    assert "a part must move" in model.plan.summary()


def test_optimizer_states_are_saved_and_resumed(tmp_path: Path) -> None:
    """From a checkpoint of plain training and of its own; plain training resumes from its checkpoint."""
    plain = trainer_in(tmp_path / "plain", weight_decay=0.1)
    plain.train()
    trainer = trainer_in(tmp_path / "ours", weight_decay=0.1)
    offloaded(trainer, tmp_path)
    trainer.train()
    for begun, resumes in (("ours", True), ("plain", True), ("ours", False)):
        resumed = trainer_in(tmp_path / "resumed", weight_decay=0.1)
        if resumes:
            offloaded(resumed, tmp_path)
        resumed.train(resume_from_checkpoint=str(tmp_path / begun / "checkpoint-2"))
        assert same_training(resumed, plain), (begun, resumes)


def test_a_batch_that_is_given_is_planned_for(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    batch = {name: torch.stack([row[name] for row in sentences()[:2]]) for name in ("input_ids", "labels")}
    trainer.get_train_dataloader = lambda: pytest.fail("the loader was read")
    model = offloaded(trainer, tmp_path, sample=batch)
    del trainer.get_train_dataloader
    trainer.train()
    assert dict(model.runs) == {"planned": 4}


def test_generators_are_unchanged(tmp_path: Path) -> None:
    """Also where the loader shuffles and the collator draws."""
    trainer = trainer_in(tmp_path)
    before = torch.get_rng_state()
    offloaded(trainer, tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_trainings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    from remat_facade.integrations.transformers import RematCallback

    for other in (small_llama(), None):
        with pytest.raises(OffloadMisuse, match=r"expected a transformers\.Trainer; make the Trainer first"):
            offloaded(other, tmp_path)
    with pytest.raises(OffloadMisuse, match="steps the optimizer, and clips before; omit it"):
        offloaded(trainer_in(tmp_path), tmp_path, optimizer_in_backward=True)
    config = tmp_path / "offmate.yaml"
    config.write_text("type: offmate\noptimizer_in_backward: true\n", encoding="utf-8")
    with pytest.raises(OffloadMisuse, match="optimizer_in_backward is set"):
        offloaded(trainer_in(tmp_path), tmp_path, config=config)

    def init() -> nn.Module:
        return small_llama()

    with pytest.raises(OffloadMisuse, match="model_init"):
        offloaded(trainer_in(tmp_path, of_trainer={"model": None, "model_init": init}), tmp_path)
    limited = {"model": limit_memory(small_llama(), "60%")}
    for of_trainer in (limited, {"callbacks": [RematCallback("60%")]}):
        with pytest.raises(OffloadMisuse, match="omit the limit"):
            offloaded(trainer_in(tmp_path, of_trainer=of_trainer), tmp_path)
    trainer = trainer_in(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(OffloadMisuse, match="one process on one device"):
        offloaded(trainer, tmp_path)


@pytest.mark.cuda
def test_a_model_on_the_host_is_not_moved_to_the_device_as_a_whole(tmp_path: Path) -> None:
    """Neither by the trainer nor by accelerate; its twin on the CPU compares bits."""
    seen: list[set[str]] = []

    class Look(hf.TrainerCallback):  # type: ignore[name-defined]
        def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            seen.append({p.device.type for p in model.parameters()})

    trainer = trainer_in(tmp_path, use_cpu=False, placed=False, of_trainer={"callbacks": [Look()]})
    parameters = list(trainer.model.parameters())
    before: list[set[str]] = []

    def on_progress(*_: Any) -> None:
        if not before:
            before.append({p.device.type for p in parameters})

    model = offloaded(trainer, tmp_path, on_progress=on_progress)
    assert before == [{"cpu"}]
    trainer.train()
    assert trainer.args.device.type == "cuda"
    assert model.runs == {"planned": 4}
    (devices,) = seen
    assert "cpu" in devices  # the plan says which parameters begin on the device
