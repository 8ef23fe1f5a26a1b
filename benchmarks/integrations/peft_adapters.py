"""PEFT's adapters, in a plain loop and in `Trainer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.integrations.hf_trainer import finish, trainer_of
from benchmarks.integrations.plain_loops import steps_of
from benchmarks.integrations.scenario import Run, scenario, seed_everything
from benchmarks.integrations.tiny import batches, llama, tool


def adapted(model: nn.Module | None = None, **options: Any) -> Any:
    """A model with LoRA adapters that have dropout."""
    peft = tool("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(llama() if model is None else model, config)


def adapters_load(run: Run, model: Any) -> None:
    """What was saved are adapters of plain PEFT, with the same weights."""
    peft = tool("peft")
    model.save_pretrained(run.folder / "adapters")
    seed_everything()
    loaded = peft.PeftModel.from_pretrained(llama(), run.folder / "adapters")
    run.check_equal(
        "adapters load in plain PEFT",
        peft.get_peft_model_state_dict(loaded),
        peft.get_peft_model_state_dict(model),
    )


@scenario("PEFT", "LoRA in a plain loop, saved and loaded")
def plain(run: Run) -> None:
    model = run.limited(adapted().train())
    steps_of(run, model, batches(4))
    adapters_load(run, model)


@scenario("PEFT", "LoRA on a model limited before get_peft_model")
def limited_before(run: Run) -> None:
    model = adapted(run.limited(llama())).train()
    steps_of(run, model, batches(4))
    adapters_load(run, model)


@scenario("PEFT", "LoRA in Trainer")
def in_trainer(run: Run) -> None:
    trainer = trainer_of(run, run.limited(adapted()), eval_strategy="steps", eval_steps=3)
    finish(run, trainer)
    adapters_load(run, trainer.model)


@scenario("PEFT", "LoRA in Trainer, RematCallback")
def by_callback(run: Run) -> None:
    model = adapted()
    finish(run, trainer_of(run, model, trainer={"callbacks": run.callbacks("transformers", model)}))


@scenario("PEFT", "merge_and_unload after training")
def merged(run: Run) -> None:
    model = run.limited(adapted().train())
    steps_of(run, model, batches(3))
    whole = model.merge_and_unload()
    run.keep(whole, "merged ")
    with torch.no_grad():
        run.losses.append(whole.eval()(**batches(1)[0]).loss.item())


@scenario("PEFT", "adapters changed midway", plans=2, warns=("planning again",))
def two_adapters(run: Run) -> None:
    peft = tool("peft")
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    model = run.limited(model.train())
    steps_of(run, model, batches(2))
    model.set_adapter("second")
    steps_of(run, model, batches(4)[2:])
