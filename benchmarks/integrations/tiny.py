"""Tiny models and data, made in code: nothing is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.helpers.models import import_torchvision, import_transformers
from tests.helpers.models.imports import import_torchaudio

WORDS = 96
LENGTH = 24


def tool(name: str) -> Any:
    """Import a tool, which may be installed in an environment of its own only."""
    import_companions()
    return importlib.import_module(name)


def import_companions() -> None:
    """What many tools import, and what may lack its compiled operators."""
    for package, load in (("torchvision", import_torchvision), ("torchaudio", import_torchaudio)):
        if importlib.util.find_spec(package) is not None:
            load()


def llama(layers: int = 3, **options: Any) -> nn.Module:
    """A small Llama with dropout in its attention."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=2,
        vocab_size=WORDS,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"attention_dropout": 0.1, "use_cache": False, **options},
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gpt2(**options: Any) -> nn.Module:
    """A small GPT-2: dropout everywhere, and tied words."""
    transformers = import_transformers()
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=64, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, use_cache=False, **options,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert(**options: Any) -> nn.Module:
    """A small BERT that classifies sentences."""
    transformers = import_transformers()
    config = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=96, num_attention_heads=2, vocab_size=WORDS,
        max_position_embeddings=64, num_labels=3, **options,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


class Sentences(Dataset[dict[str, Any]]):
    """Sentences of numbers, each with what comes next or with a class; `varying` lengths are 9 to 24."""

    def __init__(self, count: int = 24, *, varying: bool = False, classes: int = 0) -> None:
        self.count, self.varying, self.classes = count, varying, classes

    def __len__(self) -> int:
        """How many."""
        return self.count

    def __getitem__(self, place: int) -> dict[str, Any]:
        """One, without a batch dimension."""
        if not 0 <= place < self.count:
            raise IndexError(place)  # what iterates over it ends here
        generator = torch.Generator().manual_seed(place)
        length = 9 + (5 * place) % 16 if self.varying else LENGTH
        ids = torch.randint(3, WORDS, (length,), generator=generator)
        labels = torch.tensor(place % self.classes) if self.classes else ids.clone()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def batches(steps: int, size: int = 4, **options: Any) -> list[dict[str, Tensor]]:
    """Batches of sentences of one length."""
    data = Sentences(steps * size, **options)
    rows = [[data[step * size + i] for i in range(size)] for step in range(steps)]
    return [{name: torch.stack([r[name] for r in batch]) for name in batch[0]} for batch in rows]


def padded(rows: list[dict[str, Any]], length: int | None = None) -> dict[str, Tensor]:
    """A batch of sentences of several lengths, as collators make it: as long as the longest by default."""
    longest = length or max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> Tensor:
        gaps = [(row[name], longest - len(row[name])) for row in rows]
        return torch.stack([nn.functional.pad(tensor, (0, gap), value=value) for tensor, gap in gaps])

    return {
        "input_ids": fill("input_ids", 0),
        "attention_mask": fill("attention_mask", 0),
        "labels": fill("labels", -100),
    }


def tokenizer() -> Any:
    """Its words are numbers."""
    transformers = import_transformers()
    tokenizers = tool("tokenizers")
    vocabulary = {str(number): number for number in range(WORDS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="3"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="0", bos_token="1", eos_token="2"
    )


class Blocks(nn.Module):
    """A residual network for small pictures, with batch norms, that returns logits."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU())
            for _ in range(depth)
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.dropout(x.mean((2, 3))))


def pictures(steps: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of small pictures and their classes."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 3, 16, 16, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(steps)
    ]
