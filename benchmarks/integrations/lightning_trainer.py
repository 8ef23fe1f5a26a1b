"""Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.integrations.scenario import Run, scenario
from benchmarks.integrations.tiny import Blocks, Sentences, llama, pictures, tool

TOOL = "Lightning"


def language_model(inside: nn.Module) -> Any:
    """A `LightningModule` around a model that returns its loss."""
    lightning = tool("lightning")

    class Language(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = inside

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            losses.append(self.model(**batch).loss.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    losses: list[float] = []
    module = Language()
    object.__setattr__(module, "losses", losses)
    return module


def classifier(inside: nn.Module) -> Any:
    """A `LightningModule` that computes its loss from what `self(x)` returns, its own forward."""
    lightning = tool("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inside = inside
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    return Classifier()


def fit(run: Run, module: Any, *, data: Any = None, validate: bool = False, **options: Any) -> Any:
    """Train for four steps."""
    lightning = tool("lightning")
    resumed = options.pop("ckpt_path", None)
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu", "devices": 1, "max_steps": 4, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": run.folder,
            **options,
        }
    )  # fmt: skip
    loader = data if data is not None else DataLoader(Sentences(16), batch_size=4)
    held_out = DataLoader(Sentences(4), batch_size=4) if validate else None
    trainer.fit(module, loader, held_out, ckpt_path=resumed)
    run.losses.extend(module.losses)
    run.keep(module)
    return trainer


@scenario(TOOL, "limit_memory of the inner model")
def inner(run: Run) -> None:
    fit(run, language_model(run.limited(llama())))


@scenario(TOOL, "MemoryLimit")
def callback(run: Run) -> None:
    module = language_model(llama())
    fit(run, module, callbacks=run.callbacks("lightning", module.model))


@scenario(TOOL, "validation during training")
def validated(run: Run) -> None:
    fit(
        run, language_model(run.limited(llama())), validate=True, val_check_interval=2, num_sanity_val_steps=1
    )


@scenario(TOOL, "accumulate_grad_batches, gradient_clip_val")
def accumulated(run: Run) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": 2}
    fit(run, language_model(run.limited(llama())), **options)


@scenario(TOOL, "precision bf16-mixed")
def bf16(run: Run) -> None:
    fit(run, language_model(run.limited(llama())), precision="bf16-mixed")


@scenario(TOOL, "save_checkpoint, resumed by ckpt_path", plans=2)
def resumed(run: Run) -> None:
    first = language_model(run.limited(llama()))
    trainer = fit(run, first)
    path = run.folder / "last.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    run.check_equal("weights of the checkpoint", saved, first.state_dict())
    second = language_model(run.limited(llama()))
    fit(run, second, max_steps=6, ckpt_path=path, max_epochs=2)


@scenario(TOOL, "the LightningModule itself limited")
def whole(run: Run) -> None:
    module = run.limited(classifier(Blocks()), reserve_nbytes=4096)
    fit(run, module, data=DataLoader(pictures(4), batch_size=None))


@scenario(TOOL, "a LightningModule with forward, MemoryLimit")
def whole_by_callback(run: Run) -> None:
    run.options["reserve_nbytes"] = 4096
    module = classifier(Blocks())
    fit(
        run,
        module,
        data=DataLoader(pictures(4), batch_size=None),
        callbacks=run.callbacks("lightning", module.inside),
    )


@scenario(TOOL, "EMA by WeightAveraging")
def averaged(run: Run) -> None:
    callbacks = tool("lightning.pytorch.callbacks")
    fit(run, language_model(run.limited(llama())), callbacks=[callbacks.EMAWeightAveraging(decay=0.9)])


@scenario(TOOL, "DDP, two processes", ranks=2)
def distributed(run: Run) -> None:
    from benchmarks.integrations.hf_trainer_flags import environment

    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with environment(rank, count):
        module = language_model(run.limited(llama(), ranks="alone"))
        fit(run, module, strategy="ddp", devices=count)
