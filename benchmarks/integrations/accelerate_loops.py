"""Loops with Accelerate, as its documentation shows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.integrations.hf_trainer_flags import environment
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import Sentences, llama, tool


@contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    """A fresh one, since it keeps global state."""
    accelerate = tool("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield accelerate.Accelerator(cpu=True, **options)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def loop(
    run: Run,
    speed: Any,
    model: nn.Module,
    *,
    after: bool = False,
    steps: int = 4,
    clip: bool = False,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Train; the one line is before `prepare`, or after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Sentences(16), batch_size=4)
    if not after:
        model = run.limited(model, **options)
    model, optimizer, loader = speed.prepare(model, optimizer, loader)
    if after:
        model = run.limited(model, **options)
    model.train()
    for batch in list(loader)[:steps]:
        with speed.accumulate(model):
            loss = model(**batch).loss
            speed.backward(loss)
            if clip:
                speed.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
    run.keep(speed.unwrap_model(model))
    return model, optimizer


@scenario("Accelerate", "limited before prepare")
def before(run: Run) -> None:
    with accelerator() as speed:
        loop(run, speed, llama())


@scenario("Accelerate", "limited after prepare")
def after(run: Run) -> None:
    with accelerator() as speed:
        loop(run, speed, llama(), after=True)


@scenario("Accelerate", "bf16, limited before prepare")
def bf16(run: Run) -> None:
    with accelerator(mixed_precision="bf16") as speed:
        loop(run, speed, llama(), clip=True)


@scenario("Accelerate", "bf16, limited after prepare")
def bf16_after(run: Run) -> None:
    with accelerator(mixed_precision="bf16") as speed:
        loop(run, speed, llama(), after=True, clip=True)


@scenario("Accelerate", "gradient accumulation")
def accumulation(run: Run) -> None:
    with accelerator(gradient_accumulation_steps=2) as speed:
        loop(run, speed, llama(), clip=True)


@scenario("Accelerate", "save_state, load_state, unwrap, from_pretrained")
def saved(run: Run) -> None:
    transformers = tool("transformers")
    with accelerator() as speed:
        model, _ = loop(run, speed, llama())
        speed.save_state(str(run.folder / "state"))
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        speed.load_state(str(run.folder / "state"))
        run.check_equal("load_state", model.state_dict(), kept)
        speed.unwrap_model(model).save_pretrained(
            run.folder / "model", state_dict=speed.get_state_dict(model)
        )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "model")
    run.check_equal("weights of the checkpoint", loaded.state_dict(), kept)


@scenario("Accelerate", "torch_compile flag", warns=("torch.compile changes nothing",))
def compiled(run: Run) -> None:
    plugin = tool("accelerate.utils").TorchDynamoPlugin(backend="eager")
    with accelerator(dynamo_plugin=plugin) as speed:
        loop(run, speed, llama(attention_dropout=0.0))


@scenario("Accelerate", "DDP, two processes", ranks=2)
def distributed(run: Run) -> None:
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with environment(rank, count), accelerator() as speed:
        loop(run, speed, llama(), steps=2, ranks="alone")
