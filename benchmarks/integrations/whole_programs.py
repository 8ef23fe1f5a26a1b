"""What scenarios of programs need that load a model from a folder and make its trainer by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.integrations.scenario import Run
from benchmarks.integrations.tiny import Sentences, llama, tokenizer
from tests.helpers.models import import_transformers
from tests.helpers.trainers import history_of


def write_model(folder: Path) -> Path:
    """A small Llama and its tokenizer, as tools load them from a folder."""
    torch.manual_seed(0)
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def write_texts(folder: Path, rows: list[dict[str, str]]) -> Path:
    """What is trained on."""
    path = folder / "texts.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def texts(count: int = 24) -> list[str]:
    """Sentences of one length whose words are numbers."""
    data = Sentences(count)
    return [" ".join(map(str, data[place]["input_ids"].tolist())) for place in range(count)]


def watching(run: Run) -> Any:
    """A callback that counts the calls of the model, and keeps its losses and what it has learned."""

    class Watching(import_transformers().TrainerCallback):
        """Sees the model when it is ready for training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Before the first step."""
            run.watched(kwargs["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """After the last one."""
            for entry in history_of(state):
                run.losses.extend(entry.values())
            run.keep(kwargs["model"])

    return Watching()
