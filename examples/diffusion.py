"""A diffusion model inside a memory budget: it learns to remove noise from images.

    python examples/diffusion.py --budget 50%

The U-Net, its noise schedule and the sampling loop are written out here, after "Denoising Diffusion
Probabilistic Models" (Ho et al. 2020); the page on diffusers shows the same with that library. The images are
discs of random size and place. Sampling runs without gradients, so it runs without a plan.
"""

import argparse

import torch
from torch import Tensor, nn

from remat_facade import limit_memory, planned

NOISE_STEPS = 50


class Block(nn.Module):
    """Two convolutions with group norms, to which an embedding of the time is added."""

    def __init__(self, made_of: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(made_of, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        self.time = nn.Linear(32, width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """[batch, channels, height, width] and [batch, 32] to [batch, width, height, width]."""
        return self.second(self.first(x) + self.time(embedded)[:, :, None, None])


class UNet(nn.Module):
    """Predicts the noise in an image at a time of the schedule, and returns the mean squared error."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(NOISE_STEPS, 32)
        self.down = nn.ModuleList([Block(1, width), Block(width, 2 * width)])
        self.middle = Block(2 * width, 2 * width)
        self.up = nn.ModuleList([Block(4 * width, 2 * width), Block(3 * width, width)])
        self.last = nn.Conv2d(width, 1, 1)

    def predict(self, x: Tensor, times: Tensor) -> Tensor:
        """The noise in images of [batch, 1, size, size]."""
        embedded, kept = self.embed(times), []
        for block in self.down:
            kept.append(block(x, embedded))
            x = nn.functional.avg_pool2d(kept[-1], 2)
        x = self.middle(x, embedded)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], dim=1), embedded)
        return self.last(x)

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """The loss is part of the model, so that the budget covers it."""
        return nn.functional.mse_loss(self.predict(noisy, times), noise)


def discs(count: int, size: int) -> Tensor:
    """Images of [count, 1, size, size] between -1 and 1."""
    grid = torch.arange(size) / size
    x, y, radius = torch.rand(3, count, 1, 1) * 0.5 + 0.25
    inside = (grid[None, :, None] - y) ** 2 + (grid[None, None, :] - x) ** 2 < (radius / 2) ** 2
    return inside.float().unsqueeze(1) * 2 - 1


def main() -> None:
    """Train, print the plan, and draw one image from the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="50%", help='bytes, "2GiB", or a share such as "50%%"')
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=16, help="pixels of a side, a multiple of 4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, help="most seconds of the search for a plan")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = UNet()
    limit_memory(model, arguments.budget, time_limit_s=arguments.time_limit)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    betas = torch.linspace(1e-3, 0.2, NOISE_STEPS)
    signal = torch.cumprod(1 - betas, dim=0)  # the share of the image that is left, by time

    for step in range(arguments.steps):
        clean = discs(arguments.batch, arguments.size)
        noise, times = torch.randn_like(clean), torch.randint(NOISE_STEPS, (arguments.batch,))
        share = signal[times][:, None, None, None]
        loss = model(share.sqrt() * clean + (1 - share).sqrt() * noise, times, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == arguments.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    print(planned(model).plan.summary())

    with torch.no_grad():
        image = torch.randn(1, 1, arguments.size, arguments.size)
        for time in reversed(range(NOISE_STEPS)):
            noise = model.predict(image, torch.tensor([time]))
            image = (image - betas[time] / (1 - signal[time]).sqrt() * noise) / (1 - betas[time]).sqrt()
            if time:
                image += betas[time].sqrt() * torch.randn_like(image)
    print(f"drew an image of {tuple(image.shape[2:])} pixels; more steps draw better ones")


if __name__ == "__main__":
    main()
