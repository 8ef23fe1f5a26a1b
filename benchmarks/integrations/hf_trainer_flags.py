"""transformers' `Trainer` with flags that change how the model itself runs."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.integrations.hf_trainer import TOOL, finish, loads, trainer_of
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import gpt2, llama
from tests.helpers.models import import_transformers


def checkpointing_flag() -> dict[str, bool]:
    """The flag by the name that this version has."""
    names = import_transformers().TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: True}


@scenario(TOOL, "activation checkpointing flag")
def checkpointed(run: Run) -> None:
    finish(run, trainer_of(run, run.limited(llama()), **checkpointing_flag()))


@scenario(TOOL, "activation checkpointing flag, RematCallback")
def checkpointed_by_callback(run: Run) -> None:
    model = llama()
    callbacks = run.callbacks("transformers", model)
    finish(run, trainer_of(run, model, trainer={"callbacks": callbacks}, **checkpointing_flag()))


@scenario(TOOL, "torch_compile flag", warns=("torch.compile changes nothing",))
def compiled(run: Run) -> None:
    options: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    finish(run, trainer_of(run, run.limited(llama(attention_dropout=0.0)), **options))


@scenario(TOOL, "EMA of the weights by a callback")
def averaged(run: Run) -> None:
    transformers = import_transformers()
    model = run.limited(llama())
    average = torch.optim.swa_utils.AveragedModel(model)

    class Average(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            average.update_parameters(model)

    finish(run, trainer_of(run, model, trainer={"callbacks": [Average()]}))
    run.keep(average.module, "average ")


@scenario(TOOL, "weight tying, embeddings resized before")
def tied(run: Run) -> None:
    model = gpt2()
    model.resize_token_embeddings(112)
    model = run.limited(model)
    finish(run, trainer_of(run, model))
    run.checks["still tied"] = model.lm_head.weight is model.transformer.wte.weight


@scenario(TOOL, "generate() in the middle of training")
def generation(run: Run) -> None:
    transformers = import_transformers()

    class Generate(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.eval()
            prompt = torch.tensor([[1, 5, 9]])
            run.tensors[f"generated {state.global_step}"] = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5
            )
            model.train()

    model = run.limited(llama(use_cache=True))
    finish(run, trainer_of(run, model, max_steps=3, trainer={"callbacks": [Generate()]}))


@scenario(TOOL, "frozen layers unfrozen midway", plans=2, warns=("planning again",))
def unfrozen(run: Run) -> None:
    transformers = import_transformers()

    class Unfreeze(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                model.requires_grad_(True)

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.model.layers[:2].parameters():
        parameter.requires_grad_(False)
    trainer = {"callbacks": [Unfreeze()], "optimizers": (optimizer, None)}
    finish(run, trainer_of(run, run.limited(model), trainer=trainer))


@scenario(TOOL, "model_init, trained twice", plans=2)
def by_model_init(run: Run) -> None:
    """The trainer makes its models itself, one when it is made and one for each training."""
    made: list[torch.nn.Module] = []

    def init() -> torch.nn.Module:
        model = run.limited(llama())
        if not made:
            run.models.pop()  # this one is only looked at
        made.append(model)
        return model

    trainer = trainer_of(run, None, trainer={"model_init": init}, max_steps=3)
    finish(run, trainer)
    finish(run, trainer)


@scenario(TOOL, "offmate: AdamW, clipping, accumulation, bf16")
def offloaded(run: Run) -> None:
    options = {"gradient_accumulation_steps": 3, "max_steps": 3, "weight_decay": 0.1, "bf16": True}
    trainer = trainer_of(run, llama(), lr_scheduler_type="cosine", **options)
    run.offmate(trainer)
    finish(run, trainer)


@scenario(TOOL, "offmate: checkpoint, resumed", plans=2)
def offloaded_resumed(run: Run) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer = trainer_of(run, llama(), **options)
    run.offmate(trainer)
    finish(run, trainer)
    checkpoint = run.folder / "out" / "checkpoint-6"
    loads(run, checkpoint, trainer.model)
    trainer = trainer_of(run, llama(), **options)
    run.offmate(trainer)
    finish(run, trainer, resume_from_checkpoint=str(checkpoint.with_name("checkpoint-3")))
    run.checks["goes on with the losses of the whole training"] = run.losses[6:][-3:] == run.losses[3:6]


@scenario(TOOL, "DDP, two processes", ranks=2)
def distributed(run: Run) -> None:
    """As `torchrun` starts it."""
    rank = torch.distributed.get_rank()
    with environment(rank, torch.distributed.get_world_size()):
        finish(run, trainer_of(run, run.limited(llama(), ranks="alone"), ddp_backend="gloo"))


class environment:  # noqa: N801 - reads like a function
    """What `torchrun` sets for each rank, for as long as the context."""

    def __init__(self, rank: int, count: int) -> None:
        self.values = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
        }

    def __enter__(self) -> None:
        import os

        os.environ.update(self.values)

    def __exit__(self, *_: Any) -> None:
        import os

        for name in self.values:
            os.environ.pop(name, None)
