"""Small models for the tests of capture."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Norms, dropout and a residual: what behaves differently in other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(hidden) + x


class Heads(nn.Module):
    """Two outputs from two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).tanh()
        return {"left": self.left(hidden), "right": self.right(hidden)}
