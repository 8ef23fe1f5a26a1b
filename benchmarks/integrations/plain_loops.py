"""Loops that a user writes in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import Blocks, Sentences, batches, gpt2, llama, padded, pictures
from remat_executor import Buckets
from tests.helpers.models import import_transformers

STEPS = 4


def steps_of(
    run: Run,
    model: nn.Module,
    data: Iterable[dict[str, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    each: Callable[[int, nn.Module], None] | None = None,
) -> torch.optim.Optimizer:
    """Train a language model in the plainest loop."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(data):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        if each is not None:
            each(step, model)
    run.keep(model)
    return optimizer


@scenario("plain loop", "nothing else")
def plain(run: Run) -> None:
    model = run.limited(llama().train())
    steps_of(run, model, batches(STEPS))
    copied = llama()
    copied.load_state_dict(model.state_dict())
    run.check_equal("state_dict loads", copied.state_dict(), model.state_dict())


@scenario("plain loop", "gradient accumulation")
def accumulation(run: Run) -> None:
    model = run.limited(llama().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(batches(6)):
        loss = model(**batch).loss / 3
        loss.backward()
        run.losses.append(loss.item())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    run.keep(model)


@scenario("plain loop", "bf16 autocast, GradScaler, clipping")
def mixed_precision(run: Run) -> None:
    model = run.limited(Blocks().train(), reserve_nbytes=4096)  # the loss
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, target in pictures(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    run.keep(model)


@scenario("plain loop", "varying lengths", plans=4, warns=("planning again",))
def varying_lengths(run: Run) -> None:
    data = Sentences(varying=True)
    rows = [padded([data[4 * step + i] for i in range(4)]) for step in range(STEPS)]
    steps_of(run, run.limited(llama().train()), rows)


@scenario("plain loop", "varying lengths with buckets=")
def varying_lengths_in_buckets(run: Run) -> None:
    """The reference pads its batches itself."""
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    data = Sentences(varying=True)
    rows = [
        padded([data[4 * step + i] for i in range(4)], None if run.planned else 32) for step in range(STEPS)
    ]
    model = run.limited(llama(attention_dropout=0.0).train(), buckets=Buckets(sizes=(32,), pad=pads))
    steps_of(run, model, rows)


@scenario("plain loop", "evaluation during training")
def evaluation(run: Run) -> None:
    model = run.limited(llama().train())
    held_out = batches(1)[0]

    def evaluate(_: int, model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            run.losses.append(model(**held_out).loss.item())
        model.train()

    steps_of(run, model, batches(STEPS), each=evaluate)


@scenario("plain loop", "generate() in the middle of training")
def generation(run: Run) -> None:
    model = run.limited(llama(use_cache=True).train())

    def generate(step: int, model: nn.Module) -> None:
        model.eval()
        prompt = torch.tensor([[1, 5, 9]])
        run.tensors[f"generated {step}"] = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True
        )
        model.train()

    steps_of(run, model, batches(3), each=generate)


@scenario("plain loop", "frozen layers unfrozen midway", plans=2, warns=("planning again",))
def unfrozen(run: Run) -> None:
    model = llama().train()
    for parameter in model.model.layers[:2].parameters():
        parameter.requires_grad_(False)
    model = run.limited(model)

    def unfreeze(step: int, model: nn.Module) -> None:
        if step == 1:
            for parameter in model.parameters():
                parameter.requires_grad_(True)

    steps_of(run, model, batches(STEPS), each=unfreeze)


@scenario("plain loop", "weight tying")
def tied(run: Run) -> None:
    model = run.limited(gpt2().train())
    steps_of(run, model, batches(STEPS))
    run.checks["still tied"] = model.lm_head.weight is model.transformer.wte.weight


@scenario("plain loop", "EMA by AveragedModel")
def averaged(run: Run) -> None:
    model = run.limited(llama().train())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    steps_of(run, model, batches(STEPS), each=lambda _, model: average.update_parameters(model))
    run.keep(average.module, "average ")
    with torch.no_grad():
        run.losses.append(average.eval()(**batches(1)[0]).loss.item())


@scenario("plain loop", "deepcopied before training", plans=2)
def deepcopied(run: Run) -> None:
    first = run.limited(llama().train())
    second = copy.deepcopy(first)
    if run.planned:
        run.models.append(second)
    else:
        run.watched(second)
        second._forward_pre_hooks.clear()
        second.register_forward_pre_hook(run._count)
    for model in (first, second):
        steps_of(run, model, batches(2))


@scenario("plain loop", "state_dict saved and resumed", plans=2)
def resumed(run: Run) -> None:
    first = llama().train()
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    first = run.limited(first)
    steps_of(run, first, batches(2), optimizer)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, run.folder / "step.pt")
    second = llama().train()
    saved = torch.load(run.folder / "step.pt")
    second.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    steps_of(run, run.limited(second), batches(4)[2:], optimizer)


@scenario("plain loop", "save_pretrained, from_pretrained")
def saved(run: Run) -> None:
    transformers = import_transformers()
    model = run.limited(llama().train())
    steps_of(run, model, batches(2))
    model.save_pretrained(run.folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run.folder)
    run.checks["loads as its own class"] = type(loaded) is transformers.LlamaForCausalLM
    run.check_equal("saved weights", loaded.state_dict(), model.state_dict())


@scenario("plain loop", "gradient_checkpointing_enable() before")
def checkpointed(run: Run) -> None:
    model = llama().train()
    model.gradient_checkpointing_enable()
    steps_of(run, run.limited(model), batches(STEPS))


@scenario("plain loop", "DDP, two processes", ranks=2)
def distributed(run: Run) -> None:
    rank = torch.distributed.get_rank()
    options: dict[str, Any] = {"ranks": "alone"}
    model = DistributedDataParallel(run.limited(llama().train(), **options))
    steps_of(run, model, batches(2 * STEPS)[rank::2])


@scenario("plain loop", "DDP, two processes, planned together", ranks=2)
def planned_together(run: Run) -> None:
    """Rank 0 plans for both at their first call."""
    rank = torch.distributed.get_rank()
    model = run.limited(llama().train(), ranks="together")
    steps_of(run, DistributedDataParallel(model), batches(2 * STEPS)[rank::2])
