"""Parameters, gradients and optimizer states that move to the host: training that the device cannot hold.

    python examples/offmate.py --budget 60% --host-budget 64MiB

Without a GPU a simulated device takes its place, in the memory of the CPU, so the script runs anywhere. It
trains once plainly and once with `Offmate`, and compares losses and weights.
"""

import argparse

import torch
from torch import Tensor, nn

from remat_facade import Offmate


class Net(nn.Module):
    """It returns its loss, so that the loss is part of the plan."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error of the prediction of `y`; both are [batch, 64]."""
        return nn.functional.mse_loss(self.blocks(x), y)


def batch(step: int) -> dict[str, Tensor]:
    """The inputs of a step, the same for both runs."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.roll(1, dims=1)}


def train(steps: int, budget: str | None, host_budget: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the final weights, on the CPU."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model: nn.Module = net
    if budget:
        model = Offmate(net, batch(0), budget, host_budget=host_budget, optimizer=optimizer)  # the one line
        print(model.plan.summary())
    losses = []
    for step in range(steps):
        loss = model(**batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%", help='device bytes, "22GiB", or a share such as "60%%"')
    parser.add_argument("--host-budget", default="64MiB", help="for what moves to the host")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    expected, weights = train(arguments.steps, None, arguments.host_budget)
    losses, moved = train(arguments.steps, arguments.budget, arguments.host_budget)
    same = all(torch.equal(value, moved[name]) for name, value in weights.items())
    print(f"losses are equal in every bit: {losses == expected}; weights: {same}")


if __name__ == "__main__":
    main()
