"""Seeded batches, for models of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int) -> Callable[[int], Sample]:
    """Samples of one normal float tensor."""

    def sample(seed: int) -> Sample:
        return (torch.randn(shape, generator=seeded(seed)),), {}

    return sample


def images_and_target(batch: int, size: int, channels: int = 3) -> Callable[[int], Sample]:
    """Samples of an image batch and one target value per pixel."""

    def sample(seed: int) -> Sample:
        generator = seeded(seed)
        images = torch.randn(batch, channels, size, size, generator=generator)
        return (images, torch.randn(batch, 1, size, size, generator=generator)), {}

    return sample


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[int], Sample]:
    """Samples of `input_ids` and of `labels` equal to them, as a causal language model is given."""

    def sample(seed: int) -> Sample:
        ids = torch.randint(3, vocabulary, (batch, length), generator=seeded(seed))
        return (), {"input_ids": ids, "labels": ids.clone()}

    return sample


def padded_tokens(
    batch: int, length: int, vocabulary: int, *, padding: int = 0, classes: int | None = None
) -> Callable[[int], Sample]:
    """Samples with an attention mask and padded rows of unequal length; labels per token, or one per row."""

    def sample(seed: int) -> Sample:
        generator = seeded(seed)
        ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
        lengths = torch.randint(length // 2, length, (batch, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        ids = ids.masked_fill(mask == 0, padding)
        if classes is None:
            labels = ids.masked_fill(mask == 0, -100)
        else:
            labels = torch.randint(0, classes, (batch,), generator=generator)
        return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return sample
