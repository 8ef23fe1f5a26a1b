"""What the files were written from: `write.py` runs it with the old code, the test with today's."""

import torch
from torch import Tensor, nn

LINKS = {"to_host_nbytes_per_s": 1e9, "to_device_nbytes_per_s": 1e9}
RATES = {"flops_per_s": 1e11, "nbytes_per_s": 1e10}  # of a `Roofline`, so that no time is measured
BUDGET = "70%"
TRAINING_BUDGET = "60%"
HOST_BUDGET = "20MiB"


class Perceptron(nn.Module):
    """Layers with batch norm and dropout: buffers, random state, repeats with another implementation.

    Products of float32 take no workspace, so bytes are the same on every machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))
            for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(rows)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def make_model() -> nn.Module:
    """The same one each time."""
    torch.manual_seed(0)
    return Perceptron()


def make_batch() -> dict[str, Tensor]:
    """The same one each time."""
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(32, 8, generator=generator),
        "labels": torch.randint(0, 10, (32,), generator=generator),
    }


def factory() -> tuple[nn.Module, dict[str, Tensor]]:
    """For `remat plan models.py:factory`."""
    return make_model(), make_batch()
