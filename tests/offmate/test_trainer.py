"""Offmate in transformers' `Trainer`: its optimizer is the trainer's, whatever the trainer does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from remat_facade import Offmate
from tests.helpers.models import import_transformers
from tests.helpers.trainers import QUIET, history


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words, the same for each index every time."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def gpt2() -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    t = import_transformers()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 32}
    config = t.GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
    model: nn.Module = t.GPT2LMHeadModel(config)
    return model.train()


def trained(folder: Path, *, offload: bool, resume: str | None = None, **settings: Any) -> Any:
    """A trainer that has trained, and the model."""
    t = import_transformers()
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if offload:
        words = torch.stack([Sentences()[i]["input_ids"] for i in range(2)])
        model = Offmate(
            model,
            (),
            "60%",
            host_budget="64MiB",
            sample_kwargs={"input_ids": words, "labels": words},
            optimizer=optimizer,
            cache_dir=folder / "costs",
        )
    arguments = t.TrainingArguments(
        str(folder / "out"), **{**QUIET, "max_steps": 4, "save_steps": 2, **settings}
    )
    trainer = t.Trainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.filterwarnings("ignore:called in another way:remat_executor.RematWarning")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_grad_norm": 0.0}, marks=pytest.mark.full),
        {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2},
    ],
    ids=["plain", "clipping, schedule, accumulation"],
)
def test_it_trains_saves_and_resumes_as_without(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", offload=False, **settings)
    moved = trained(tmp_path / "moved", offload=True, **settings)
    assert moved.model.plan.on_host
    assert moved.model.runs["original"] == 0
    assert history(plain) == history(moved)
    expected = [p.detach().clone() for p in plain.model.parameters()]
    assert all(map(torch.equal, expected, moved.model.parameters()))
    checkpoint = str(tmp_path / "moved" / "out" / "checkpoint-2")
    for offload in (False, True):  # the checkpoint is one of plain transformers
        resumed = trained(tmp_path / f"resumed{offload}", offload=offload, resume=checkpoint, **settings)
        assert all(map(torch.equal, expected, resumed.model.parameters()))
