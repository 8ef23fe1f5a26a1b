"""transformers' `Trainer`, as its documentation shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import Sentences, bert, gpt2, llama, padded
from tests.helpers.models import import_transformers
from tests.helpers.trainers import QUIET, history

TOOL = "Trainer"


def trainer_of(run: Run, model: nn.Module, *, data: Any = None, **options: Any) -> Any:
    """A repeatable trainer of six steps; `options` are those of `TrainingArguments`, or `trainer=` of it."""
    transformers = import_transformers()
    of_trainer: dict[str, Any] = options.pop("trainer", {})
    settings: dict[str, Any] = {"max_steps": 6, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder / "out"),
        **{**QUIET, **settings, "per_device_eval_batch_size": 2, **options},
    )
    data = data or Sentences()
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, **of_trainer
    )


def finish(run: Run, trainer: Any, **options: Any) -> Any:
    """Train, and keep what must be equal."""
    trainer.train(**options)
    for entry in history(trainer):
        run.losses.extend(entry.values())
    run.keep(trainer.model)
    return trainer


def loads(run: Run, folder: Path, trained: nn.Module, kind: str = "AutoModelForCausalLM") -> None:
    """A checkpoint is one of plain transformers, with the weights of the trained model."""
    transformers = import_transformers()
    loaded = getattr(transformers, kind).from_pretrained(folder)
    run.check_equal("weights of the checkpoint", loaded.state_dict(), trained.state_dict())


@scenario(TOOL, "limit_memory before the trainer")
def plain(run: Run) -> None:
    finish(run, trainer_of(run, run.limited(llama())))


@scenario(TOOL, "RematCallback")
def callback(run: Run) -> None:
    model = llama()
    finish(run, trainer_of(run, model, trainer={"callbacks": run.callbacks("transformers", model)}))


@scenario(TOOL, "gradient accumulation, clipping, schedule")
def accumulation(run: Run) -> None:
    options = {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    finish(run, trainer_of(run, run.limited(llama()), max_steps=3, **options))


@scenario(TOOL, "bf16")
def bf16(run: Run) -> None:
    finish(run, trainer_of(run, run.limited(llama()), bf16=True))


@scenario(TOOL, "evaluation during training")
def evaluation(run: Run) -> None:
    trainer = trainer_of(run, run.limited(llama()), eval_strategy="steps", eval_steps=2)
    finish(run, trainer)
    run.checks["eval_loss is there"] = sum("eval_loss" in e for e in trainer.state.log_history) == 3


@scenario(TOOL, "load_best_model_at_end")
def best_model(run: Run) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(run, run.limited(llama()), load_best_model_at_end=True, **options)
    finish(run, trainer)
    loads(run, Path(trainer.state.best_model_checkpoint), trainer.model)


@scenario(TOOL, "resume_from_checkpoint", plans=2)
def resumed(run: Run) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    finish(run, trainer_of(run, run.limited(llama()), **options))
    checkpoint = run.folder / "out" / "checkpoint-3"
    trainer = trainer_of(run, run.limited(llama()), **options)
    finish(run, trainer, resume_from_checkpoint=str(checkpoint))
    resumed, whole = run.losses[6:], run.losses[:6]
    run.checks["goes on with the losses of the whole training"] = resumed[-3:] == whole[-3:]


@scenario(TOOL, "save_model, from_pretrained")
def saved(run: Run) -> None:
    trainer = finish(run, trainer_of(run, run.limited(gpt2())))
    trainer.save_model(str(run.folder / "model"))
    loads(run, run.folder / "model", trainer.model)


@scenario(TOOL, "varying lengths", plans=4, warns=("planning again",))
def varying_lengths(run: Run) -> None:
    options = {"max_steps": 4, "trainer": {"data_collator": padded}}
    finish(run, trainer_of(run, run.limited(llama()), data=Sentences(varying=True), **options))


@scenario(TOOL, "group_by_length", plans=4, warns=("planning again",))
def grouped(run: Run) -> None:
    transformers = import_transformers()
    names = transformers.TrainingArguments.__dataclass_fields__
    option = {"group_by_length": True} if "group_by_length" in names else {
        "train_sampling_strategy": "group_by_length"
    }  # fmt: skip
    options = {"max_steps": 4, "trainer": {"data_collator": padded}, **option}
    finish(run, trainer_of(run, run.limited(llama()), data=Sentences(varying=True), **options))


@scenario(TOOL, "label smoothing")
def smoothed(run: Run) -> None:
    # The loss is the trainer's own, outside of the model.
    model = run.limited(llama(), reserve_nbytes=96 << 10)
    finish(run, trainer_of(run, model, label_smoothing_factor=0.1))


@scenario(TOOL, "a classifier, compute_metrics")
def classifier(run: Run) -> None:
    """The model itself sets its config's problem_type at its first call."""

    def metrics(prediction: Any) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"accuracy": float(right.mean())}

    options = {"eval_strategy": "steps", "eval_steps": 3, "trainer": {"compute_metrics": metrics}}
    trainer = trainer_of(run, run.limited(bert()), data=Sentences(classes=3), **options)
    finish(run, trainer)
    found = [e["eval_accuracy"] for e in trainer.state.log_history if "eval_accuracy" in e]
    run.losses.extend(found)
    run.checks["metrics were computed"] = len(found) == 2


@scenario(TOOL, "compute_loss_func")
def own_loss(run: Run) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model = run.limited(llama(), reserve_nbytes=96 << 10)
    finish(run, trainer_of(run, model, trainer={"compute_loss_func": loss}))
