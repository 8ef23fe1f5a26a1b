"""Usual networks of our own: a transformer block, a U-Net, an LSTM, tied weights, a diffusion model."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block with causal attention and dropout."""

    def __init__(self, width: int, heads: int, dropout: float, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), p, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), p, self.training)


class UNet(nn.Module):
    """A U-Net of three levels with batch norm and channel dropout, which returns its loss."""

    def __init__(self, width: int, dropout: float = 0.2) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self._level(i, o, dropout) for i, o in itertools.pairwise([3, *widths]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, stride=2) for i, o in itertools.pairwise(widths))
        self.merge = nn.ModuleList(self._level(2 * w, w, dropout) for w in widths[:-1])
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _level(inputs: int, outputs: int, dropout: float) -> nn.Module:
        layers: list[nn.Module] = []
        for count in (inputs, outputs):
            layers += [nn.Conv2d(count, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Dropout2d(dropout))

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = images
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return F.binary_cross_entropy_with_logits(self.head(x), target.sigmoid())


class LSTMLanguageModel(nn.Module):
    """Two LSTM layers with dropout between them, then a small head; returns its loss."""

    def __init__(self, vocabulary: int, width: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=dropout, batch_first=True)
        mlp = [nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout)]
        self.head = nn.Sequential(nn.LayerNorm(width), *mlp, nn.Linear(4 * width, vocabulary))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ConvNet(nn.Module):
    """Four convolutions with batch norm and relu, then pooling and a linear classifier; returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (3, width, width, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores = self.classifier(self.features(images))
        return F.cross_entropy(scores, torch.arange(len(images), device=images.device) % 10)


class TanhGELU(nn.Module):
    """GELU by a tanh, as GPT-2 writes it: eight calls, of which the backward reads five results."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def wide_activations(width: int, depth: int) -> nn.Module:
    """Narrow layers and wide activations, which are most of the step."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(32, width), TanhGELU(), nn.Linear(width, 32)]
    return nn.Sequential(*layers)


def sequential() -> nn.Module:
    layers: list[nn.Module] = []
    widths = [3, 16, 16, 32, 32, 48, 48]
    for (inputs, outputs), stride in zip(itertools.pairwise(widths), (1, 1, 2, 1, 2, 1), strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs)]
        layers += [nn.LeakyReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


class TiedTransformer(nn.Module):
    """One matrix is embedding and head, and two pairs of blocks share an MLP: parameters of several uses."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        mlps = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        ]
        self.blocks = nn.ModuleList(Block(width, 4, 0.1, mlps[index % 2]) for index in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(F.dropout(x, 0.05, self.training), self.a), self.b)


class FrozenBackbone(nn.Module):
    """A frozen stem and frozen blocks with low-rank adapters, then a trained head.

    One batch norm of the stem still counts, the other stays in eval mode while the model trains.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width), nn.ReLU())
        self.fixed_norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(4))
        self.requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.qkv, block.out = LoraLinear(block.qkv, 4), LoraLinear(block.out, 4)
        self.head = nn.Linear(width, 10)

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.fixed_norm.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = self.fixed_norm(self.stem(images)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


class SpectralConv(nn.Module):
    """Multiplication by complex weights on the lowest Fourier modes, as in a Fourier neural operator."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, dtype=torch.complex64) / width)

    def forward(self, x: Tensor) -> Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weight[0])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.weight[1])
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FourierOperator(nn.Module):
    """Four spectral layers, then a fully complex one (no real detour) whose phase and modulus both matter."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(4))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
        self.filter = nn.Parameter(torch.randn(width, 1, 1, dtype=torch.complex64))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.lift(images)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        z = torch.fft.fft2(x, norm="ortho") * self.filter
        x = torch.fft.ifft2(z * torch.exp(1j * z.angle()).conj(), norm="ortho").real + z.abs()
        return F.mse_loss(self.head(x), target)


class DiffusionBlock(nn.Module):
    """Group norm, SiLU, a shift by the time step, dropout, then full attention over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, width) for _ in range(3))
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(width, 2 * width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm2(self.conv1(F.silu(self.norm1(x)))) * (1 + scale) + shift
        x = x + self.conv2(F.dropout(F.silu(hidden), 0.1, self.training))
        q, k, v = self.qkv(self.norm3(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.out(attended.unflatten(2, x.shape[2:]))


class Diffusion(nn.Module):
    """Denoising loss that draws its time steps and noise itself: random numbers without any dropout."""

    cumulative: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("cumulative", torch.linspace(0.99, 0.01, 100))
        self.embedding = nn.Embedding(100, width)
        self.inward, self.outward = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        step = torch.randint(0, 100, (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        signal = self.cumulative[step][:, None, None, None]
        x = self.inward(signal.sqrt() * images + (1 - signal).sqrt() * noise)
        time = self.embedding(step)
        for block in self.blocks:
            x = block(x, time)
        return F.mse_loss(self.outward(x), noise)


class SharedLayer(nn.Module):
    """One block applied six times, with stochastic depth, and a parameter that no output depends on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width, 4, 0.1)
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            kept = torch.rand(x.shape[0], 1, 1, device=x.device) < 0.9
            x = x + kept * (self.block(x) - x)
        return self.head(x.mean(1))


class AlreadyCheckpointed(nn.Module):
    """A model whose author has placed checkpoints by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


def stock_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
