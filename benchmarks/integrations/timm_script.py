"""The loop of timm's train script, which its wheel does not bring: task, scaler, EMA, saver and scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import tool

TOOL = "timm"
SIZE = 32
CLASSES = 8


def network(name: str = "resnet10t", **options: Any) -> nn.Module:
    """A small one of timm's."""
    model: nn.Module = tool("timm").create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


def train(
    run: Run,
    model: nn.Module,
    *,
    compiled: str | None = None,
    amp: bool = False,
    ema: bool = False,
    mixup: bool = False,
    steps: int = 4,
) -> Any:
    """The steps of `train_one_epoch`; `compiled` is what --torchcompile-mode gets."""
    task_of, utils = tool("timm.task"), tool("timm.utils")
    task = task_of.ClassificationTask(model, criterion=nn.CrossEntropyLoss(), verbose=False)
    if ema:
        task.setup_ema(decay=0.9)
    if compiled is not None:
        task.compile(backend="remat", mode=compiled)
    optimizer = tool("timm.optim").create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scheduler = tool("timm.scheduler").CosineLRScheduler(optimizer, t_initial=steps)
    mix = tool("timm.data").Mixup(mixup_alpha=0.2, num_classes=CLASSES) if mixup else None
    generator = torch.Generator().manual_seed(3)
    task.train()
    for step in range(steps):
        x = torch.randn(4, 3, SIZE, SIZE, generator=generator)
        target = torch.randint(0, CLASSES, (4,), generator=generator)
        if mix is not None:
            x, target = mix(x, target)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = task(x, target)["loss"]
        loss.backward()
        utils.dispatch_clip_grad(task.get_clip_parameters(), value=1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        if ema:
            task.update_ema(step)
        scheduler.step(step + 1)
        run.losses.append(loss.item())
    run.keep(model)
    if ema:
        run.keep(task.get_trainable_module(ema=True), "average ")
    return task


@scenario(TOOL, "a ResNet limited before the task")
def resnet(run: Run) -> None:
    train(run, run.limited(network(), reserve_nbytes=4096))


@scenario(TOOL, "a vision transformer, bf16, drop path")
def transformer(run: Run) -> None:
    options = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 2}
    model = network("vit_tiny_patch16_224", drop_path_rate=0.1, **options)
    train(run, run.limited(model, reserve_nbytes=4096), amp=True)


@scenario(TOOL, "ModelEmaV3 and mixup")
def averaged(run: Run) -> None:
    train(run, run.limited(network(), reserve_nbytes=4096), ema=True, mixup=True)


@scenario(TOOL, "set_grad_checkpointing before")
def checkpointed(run: Run) -> None:
    """Beside training without the flag: checkpoints update a batch norm twice a step, in plain torch too."""
    model = network()
    model.set_grad_checkpointing(run.planned)
    train(run, run.limited(model, reserve_nbytes=4096))


@scenario(TOOL, "--torchcompile remat --torchcompile-mode 70%")
def compiled(run: Run) -> None:
    model = network()
    run.watched(model)
    run.models.clear()  # the plan belongs to the compiled module
    train(run, model, compiled="70%" if run.planned else None)


@scenario(TOOL, "checkpoint loads by load_checkpoint")
def saved(run: Run) -> None:
    model = run.limited(network(), reserve_nbytes=4096)
    train(run, model, steps=2)
    torch.save({"state_dict": tool("timm.utils").get_state_dict(model)}, run.folder / "model.pth")
    loaded = network()
    tool("timm.models").load_checkpoint(loaded, str(run.folder / "model.pth"))
    run.check_equal("weights of the checkpoint", loaded.state_dict(), model.state_dict())
