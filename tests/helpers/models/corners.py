"""Networks of our own with one unusual property each: outputs, buffers, dtypes, parametrizations."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models.networks import Block
from tests.helpers.models.samples import Sample, seeded


class Scores(NamedTuple):
    """Two heads of one network."""

    coarse: Tensor
    fine: Tensor


class MultiOutput(nn.Module):
    """A nest of outputs: a dict with a named tuple, integers, a detached tensor, a number and None in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(6)
        )
        self.coarse, self.fine = nn.Linear(width, 3), nn.Linear(width, 9)

    def forward(self, inputs: dict[str, Tensor], *, scale: float = 1.0) -> dict[str, Any]:
        x = inputs["features"] * scale
        for layer in self.trunk:
            x = x + layer(x)
        x = F.layer_norm(x, x.shape[-1:])
        scores = Scores(self.coarse(x.mean(1)), self.fine(x.amax(1)))
        label = scores.fine.argmax(-1)
        return {
            "scores": scores,
            "label": label,
            "memory": x[:, -1].detach(),
            "extra": [inputs["weight"] * scores.coarse.sum(-1), None, len(self.trunk)],
        }


def multi_output_sample(seed: int) -> Sample:
    generator = seeded(seed)
    features, weight = torch.randn(16, 32, 48, generator=generator), torch.rand(16, generator=generator)
    return ({"features": features, "weight": weight},), {"scale": 0.5}


class AliasedOutputs(nn.Module):
    """Outputs that share storage: two halves of one tensor, a view of an output, and the input itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GLU(), nn.LayerNorm(width), nn.Tanh())
            for _ in range(5)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden) + hidden
        out = self.head(hidden.mean(1))
        left, right = out.chunk(2, dim=-1)
        return x, left, right, out, out.view(-1, 2)


class RunningCodebook(nn.Module):
    """Vector quantization with a straight-through gradient; the codebook is a buffer."""

    codebook: Tensor
    cluster_size: Tensor
    steps: Tensor

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        distance = (
            flat.square().sum(1, keepdim=True) - 2 * flat @ self.codebook.t() + self.codebook.square().sum(1)
        )
        chosen = F.one_hot(distance.argmin(1), self.codebook.shape[0]).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.cluster_size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                update = chosen.t() @ flat / self.cluster_size.clamp(min=1e-3)[:, None]
                self.codebook.lerp_(update, 0.1)
        # The codes are read after the update: a recomputation that sees another version is wrong.
        quantized = (chosen @ self.codebook).view_as(x)
        return x + (quantized - x).detach()


class InplaceEMA(nn.Module):
    """In-place arithmetic wherever autograd allows it, and a codebook that moves three times a forward."""

    mean: Tensor

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.quantize = RunningCodebook(width, codes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.99).add_(x.detach().mean((0, 1)), alpha=0.01)
        hidden = x - self.mean
        for encode, decode in zip(self.encoder, self.decoder, strict=True):
            hidden = self.quantize(encode(hidden).add_(0.1).relu_())
            residual = decode(hidden)
            residual[:, 0] = 0.0
            residual.masked_fill_(residual > 2.0, 2.0).mul_(0.5)
            hidden = hidden.clone()
            hidden += F.dropout(residual, 0.1, self.training, inplace=True)
        return F.mse_loss(hidden, x)


class MixedDtype(nn.Module):
    """bfloat16 linear layers, float32 norms and residual, a float64 head: casts in both directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.wide = nn.ModuleList(nn.Linear(width, 2 * width, dtype=torch.bfloat16) for _ in range(5))
        self.slim = nn.ModuleList(nn.Linear(2 * width, width, dtype=torch.bfloat16) for _ in range(5))
        self.head = nn.Linear(width, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for norm, wide, slim in zip(self.norms, self.wide, self.slim, strict=True):
            hidden = slim(F.dropout(F.silu(wide(norm(x).bfloat16())), 0.1, self.training))
            x = x + hidden.float()
        return self.head(x.mean(1, dtype=torch.float64)), x.mean((1, 2))


class SelfAutocast(nn.Module):
    """A model that enters autocast itself.

    Each weight has one use: of several, eager would sum the gradients in bfloat16, on the cast that
    autocast caches; a capture has no such cache, and sums in float32.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
            pooled = x.mean(1)
        return self.head(pooled.float())


class WeightNormWaveNet(nn.Module):
    """Dilated gated convolutions with weight norm: small ops that depend on parameters alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.inward = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 3, padding=2**level, dilation=2**level))
            for level in range(5)
        )
        self.mixes = nn.ModuleList(weight_norm(nn.Conv1d(width, 2 * width, 1)) for _ in range(5))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, wave: Tensor) -> Tensor:
        x, total = self.inward(wave), torch.zeros((), device=wave.device)
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            left, right = gate(x).chunk(2, dim=1)
            residual, skip = mix(torch.tanh(left) * torch.sigmoid(right)).chunk(2, dim=1)
            x, total = x + residual, total + skip
        return F.smooth_l1_loss(self.head(F.relu(total))[..., :-1], wave[..., 1:])


def spectral_norm() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    layers: list[nn.Module] = []
    widths = [3, 8, 8, 8, 16, 16, 32, 32]
    for (inputs, outputs), stride in zip(itertools.pairwise(widths), (1, 1, 1, 2, 1, 2, 1), strict=True):
        layers += [norm(nn.Conv2d(inputs, outputs, 3, stride, padding=1)), nn.LeakyReLU(0.2)]
        layers += [nn.Dropout2d(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), norm(nn.Linear(32, 1)))


class _ReverseGradient(torch.autograd.Function):
    """Identity forward, gradient times -`strength` backward, as domain-adversarial training uses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.strength * grad, None


class _FrugalSwish(torch.autograd.Function):
    """Swish that saves its input alone, as older vision code does to spare memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate * (1 + x * (1 - gate)))


class CustomFunctions(nn.Module):
    """Hand-written autograd functions in a volume network: 3D convolutions, pooling, trilinear upsampling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward = nn.Conv3d(1, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv3d(width, width, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.InstanceNorm3d(width, affine=True) for _ in range(4))
        self.head, self.domain = nn.Linear(width, 5), nn.Linear(width, 2)

    def forward(self, volume: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inward(volume)
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = x + _FrugalSwish.apply(norm(conv(x)))
            if index == 1:
                small = F.max_pool3d(x, 2)
                x = x + F.interpolate(small, size=x.shape[2:], mode="trilinear", align_corners=False)
        pooled = x.mean((2, 3, 4))
        return self.head(pooled), self.domain(_ReverseGradient.apply(pooled, 0.3))
