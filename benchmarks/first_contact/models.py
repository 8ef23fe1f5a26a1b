"""Models in plain torch, each of another kind: `forward` takes one tensor and returns the loss."""

from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import UNet


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class GPTBlock(nn.Module):
    """Attention and a perceptron, each behind a layer norm and followed by dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.inner(self.norms[1](x))


class GPT(nn.Module):
    """A GPT with dropout, also inside of attention."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, 0.1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return _next_token_loss(self.head(self.norm(x)), ids)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return scaled.to(x.dtype) * self.weight


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class LlamaBlock(nn.Module):
    """Attention with rotary embeddings and a SwiGLU perceptron."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (_heads(part(y), self.heads) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_rotated(q, angles), _rotated(k, angles), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama without buffers."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.half_head = width // heads // 2
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)  # one kernel on CUDA, where those above are several
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        step = torch.arange(self.half_head, device=ids.device, dtype=torch.float32)
        angles = place[:, None] * 10_000.0 ** (-step / self.half_head)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, angles)
        return _next_token_loss(self.head(self.norm(x)), ids)


class Bottleneck(nn.Module):
    """Three convolutions with batch norms around a residual."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


class ResNet(nn.Module):
    """The usual residual network with bottlenecks."""

    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inside = [], width
        for stage, depth in enumerate(depths):
            for place in range(depth):
                blocks.append(Bottleneck(inside, width << stage, 2 if stage and not place else 1))
                inside = 4 * (width << stage)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(inside, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).square().mean()


class ImageToImage(nn.Module):
    """A U-Net with its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = UNet(width)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).square().mean()


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and a perceptron over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        return x + (self.scale * self.inner(self.norm(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A ConvNeXt, whose tensors are channels-last."""

    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
        for stage, depth in enumerate(depths):
            if stage:
                layers.append(nn.Conv2d(width, 2 * width, 2, 2))
                width *= 2
            layers.extend(ConvNeXtBlock(width) for _ in range(depth))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(images.contiguous(memory_format=torch.channels_last))
        return self.head(x.mean((2, 3))).square().mean()


class Experts(nn.Module):
    """A perceptron for each group of tokens: gathers and adds at computed places."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts, self.norm = experts, nn.LayerNorm(width)
        self.route = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weight, expert = self.route(y).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        groups = y[order].unflatten(0, (self.experts, -1))
        made = torch.bmm(F.gelu(torch.bmm(groups, self.up)), self.down).flatten(0, 1)
        return x.index_add(0, order, made * weight[order, None])


class Mixture(nn.Module):
    """An LSTM over embedded tokens, then mixtures of experts."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.blocks = nn.ModuleList(Experts(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.recurrent(self.tokens(ids))[0]
        x = found.flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return _next_token_loss(self.head(x).unflatten(0, ids.shape), ids)


# -- the models of the rows


@attrs.frozen
class Task:
    """A model and batches for it, both made on the device.

    Attributes:
        build: makes the model, in training mode.
        shape: of a batch.
        vocabulary: of a batch of tokens; None for images.
        dtype: of the model.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int | None = None
    dtype: torch.dtype = torch.float32

    def model(self, device: torch.device) -> nn.Module:
        """The same values each time."""
        torch.manual_seed(1)
        with device:
            return self.build().to(self.dtype).train()

    def batch(self, device: torch.device, seed: int = 0) -> Tensor:
        """A batch of this seed."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary is not None:
            return torch.randint(self.vocabulary, self.shape, generator=generator).to(device)
        return torch.randn(self.shape, generator=generator).to(device)


def channels_last_convnext(depths: tuple[int, ...], width: int) -> nn.Module:
    """A ConvNeXt whose weights are channels-last too."""
    return ConvNeXt(depths, width).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


TASKS = {
    "gpt": Task(lambda: GPT(8, 768, 12, 16_384, 512), (8, 512), 16_384),
    "llama": Task(lambda: Llama(8, 1024, 16, 2816, 16_384), (16, 1024), 16_384, torch.bfloat16),
    "resnet": Task(lambda: ResNet((3, 4, 6, 3), 64), (96, 3, 224, 224)),
    "unet": Task(lambda: ImageToImage(32), (8, 3, 256, 256)),
    "convnext": Task(lambda: channels_last_convnext((3, 3, 9, 3), 96), (48, 3, 224, 224)),
    "mixture": Task(lambda: Mixture(6, 512, 8192), (32, 256), 8192),
}
SMALL_TASKS = {
    "gpt": Task(lambda: GPT(3, 32, 2, 64, 16), (2, 16), 64),
    "llama": Task(lambda: Llama(3, 32, 2, 48, 64), (2, 16), 64, torch.bfloat16),
    "resnet": Task(lambda: ResNet((1, 1), 8), (4, 3, 32, 32)),
    "unet": Task(lambda: ImageToImage(2), (2, 3, 32, 32)),
    "convnext": Task(lambda: channels_last_convnext((2, 2), 8), (2, 3, 32, 32)),
    "mixture": Task(lambda: Mixture(3, 16, 64), (4, 16), 64),
}
ONE_BILLION = Task(lambda: Llama(20, 2048, 16, 5632, 32_000), (4, 2048), 32_000, torch.bfloat16)


def task(name: str, *, small: bool) -> Task:
    """A model of the rows, or a tiny one of its kind."""
    return (SMALL_TASKS if small else TASKS)[name]
