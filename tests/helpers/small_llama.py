"""A Llama of two layers, with dropout in its attention."""

from typing import Any

import torch
from torch import nn

from tests.helpers.models import import_transformers

WORDS = 64


def small_llama(**options: Any) -> nn.Module:
    """The same one each time, in train mode; `options` are further ones of its config."""
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=WORDS,
        attention_dropout=0.1,
        use_cache=False,
        **options,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()
