"""Models of transformers, narrowed, with batches for those that take more than tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.helpers.models.imports import import_transformers
from tests.helpers.models.samples import Sample, seeded

DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
}


LARGE_DECODER = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


ENCODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


VIT = {
    "image_size": 32,
    "patch_size": 4,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": 10,
}


T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


WHISPER = {
    "vocab_size": 128,
    "num_mel_bins": 16,
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def transformer(model: str, **config: Any) -> Callable[[], nn.Module]:
    """Builder of the transformers class `model` from `config`."""

    def make() -> nn.Module:
        cls = getattr(import_transformers(), model)
        module = cls(cls.config_class(**config))
        assert isinstance(module, nn.Module)
        return module

    return make


def t5_sample(seed: int) -> Sample:
    generator = seeded(seed)
    source = torch.randint(3, 128, (8, 32), generator=generator)
    return (), {"input_ids": source, "labels": torch.randint(3, 128, (8, 24), generator=generator)}


def vit_sample(seed: int) -> Sample:
    generator = seeded(seed)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    return (), {"pixel_values": images, "labels": torch.randint(0, 10, (8,), generator=generator)}


def whisper_sample(seed: int) -> Sample:
    generator = seeded(seed)
    features = torch.randn(8, 16, 64, generator=generator)
    return (), {"input_features": features, "labels": torch.randint(3, 128, (8, 24), generator=generator)}
