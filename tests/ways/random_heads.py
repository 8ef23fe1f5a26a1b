"""Random small models that end in a cross entropy, as language models, classifiers and segmentations do."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.bits import with_special

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CLASSES = (2, 3, 17, 64, 130)
IGNORED = -100


class Head(nn.Module):
    """A linear layer or a 1x1 convolution to the classes, and a loss of what it gives.

    Every choice that changes the captured ops is drawn: the dtype of the log-softmax, shifted rows, a soft
    cap, a scale, class weights, label smoothing, what is ignored, the reduction, a division by a number of
    tokens, a loss on the logsumexp, a part of the rows or none, and another reader of the logits.
    """

    def __init__(self, rng: random.Random, features: int, classes: int, *, images: bool) -> None:
        super().__init__()
        self.images = images
        bias = rng.random() < 0.5
        self.scores = (
            nn.Conv2d(features, classes, 1, bias=bias) if images else nn.Linear(features, classes, bias=bias)
        )
        self.upcast = rng.random() < 0.7
        self.shift = not images and rng.random() < 0.4
        self.cap = rng.choice((None, None, 5.0))
        self.scale = rng.choice((None, None, 0.5))
        self.weighted = rng.random() < 0.2
        self.smoothing = rng.choice((0.0, 0.0, 0.1))
        self.ignored = rng.choice((IGNORED, IGNORED, 1))
        self.reduction = rng.choice(("mean", "mean", "sum", "none"))
        self.tokens = rng.choice((None, None, 7))
        self.z_loss = rng.random() < 0.15
        self.rows = rng.choice((None,) * 17 + (0, 20, 20))
        self.read_again = rng.random() < 0.2
        self.register_buffer("weight", torch.rand(classes) + 0.1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        logits = self.scores(x)
        if self.scale is not None:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        wide = logits.float() if self.upcast and logits.dtype != torch.float64 else logits
        if not self.images:
            if self.shift:
                wide, target = wide[:, :-1, :].contiguous(), target[:, 1:].contiguous()
            wide, target = wide.flatten(0, -2), target.flatten()
            if self.rows is not None:  # the backward of a slice is no view, so it is drawn rarely
                wide, target = wide[: self.rows], target[: self.rows]
        loss = F.cross_entropy(
            wide,
            target,
            weight=self.weight.to(wide.dtype) if self.weighted else None,
            ignore_index=self.ignored,
            label_smoothing=self.smoothing,
            reduction=self.reduction,
        )
        loss = loss.square().mean() if self.reduction == "none" else loss
        if self.tokens is not None:
            loss = loss / self.tokens
        if self.z_loss:
            loss = loss + 1e-4 * wide.logsumexp(1).square().mean()
        return loss + 1e-3 * logits.float().square().mean() if self.read_again else loss


class Classifier(nn.Module):
    """A layer, so that the gradient of the logits goes on, and a head."""

    def __init__(self, body: nn.Module, head: Head) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.head(self.body(x), target)
        return loss


def random_head(seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and a batch of 18 to 240 rows, or of 2 to 4 images; targets may all be ignored."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    images = rng.random() < 0.25
    features, classes = rng.choice((4, 9)), rng.choice(CLASSES)
    if images:
        sizes: tuple[int, ...] = (rng.randint(2, 4), rng.choice((5, 8)), rng.choice((5, 8)))
        x = torch.randn(sizes[0], 3, *sizes[1:])
    else:
        sizes = (rng.randint(1, 4), rng.randint(18, 60))
        x = torch.randn(*sizes, 3)
    x = x.to(rng.choice(DTYPES))
    if rng.random() < 0.3:
        x = with_special(x, rng.choice((0.01, 0.2)))
    head = Head(rng, features, classes, images=images)
    target = torch.randint(classes, sizes)
    target[torch.rand(sizes) < rng.choice((0.0, 0.3, 1.0))] = head.ignored
    first: nn.Module = nn.Conv2d(3, features, 1) if images else nn.Linear(3, features)
    body = nn.Sequential(first, rng.choice((nn.ReLU(), nn.Tanh(), nn.Dropout(0.3))))
    return Classifier(body, head).to(x.dtype).train(), (x, target)
