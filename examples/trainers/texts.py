"""What the examples train: a small GPT-2 on sentences of numbers, made here so that nothing is downloaded."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH = 128, 64


def model() -> GPT2LMHeadModel:
    """The same weights every time."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        loss_type="ForCausalLM",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Each counts upwards from a number by a step."""

    def __init__(self, count: int = 64) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.count:
            raise IndexError(index)
        ids = (index + (1 + index % 5) * torch.arange(LENGTH)) % (WORDS - 1) + 1
        return {"input_ids": ids, "labels": ids.clone()}
