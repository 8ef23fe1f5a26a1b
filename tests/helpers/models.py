"""The models on which remat tests itself: each one small, seeded, and built without a download.

A case is a model in train mode (dropout on where its family has any), a batch, and the scalar to
differentiate. Activations are at least 80 % of the peak of one unplanned forward and backward, so that a
budget has something to bite on, and no single op holds more than half of it; a step takes well below half a
second on two CPU cores. Families are the ones people train (transformers and torchvision classes,
narrowed), and small networks of our own for what those do not show: tied, shared and frozen weights,
mutated buffers, aliased and nested outputs, complex numbers, mixed dtypes, parametrizations, models that
already checkpoint or autocast themselves.

    case = get_case("gpt2")
    model, (args, kwargs) = case.build(), case.sample(0)
    case.loss(model(*args, **kwargs)).backward()

transformers and torchvision are imported by the cases that need them, when they are built.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def mean_square(output: Any) -> Tensor:
    """Loss of any nest of outputs: the mean square of each differentiable leaf, summed."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def returned_loss(output: Any) -> Tensor:
    """The loss that the model computed itself: its output, or the `loss` of that."""
    loss = output if isinstance(output, Tensor) else output.loss
    assert isinstance(loss, Tensor)
    return loss


@attrs.frozen(kw_only=True)
class ModelCase:
    """One model, its batches and its loss.

    `sample(seed)` gives the same `(args, kwargs)` every time and, as `build`, leaves the global random state
    alone. `compile_flag_branch` marks models that compute something else (a few ulp) while
    `torch.compiler.is_compiling()` holds, as it does during capture: `reference_flag` gives what to compare
    with. `ci` marks the quick cut.
    """

    name: str
    family: str = attrs.field(validator=attrs.validators.in_(("transformers", "torchvision", "own")))
    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    loss: Callable[[Any], Tensor] = mean_square
    compile_flag_branch: bool = False
    ci: bool = False
    note: str = ""

    def build(self) -> nn.Module:
        """A new module in train mode, with the same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1234)
            return self.make().train()

    @property
    def returns_loss(self) -> bool:
        """Whether the model computes its loss, so that a plan of it covers the whole step."""
        return self.loss is returned_loss


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not fit the installed torch, a CPU build say.

    Its Python part then fails on two schemas that the operators would have brought; no model here calls them.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT_LIBRARIES.append(library)
    return importlib.import_module("torchvision")


def import_transformers() -> Any:
    """Import transformers, which imports torchvision itself where that is installed, and fails with it."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    return importlib.import_module("transformers")


_KEPT_LIBRARIES: list[torch.library.Library] = []  # a Library takes its schemas along when it is collected


@contextlib.contextmanager
def reference_flag(case: ModelCase) -> Iterator[None]:
    """Let the original model of `case` take the branch that capture takes, to compare bitwise with it."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = before or case.compile_flag_branch
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int) -> Callable[[int], Sample]:
    """Samples of one normal float tensor."""

    def sample(seed: int) -> Sample:
        return (torch.randn(shape, generator=_generator(seed)),), {}

    return sample


def _images_and_target(batch: int, size: int, channels: int = 3) -> Callable[[int], Sample]:
    """Samples of an image batch and one target value per pixel."""

    def sample(seed: int) -> Sample:
        generator = _generator(seed)
        images = torch.randn(batch, channels, size, size, generator=generator)
        return (images, torch.randn(batch, 1, size, size, generator=generator)), {}

    return sample


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[int], Sample]:
    """Samples of `input_ids` and of `labels` equal to them, as a causal language model is given."""

    def sample(seed: int) -> Sample:
        ids = torch.randint(3, vocabulary, (batch, length), generator=_generator(seed))
        return (), {"input_ids": ids, "labels": ids.clone()}

    return sample


def _padded_tokens(
    batch: int, length: int, vocabulary: int, *, padding: int = 0, classes: int | None = None
) -> Callable[[int], Sample]:
    """Samples with an attention mask and padded rows of unequal length; labels per token, or one per row."""

    def sample(seed: int) -> Sample:
        generator = _generator(seed)
        ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
        lengths = torch.randint(length // 2, length, (batch, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        ids = ids.masked_fill(mask == 0, padding)
        if classes is None:
            labels = ids.masked_fill(mask == 0, -100)
        else:
            labels = torch.randint(0, classes, (batch,), generator=generator)
        return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return sample


# ---------------------------------------------------------------------------------------------- transformers

DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
}
ENCODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
VIT = {
    "image_size": 32,
    "patch_size": 4,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": 10,
}
T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
WHISPER = {
    "vocab_size": 128,
    "num_mel_bins": 16,
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}


def _transformer(model: str, **config: Any) -> Callable[[], nn.Module]:
    """Builder of the transformers class `model` from `config`."""

    def make() -> nn.Module:
        cls = getattr(import_transformers(), model)
        module = cls(cls.config_class(**config))
        assert isinstance(module, nn.Module)
        return module

    return make


def _t5_sample(seed: int) -> Sample:
    generator = _generator(seed)
    source = torch.randint(3, 128, (8, 32), generator=generator)
    return (), {"input_ids": source, "labels": torch.randint(3, 128, (8, 24), generator=generator)}


def _vit_sample(seed: int) -> Sample:
    generator = _generator(seed)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    return (), {"pixel_values": images, "labels": torch.randint(0, 10, (8,), generator=generator)}


def _whisper_sample(seed: int) -> Sample:
    generator = _generator(seed)
    features = torch.randn(8, 16, 64, generator=generator)
    return (), {"input_features": features, "labels": torch.randint(3, 128, (8, 24), generator=generator)}


# ----------------------------------------------------------------------------------------------- torchvision


def _resnet18() -> nn.Module:
    import_torchvision()
    from torchvision.models.resnet import BasicBlock, ResNet

    class NarrowResNet(ResNet):
        """ResNet with a quarter of the channels, which the constructor cannot be asked for with basic blocks.

        The stem has an eighth: the gradient of its batch norm would hold half of the peak by itself.
        """

        def __init__(self, layers: list[int], num_classes: int) -> None:
            super().__init__(BasicBlock, layers)
            self.conv1 = nn.Conv2d(3, 8, kernel_size=7, stride=2, padding=3, bias=False)
            self.bn1 = nn.BatchNorm2d(8)
            self.fc = nn.Linear(128, num_classes)

        def _make_layer(
            self, block: type[Any], planes: int, blocks: int, stride: int = 1, dilate: bool = False
        ) -> nn.Sequential:
            if planes == 64:
                self.inplanes = 8
            return super()._make_layer(block, planes // 4, blocks, stride, dilate)

    return NarrowResNet([2, 2, 2, 2], num_classes=10)


def _vgg16() -> nn.Module:
    import_torchvision()
    from torchvision.models.vgg import VGG, make_layers

    class NarrowVGG(VGG):
        """VGG with an eighth of the channels or fewer, without its classifier of 102 million parameters."""

        def __init__(self, channels: list[str | int], num_classes: int) -> None:
            nn.Module.__init__(self)
            self.features = make_layers(channels)
            self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
            self.classifier = nn.Sequential(
                nn.Linear(64 * 4, 64),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(64, 64),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(64, num_classes),
            )

    stages: list[str | int] = [4, 4, "M", 16, 16, "M", 32, 32, 32, "M", 64, 64, 64, "M", 64, 64, 64, "M"]
    return NarrowVGG(stages, num_classes=10)


def _mobilenet_v2() -> nn.Module:
    import_torchvision()
    from torchvision.models import MobileNetV2

    return MobileNetV2(num_classes=10, width_mult=0.25)


def _googlenet() -> nn.Module:
    import_torchvision()
    from torchvision.models.googlenet import BasicConv2d, GoogLeNet, Inception, InceptionAux

    class NarrowAux(InceptionAux):
        """The auxiliary head, narrowed: its first linear layer has fixed sizes."""

        def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
            super().__init__(in_channels // 4, num_classes, dropout=dropout)
            self.conv = BasicConv2d(in_channels // 4, 16, kernel_size=1)
            self.fc1 = nn.Linear(16 * 16, 64)
            self.fc2 = nn.Linear(64, num_classes)

    def narrow_conv(in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
        return BasicConv2d(in_channels if in_channels == 3 else in_channels // 4, out_channels // 4, **kwargs)

    def narrow_inception(*channels: int) -> nn.Module:
        return Inception(*(count // 4 for count in channels))

    model = GoogLeNet(
        num_classes=10, aux_logits=True, init_weights=False, blocks=[narrow_conv, narrow_inception, NarrowAux]
    )
    model.fc = nn.Linear(256, 10)
    return model


def _densenet121() -> nn.Module:
    import_torchvision()
    from torchvision.models import DenseNet

    return DenseNet(
        growth_rate=4, block_config=(6, 12, 24, 16), num_init_features=8, drop_rate=0.1, num_classes=10
    )


def _efficientnet_b0() -> nn.Module:
    import_torchvision()
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stage = functools.partial(MBConvConfig, width_mult=0.25)
    stages = [
        stage(1, 3, 1, 32, 16, 1),
        stage(6, 3, 2, 16, 24, 2),
        stage(6, 5, 2, 24, 40, 2),
        stage(6, 3, 2, 40, 80, 3),
        stage(6, 5, 1, 80, 112, 3),
        stage(6, 5, 2, 112, 192, 4),
        stage(6, 3, 1, 192, 320, 1),
    ]
    return EfficientNet(stages, dropout=0.2, stochastic_depth_prob=0.2, num_classes=10, last_channel=128)


# ------------------------------------------------------------------------------------ our own: usual networks


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


def _sequential() -> nn.Module:
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
            block.qkv, block.out = LoraLinear(block.qkv, 4), LoraLinear(block.out, 4)  # type: ignore[assignment]
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


# -------------------------------------------------------------------------------------- our own: odd corners


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


def _multi_output_sample(seed: int) -> Sample:
    generator = _generator(seed)
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


def _spectral_norm() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    layers: list[nn.Module] = []
    widths = [3, 8, 8, 8, 16, 16, 32, 32]
    for (inputs, outputs), stride in zip(itertools.pairwise(widths), (1, 1, 1, 2, 1, 2, 1), strict=True):
        layers += [norm(nn.Conv2d(inputs, outputs, 3, stride, padding=1)), nn.LeakyReLU(0.2)]
        layers += [nn.Dropout2d(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), norm(nn.Linear(32, 1)))


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


def _stock_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)


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


# -------------------------------------------------------------------------------------------------- registry

_transformers = functools.partial(ModelCase, family="transformers", loss=returned_loss)
_torchvision = functools.partial(ModelCase, family="torchvision")
_own = functools.partial(ModelCase, family="own")

CASES: tuple[ModelCase, ...] = (
    _transformers(
        name="gpt2",
        make=_transformer("GPT2LMHeadModel", **DECODER, bos_token_id=0, eos_token_id=0),
        sample=_tokens(8, 48, 128),
        ci=True,
        note="the head is tied to the embedding",
    ),
    _transformers(
        name="llama",
        make=_transformer("LlamaForCausalLM", **DECODER, intermediate_size=172, num_key_value_heads=2),
        sample=_tokens(8, 64, 128),
        compile_flag_branch=True,
        note="attention is the fused kernel: with its causal flag in eager, with a mask under the flag",
    ),
    _transformers(
        name="qwen2",
        make=_transformer(
            "Qwen2ForCausalLM",
            **DECODER,
            intermediate_size=160,
            num_key_value_heads=2,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        ),
        sample=_padded_tokens(8, 48, 128),
        note="tied head; rows are padded, so that both branches build the same mask",
    ),
    _transformers(
        name="mistral",
        make=_transformer(
            "MistralForCausalLM",
            **DECODER,
            intermediate_size=160,
            num_key_value_heads=1,
            sliding_window=24,
            attention_dropout=0.1,
        ),
        sample=_tokens(8, 48, 128),
        note="the sliding window is shorter than the sequence",
    ),
    _transformers(
        name="mixtral",
        make=_transformer(
            "MixtralForCausalLM",
            **DECODER,
            intermediate_size=64,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_dropout=0.1,
            output_router_logits=True,
        ),
        sample=_tokens(8, 48, 128),
        note="grouped products over experts, under the flag in a custom op; top-k, sort, index; router loss",
    ),
    _transformers(
        name="t5",
        make=_transformer("T5ForConditionalGeneration", **T5),
        sample=_t5_sample,
        ci=True,
        note="one embedding has three uses; the relative position bias crosses all layers",
    ),
    _transformers(
        name="bert",
        make=_transformer("BertForMaskedLM", **ENCODER),
        sample=_padded_tokens(8, 48, 128),
        note="a tied weight and a tied bias",
    ),
    _transformers(
        name="roberta",
        make=_transformer("RobertaForSequenceClassification", **ENCODER, type_vocab_size=1, num_labels=5),
        sample=_padded_tokens(8, 48, 128, padding=1, classes=5),
    ),
    _transformers(name="vit", make=_transformer("ViTForImageClassification", **VIT), sample=_vit_sample),
    _transformers(
        name="whisper",
        make=_transformer("WhisperForConditionalGeneration", **WHISPER),
        sample=_whisper_sample,
        note="dropout on transposed tensors; the sinusoid table of the encoder is a frozen parameter",
    ),
    _transformers(
        name="mamba",
        make=_transformer(
            "MambaForCausalLM",
            vocab_size=128,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=4,
            time_step_rank=4,
            use_cache=False,
        ),
        sample=_tokens(8, 12, 128),
        compile_flag_branch=True,
        note="without its kernels a loop over the sequence, and an associative scan under the flag",
    ),
    _torchvision(name="resnet18", make=_resnet18, sample=_normal(24, 3, 96, 96), ci=True),
    _torchvision(name="vgg16", make=_vgg16, sample=_normal(16, 3, 64, 64)),
    _torchvision(name="mobilenet_v2", make=_mobilenet_v2, sample=_normal(8, 3, 64, 64), ci=True),
    _torchvision(
        name="googlenet",
        make=_googlenet,
        sample=_normal(8, 3, 96, 96),
        note="auxiliary logits",
    ),
    _torchvision(name="densenet121", make=_densenet121, sample=_normal(8, 3, 64, 64)),
    _torchvision(
        name="efficientnet_b0",
        make=_efficientnet_b0,
        sample=_normal(8, 3, 64, 64),
        note="stochastic depth per row",
    ),
    _own(
        name="unet_dropout",
        make=lambda: UNet(8),
        sample=_images_and_target(4, 64),
        loss=returned_loss,
        ci=True,
        note="dropout of whole channels",
    ),
    _own(
        name="lstm",
        make=lambda: LSTMLanguageModel(64, 32),
        sample=_tokens(32, 12, 64),
        loss=returned_loss,
        ci=True,
        note="eager runs a layer as one oneDNN op; torch 2.13's decomposition forgets the dropout",
    ),
    _own(name="sequential", make=_sequential, sample=_normal(8, 3, 32, 32), note="an nn.Sequential root"),
    _own(
        name="tied_weights",
        make=lambda: TiedTransformer(128, 64, 64),
        sample=_tokens(8, 64, 128),
        loss=returned_loss,
        note="modules, not parameters alone, appear under two names",
    ),
    _own(
        name="frozen",
        make=lambda: FrozenBackbone(64),
        sample=_normal(8, 3, 32, 32),
        note="most parameters have no gradient; a submodule is in eval mode",
    ),
    _own(
        name="fft", make=lambda: FourierOperator(12, 4), sample=_images_and_target(4, 32), loss=returned_loss
    ),
    _own(name="multi_output", make=lambda: MultiOutput(48), sample=_multi_output_sample),
    _own(name="alias_outputs", make=lambda: AliasedOutputs(32), sample=_normal(16, 32, 32)),
    _own(
        name="inplace_ema",
        make=lambda: InplaceEMA(32, 24),
        sample=_normal(16, 32, 32),
        loss=returned_loss,
        note="a buffer is read, updated and read again, three times a forward",
    ),
    _own(
        name="diffusion",
        make=lambda: Diffusion(16),
        sample=_normal(8, 3, 16, 16),
        loss=returned_loss,
        note="draws time steps and noise in the forward",
    ),
    _own(name="mixed_dtype", make=lambda: MixedDtype(48), sample=_normal(16, 32, 48)),
    _own(name="self_autocast", make=lambda: SelfAutocast(48), sample=_normal(16, 32, 48)),
    _own(
        name="weight_norm", make=lambda: WeightNormWaveNet(16), sample=_normal(8, 1, 256), loss=returned_loss
    ),
    _own(
        name="spectral_norm",
        make=_spectral_norm,
        sample=_normal(8, 3, 32, 32),
        note="each forward moves the buffers of the power iteration",
    ),
    _own(
        name="shared_layer",
        make=lambda: SharedLayer(48),
        sample=_normal(16, 32, 48),
        note="a parameter is never used: its gradient stays None",
    ),
    _own(
        name="checkpointed",
        make=lambda: AlreadyCheckpointed(48),
        sample=_normal(32, 32, 48),
        note="a captured graph saves what the checkpoints would not: saving all of it peaks above eager",
    ),
    _own(name="stock_transformer", make=_stock_transformer, sample=_normal(16, 32, 48)),
    _own(name="custom_function", make=lambda: CustomFunctions(8), sample=_normal(4, 1, 12, 16, 16)),
)

CI_CASES: tuple[ModelCase, ...] = tuple(case for case in CASES if case.ci)


def get_case(name: str) -> ModelCase:
    """The case called `name`."""
    by_name = {case.name: case for case in CASES}
    if name not in by_name:
        raise KeyError(f"no model case {name!r}; there are {', '.join(by_name)}")
    return by_name[name]
