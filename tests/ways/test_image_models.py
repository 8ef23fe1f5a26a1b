"""Image models with their convolutions and batch norms run in other ways: eager's bits for three steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from remat_executor.ways.batch_norms import batch_norms
from remat_executor.ways.convolutions import convolutions
from tests.helpers.ways import assert_exact, with_channels_last

FAMILIES = [partial(convolutions, least_nbytes=0), partial(batch_norms, least_nbytes=0, least_parts=2)]


class Separable(nn.Module):
    """A MobileNet's block: wider, over each channel alone, narrower, and the block's input added."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made if self.stride > 1 else x + made


class SmallUNet(nn.Module):
    """Two levels, joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = block(3, 4), block(4, 8), block(8, 4)
        self.enlarge, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        skip = self.down(images)
        x = self.enlarge(self.deep(nn.functional.max_pool2d(skip, 2)))
        made: Tensor = self.head(self.up(torch.cat([x, skip], 1)))
        return made


def block(given: int, made: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(inplace=True))


def vgg() -> nn.Module:
    """As the original, without batch norms."""
    layers: list[nn.Module] = []
    for given, made in ((3, 4), (4, 4), (4, 8), (8, 8)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if made == given else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 5))


def mobilenet() -> nn.Module:
    return nn.Sequential(block(3, 4), Separable(4, 1), Separable(4, 2), nn.Conv2d(4, 5, 1))


MODELS: Mapping[str, Callable[[], nn.Module]] = {"vgg": vgg, "mobilenet": mobilenet, "unet": SmallUNet}
# With channels last, no batch norm here is wide enough. In 32 bits, a convolution whose gradient is smaller
# than its input has no way.
SWITCHES = {
    "vgg": {"float32": 3, "channels last": 3, "bfloat16": 3, "mixed": 3},
    "mobilenet": {"float32": 11, "channels last": 4, "bfloat16": 14, "mixed": 14},
    "unet": {"float32": 5, "channels last": 2, "bfloat16": 7, "mixed": 7},
}


class Step(nn.Module):
    """A model and the mean of its squared results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        made: Tensor = self.model(images)
        return made.square().mean()


@pytest.mark.parametrize("layout", ["float32", "channels last", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_plans_with_all_ways_on(name: str, layout: str) -> None:
    """In 32 and 16 bits, with 32-bit batch norms, with channels last; without and with repeats."""
    torch.manual_seed(0)
    model, x = Step(MODELS[name]()), torch.randn(2, 3, 16, 16)
    if layout in ("bfloat16", "mixed"):
        model, x = model.bfloat16(), x.bfloat16()
    if layout == "mixed":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
    if layout == "channels last":
        model, x = with_channels_last(model, x)
    assert_exact(model, (x,), FAMILIES, switches=SWITCHES[name][layout])
