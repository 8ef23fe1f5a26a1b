"""TRL's trainers on token ids and on a tokenizer made in code.

TRL computes its loss in tiles of 32768 words, however few words a model has. Here they are as small as the
vocabulary, or they would be most of a tiny step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.integrations.hf_trainer import finish, loads
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import WORDS, Sentences, llama, tokenizer, tool
from tests.helpers.trainers import QUIET

STEPS = 4
TILE = 128


def small_tiles() -> Any:
    """TRL with tiles for a small vocabulary."""
    tool("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE = TILE
    return tool("trl")


def sentences(*, varying: bool = False) -> Any:
    """Token ids, as `SFTTrainer` takes them."""
    data = Sentences(16, varying=varying)
    return tool("datasets").Dataset.from_list(
        [{"input_ids": data[i]["input_ids"].tolist()} for i in range(len(data))]
    )


def texts(seed: int, words: int) -> str:
    """A text of numbers."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(str(int(n)) for n in torch.randint(3, WORDS, (words,), generator=generator))


def preferences() -> Any:
    """Prompts with a better and a worse answer, all of one length."""
    rows = [
        {"prompt": texts(i, 6), "chosen": " " + texts(100 + i, 8), "rejected": " " + texts(200 + i, 8)}
        for i in range(16)
    ]
    return tool("datasets").Dataset.from_list(rows)


def sft(run: Run, model: nn.Module, *, data: Any = None, **options: Any) -> Any:
    """An `SFTTrainer` of four steps."""
    trl = small_tiles()
    of_trainer: dict[str, Any] = options.pop("trainer", {})
    settings = {**QUIET, "max_steps": STEPS, "learning_rate": 1e-2, "save_strategy": "no", "bf16": False}
    settings |= {"gradient_checkpointing": False, "output_dir": str(run.folder / "out"), **options}
    data = data or sentences()
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        **of_trainer,
    )


def dpo(run: Run, model: nn.Module, **options: Any) -> Any:
    """A `DPOTrainer` of four steps."""
    trl = small_tiles()
    of_trainer: dict[str, Any] = options.pop("trainer", {})
    settings = {**QUIET, "max_steps": STEPS, "learning_rate": 1e-2, "save_strategy": "no", "bf16": False}
    settings |= {"gradient_checkpointing": False, "output_dir": str(run.folder / "out")}
    settings |= {"pad_to_multiple_of": 32, **options}
    return trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(**settings),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        **of_trainer,
    )


@scenario("SFTTrainer", "limit_memory before the trainer")
def plain(run: Run) -> None:
    finish(run, sft(run, run.limited(llama())))


@scenario("SFTTrainer", "RematCallback")
def callback(run: Run) -> None:
    model = llama()
    finish(run, sft(run, model, trainer={"callbacks": run.callbacks("transformers", model)}))


@scenario("SFTTrainer", "its defaults: activation checkpointing on")
def checkpointed(run: Run) -> None:
    finish(run, sft(run, run.limited(llama()), gradient_checkpointing=True))


@scenario("SFTTrainer", "evaluation, checkpoints, from_pretrained")
def evaluated(run: Run) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    trainer = finish(run, sft(run, run.limited(llama()), per_device_eval_batch_size=2, **options))
    loads(run, run.folder / "out" / "checkpoint-4", trainer.model)


@scenario("SFTTrainer", "varying lengths", plans=4, warns=("planning again",))
def varying_lengths(run: Run) -> None:
    finish(run, sft(run, run.limited(llama()), data=sentences(varying=True)))


@scenario("SFTTrainer", "LoRA by peft_config")
def adapted(run: Run) -> None:
    """The trainer makes the model that trains."""
    peft = tool("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    trainer = sft(run, llama(), trainer={"peft_config": config})
    run.limited(trainer.model)
    finish(run, trainer)


@scenario("SFTTrainer", "LoRA by peft_config, RematCallback")
def adapted_by_callback(run: Run) -> None:
    peft = tool("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    trainer = sft(run, llama(), trainer={"peft_config": config})
    for each in run.callbacks("transformers", trainer.model):
        trainer.add_callback(each)
    finish(run, trainer)


@scenario("DPOTrainer", "limit_memory before the trainer")
def preferred(run: Run) -> None:
    # Its loss is outside of the model.
    model = run.limited(llama(), reserve_nbytes=128 << 10)
    finish(run, dpo(run, model, trainer={"ref_model": llama()}))


@scenario("DPOTrainer", "RematCallback")
def preferred_by_callback(run: Run) -> None:
    model = llama()
    run.options["reserve_nbytes"] = 128 << 10
    callbacks = run.callbacks("transformers", model)
    finish(run, dpo(run, model, trainer={"ref_model": llama(), "callbacks": callbacks}))


@scenario("DPOTrainer", "LoRA, its first adapter as the reference", plans=2, warns=("active_adapter",))
def preferred_adapters(run: Run) -> None:
    peft = tool("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    finish(run, dpo(run, run.limited(model, reserve_nbytes=128 << 10)))
