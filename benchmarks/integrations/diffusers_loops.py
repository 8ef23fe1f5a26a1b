"""The training loop of diffusers' unconditional example: UNet2DModel, DDPM, Accelerate, EMAModel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.integrations.accelerate_loops import accelerator
from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import tool

TOOL = "diffusers"


def unet(**options: Any) -> nn.Module:
    """A tiny one for pictures of 16 x 16."""
    model: nn.Module = tool("diffusers").UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **options,
    )  # fmt: skip
    return model


def train(
    run: Run,
    model: nn.Module,
    *,
    limit_after: bool = False,
    ema: bool = False,
    steps: int = 4,
    **options: Any,
) -> nn.Module:
    """Four steps as in `train_unconditional.py`."""
    diffusers = tool("diffusers")
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    average = tool("diffusers.training_utils").EMAModel(model.parameters(), decay=0.9) if ema else None
    data = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    with accelerator(**options) as speed:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if not limit_after:
            model = run.limited(model, reserve_nbytes=64 << 10)
        model, optimizer, loader = speed.prepare(model, optimizer, DataLoader(data, batch_size=4))
        if limit_after:
            model = run.limited(model, reserve_nbytes=64 << 10)
        model.train()
        for clean in list(loader)[:steps]:
            noise = torch.randn_like(clean)
            times = torch.randint(0, 100, (len(clean),)).long()
            noisy = scheduler.add_noise(clean, noise, times)
            with speed.accumulate(model):
                loss = nn.functional.mse_loss(model(noisy, times).sample.float(), noise)
                speed.backward(loss)
                if speed.sync_gradients:
                    speed.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if average is not None:
                average.step(model.parameters())
            run.losses.append(loss.item())
        model = speed.unwrap_model(model)
    run.keep(model)
    if average is not None:
        for place, tensor in enumerate(average.shadow_params):
            run.tensors[f"average {place}"] = tensor.detach().clone()
    return model


@scenario(TOOL, "UNet2DModel with Accelerate")
def plain(run: Run) -> None:
    train(run, unet())


@scenario(TOOL, "limited after prepare")
def after(run: Run) -> None:
    train(run, unet(), limit_after=True)


@scenario(TOOL, "EMAModel, gradient accumulation")
def averaged(run: Run) -> None:
    train(run, unet(), ema=True, gradient_accumulation_steps=2)


@scenario(TOOL, "bf16")
def bf16(run: Run) -> None:
    train(run, unet(), mixed_precision="bf16")


@scenario(TOOL, "enable_gradient_checkpointing")
def checkpointed(run: Run) -> None:
    model = unet()
    model.enable_gradient_checkpointing()
    train(run, model)


@scenario(TOOL, "save_pretrained, a pipeline samples")
def saved(run: Run) -> None:
    diffusers = tool("diffusers")
    model = train(run, unet(), steps=2)
    pipeline = diffusers.DDPMPipeline(unet=model, scheduler=diffusers.DDPMScheduler(num_train_timesteps=100))
    pipeline.set_progress_bar_config(disable=True)
    sampled = pipeline(
        batch_size=1, num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(1)
    )
    run.tensors["sampled"] = torch.as_tensor(sampled.images)
    pipeline.save_pretrained(run.folder / "pipeline")
    loaded = diffusers.UNet2DModel.from_pretrained(run.folder / "pipeline" / "unet")
    run.check_equal("weights of the checkpoint", loaded.state_dict(), model.state_dict())
