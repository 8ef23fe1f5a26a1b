"""A model inside a memory budget, and without it: the same losses, less memory.

    python examples/quickstart.py
    python examples/quickstart.py --budget 30%

It trains a small network for some steps with and without the limit, and prints both peaks, and the plan.
"""

import argparse

import torch
from torch import Tensor, nn

from remat_executor import MemoryMeter
from remat_facade import limit_memory, planned


class Net(nn.Module):
    """Residual blocks with dropout; it returns its loss, so that the budget covers the whole step."""

    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean squared error of the prediction for inputs of [batch, width]."""
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, target)


def train(budget: str | None, steps: int) -> tuple[list[float], int]:
    """Train the same network on the same data; return the losses and the peak bytes of the last step."""
    torch.manual_seed(0)
    model = Net()
    if budget:
        limit_memory(model, budget)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, peak_nbytes = [], 0
    for _ in range(steps):
        x = torch.randn(512, 64)
        with MemoryMeter(model, x) as meter:
            loss = model(x, x.roll(1, dims=1))
            loss.backward()
        losses.append(loss.item())
        peak_nbytes = meter.peak_nbytes
        optimizer.step()
        optimizer.zero_grad()
    found = planned(model)
    if found is not None:
        print(found.plan.summary())
    return losses, peak_nbytes


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="40%", help='bytes, "2GiB", or a share such as "40%%"')
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    expected, eager_nbytes = train(None, arguments.steps)
    losses, nbytes = train(arguments.budget, arguments.steps)
    print(f"peak of a step: {eager_nbytes / 2**20:.2f} MiB in eager mode, {nbytes / 2**20:.2f} MiB planned")
    print(f"losses are equal in every bit: {losses == expected}")


if __name__ == "__main__":
    main()
