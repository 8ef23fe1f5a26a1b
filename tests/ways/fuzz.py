"""Random small models, planned with all ways of one family and held against eager in every bit.

A model is a few blocks of convolutions, poolings, norms, relu-like functions, elementwise formulas, dropout,
additions and concatenations over 1, 2 or 3 dimensions, then linear layers and a loss. Batches may hold NaN,
infinities and zeros of both signs, and layouts may be channels-last. Losses have models of their own
(`random_heads`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlannedModule
from remat_executor.ways.batch_norms import batch_norms
from remat_executor.ways.chains import chains
from remat_executor.ways.convolutions import convolutions
from remat_executor.ways.loss_head import loss_head
from remat_executor.ways.masks import masks
from remat_executor.ways.pools import pools
from remat_executor.ways.substitution import Family
from tests.helpers.bits import same_bits, with_special
from tests.helpers.planners import all_switched
from tests.ways.random_heads import random_head

FAMILIES: dict[str, Family] = {
    "loss_head": partial(loss_head, least_nbytes=0),
    "masks": partial(masks, least_nbytes=0),
    "pools": partial(pools, least_nbytes=0),
    "chains": partial(chains, least_chunks=0),
    "convolutions": partial(convolutions, least_nbytes=0),
    "batch_norms": partial(batch_norms, least_nbytes=0, least_parts=2),
}
"""Families with ways for tensors of any size."""

STEPS = 3
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


class Formula(nn.Module):
    """An elementwise formula."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


FORMULAS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: 0.5 * x * (1.0 + torch.tanh(0.797 * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda x: torch.tanh(x / 3) * 3,
    lambda x: F.relu(x).pow(2) * x,
    lambda x: (x.abs() + 1).log() * x.sin(),
    lambda x: x / (1 + x.abs()),
    lambda x: x.exp().neg() * torch.tanh(x) - x.reciprocal(),
    lambda x: F.leaky_relu(x, 0.2) * (1 - torch.tanh(x)) + x.cos(),
)


class Block(nn.Module):
    """Layers one after the other; their result may be added to the input or put beside it."""

    def __init__(self, layers: Iterable[nn.Module], join: str) -> None:
        super().__init__()
        self.layers, self.join = nn.Sequential(*layers), join

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        if self.join == "add" and made.shape == x.shape:
            return made + x
        if self.join == "cat" and made.shape[2:] == x.shape[2:]:
            return torch.cat([x, made], 1)
        return made


class Net(nn.Module):
    """Blocks, linear layers and a loss."""

    def __init__(self, blocks: Iterable[nn.Module], loss: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.loss == "entropy":
            return F.cross_entropy(x.flatten(0, -2).float(), target)
        return x.float().square().mean() if self.loss == "square" else x.float().sum()


_KEEPS_NO_RESULT = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.Linear,
)


@attrs.define(eq=False)
class Builder:
    """Draws a model for a batch; each layer sees what the ones before it make of the batch.

    Attributes:
        rng: draws everything but tensors.
        x: the batch as the layers so far leave it.
        layers: of the block that is built.
        trains: whether a layer so far has parameters, so that `x` needs a gradient.
    """

    rng: random.Random
    x: Tensor
    layers: list[nn.Module] = attrs.field(factory=list)
    trains: bool = False

    @property
    def dims(self) -> int:
        return self.x.ndim - 2

    def put(self, layer: nn.Module) -> None:
        """Add a layer, unless the batch is too small for it."""
        try:
            made = layer.to(self.x.dtype)(self.x)
        except (RuntimeError, ValueError):
            return
        if made.numel() and 1 <= made.shape[-1]:
            self.x = made.detach()
            self.layers.append(layer)
            self.trains |= any(True for _ in layer.parameters())

    def of_dims(self, name: str) -> Any:
        return getattr(nn, f"{name}{self.dims}d")

    def convolution(self) -> None:
        rng = self.rng
        out, groups = rng.choice((2, 4, 6)), rng.choice((1, 1, 2))
        options = {"stride": rng.choice((1, 1, 2)), "padding": rng.randint(0, 2), "bias": rng.random() < 0.7}
        groups = groups if self.x.shape[1] % groups == 0 else 1
        kernel = rng.choice((1, 2, 3))
        # Where a weight meets only padding, oneDNN leaves its bfloat16 gradient unwritten (torch 2.13).
        if min(self.x.shape[2:], default=0) < kernel + options["stride"] - 1:
            return
        # The backward of a strided convolution of one pixel, channels last, on two threads writes outside of
        # its tensors (torch 2.13: eager alone ends in an invalid free).
        if kernel == 1 and options["stride"] > 1 and not self.x.is_contiguous():
            return
        self.put(self.of_dims("Conv")(self.x.shape[1], out, kernel, groups=groups, **options))

    def pooling(self) -> None:
        rng = self.rng
        kind = rng.choice(("max", "max", "max", "adaptive", "average"))
        if kind == "adaptive":
            self.put(self.of_dims("AdaptiveMaxPool")(rng.randint(1, 5)))
            return
        kernel = rng.choice((1, 2, 2, 3, 4))
        options = {"stride": rng.choice((None, 1, 2, 3)), "padding": rng.randint(0, kernel // 2)}
        options["ceil_mode"] = rng.random() < 0.4
        if kind == "average":
            self.put(self.of_dims("AvgPool")(kernel, **options))
            return
        # A dilated window in the padding may have no element, and torch then writes outside of the gradient.
        dilation = 1 if options["padding"] else rng.choice((1, 1, 2))
        self.put(self.of_dims("MaxPool")(kernel, dilation=dilation, **options))

    def activation(self) -> None:
        choices: tuple[Callable[[], nn.Module], ...] = (
            nn.ReLU,
            nn.ReLU,
            lambda: nn.ReLU(inplace=bool(self.layers) and isinstance(self.layers[-1], _KEEPS_NO_RESULT)),
            nn.ReLU6,
            lambda: nn.Hardtanh(-0.5, 0.7),
            lambda: nn.LeakyReLU(self.rng.choice((0.0, 0.01, 0.3))),
            nn.Hardsigmoid,
            nn.Hardshrink,
            lambda: nn.Softshrink(0.1),
            lambda: nn.Threshold(0.1, 0.3),
            nn.Tanh,
            nn.SiLU,
            nn.GELU,
        )
        self.put(self.rng.choice(choices)())

    def formula(self) -> None:
        self.put(Formula(self.rng.choice(FORMULAS)))

    def norm(self) -> None:
        kinds: list[nn.Module] = [nn.LayerNorm(self.x.shape[-1])]
        if self.dims > 0:
            kinds += [self.of_dims("BatchNorm")(self.x.shape[1])]
            # Channels last and without a gradient of the input, its backward ends the process (torch 2.13).
            kinds += [nn.GroupNorm(1, self.x.shape[1])] if self.trains or self.x.is_contiguous() else []
        self.put(self.rng.choice(kinds))

    def dropout(self) -> None:
        self.put(nn.Dropout(self.rng.choice((0.1, 0.15, 0.5, 1.0))))

    def block(self, makers: Iterable[Callable[[], None]]) -> Block:
        """A block of the layers that these make."""
        before, self.layers = self.x, []
        for maker in makers:
            maker()
        made = Block(self.layers, self.rng.choice(("", "", "add", "cat")))
        self.x = made(before).detach()
        return made

    def linear(self) -> None:
        self.put(nn.Linear(self.x.shape[-1], self.rng.choice((3, 8, 17))))


def random_case(seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and a batch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims = rng.choice((1, 2, 2, 2, 3))
    sizes = {1: (16, 33), 2: (9, 16), 3: (5, 8)}[dims]
    shape = (rng.randint(1, 3), rng.choice((2, 4)), *(rng.choice(sizes) for _ in range(dims)))
    x = torch.randn(shape).to(rng.choice(DTYPES))
    if rng.random() < 0.3:
        x = with_special(x, rng.choice((0.01, 0.2)))
    if dims > 1 and rng.random() < 0.4:
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    builder = Builder(rng, x)
    of_images = [builder.convolution, builder.pooling, builder.activation, builder.norm]
    of_images += [builder.formula, builder.dropout, builder.activation, builder.pooling]
    blocks: list[nn.Module] = [
        builder.block([builder.convolution, *rng.choices(of_images, k=rng.randint(2, 4))])
    ]
    for _ in range(rng.randint(0, 2)):
        blocks.append(builder.block(rng.choices(of_images, k=rng.randint(2, 5))))
    of_rows = [builder.linear, builder.activation, builder.formula, builder.norm, builder.dropout]
    if rng.random() < 0.6:
        blocks.append(builder.block([lambda: builder.put(nn.Flatten())]))
    blocks.append(builder.block([builder.linear, *rng.choices(of_rows, k=rng.randint(1, 4)), builder.linear]))
    model = Net(blocks, rng.choice(("entropy", "square", "sum"))).to(x.dtype).train()
    rows, classes = builder.x.flatten(0, -2).shape
    return model, (x, torch.randint(classes, (rows,)))


def steps(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Losses, gradients and buffers of some steps."""
    found: list[Tensor] = []
    for seed in range(STEPS):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(*inputs)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


def check(seed: int, family: Family) -> int:
    """Hold a random model, with all ways of a family on, against eager; return how many there are.

    Raises:
        AssertionError: a loss, gradient or buffer has other bits.
    """
    model, inputs = random_head(seed) if family is FAMILIES["loss_head"] else random_case(seed)
    wanted = steps(copy.deepcopy(model), inputs)
    switches = 0
    for planner in (all_switched(), all_switched(seed)):
        module = PlannedModule(copy.deepcopy(model), inputs, {}, planner, ways=[family])
        switches = len(module.graph.switches)
        if not switches:
            return 0
        found = steps(module, inputs)
        assert len(wanted) == len(found), seed
        for one, other in zip(wanted, found, strict=True):
            assert same_bits(one, other), f"seed {seed}: {module.graph.switches}"
    return switches


def cases_with_ways(family: Family, count: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Check random models until `count` of them had ways of a family: (seed, switches) of each of these."""
    seed = first
    while count:
        switches = check(seed, family)
        if switches:
            count -= 1
            yield seed, switches
        seed += 1
