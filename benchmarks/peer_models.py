"""The models of the peers' tables: three language models, an encoder with a decoder, four of images.

Each is small enough that a step takes well below a second on one core, has no dropout, and comes with its
loss, so that a method covers the whole step. What a checkpoint goes around is named here too: the blocks,
each in a container (`ModuleList`, `Sequential`) that runs it after its neighbour.
"""

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from tests.helpers.models import import_torchvision, import_transformers


def hidden_first(output: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What most blocks are given: what the block before returned, and the rest as that one had it."""
    return (output, *given[1:])


def t5_onward(output: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """A block of T5 also returns the position biases that the first one made, third and sixth of the next."""
    hidden, bias, cross_bias = output
    _, mask, _, encoded, encoded_mask, _ = given
    return hidden, mask, bias, encoded, encoded_mask, cross_bias


@attrs.frozen(kw_only=True)
class Model:
    """What is trained in one table.

    Attributes:
        about: for the table's head.
        make: a fresh network.
        sample: its input.
        loss: of network and sample.
        blocks: what is checkpointed.
        onward: from what a block returned and what it was given to what its neighbour is given.
        head: of network and sample: what the last linear layer is given, its weight, and the labels.
        branches: it computes something else (a few ulp) where it believes that it is being captured.
        promises: budget in MiB -> most percent of FLOPs recomputed; 0 stands for the peak of a checkpoint per
            block.
    """

    about: str
    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    blocks: Callable[[Any], list[nn.Module]]
    onward: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] = hidden_first
    head: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    branches: bool = False
    promises: dict[int, float] = attrs.field(factory=dict)


class Step(nn.Module):
    """A network with its loss, so that a plan covers the whole step."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = model.make().train()
        self._loss = model.loss

    def forward(self, sample: Tensor) -> Tensor:
        """The loss."""
        return self._loss(self.network, sample)


def transformer_loss(network: Any, ids: Tensor) -> Tensor:
    """The loss that the model itself computes; the rest of what it returns goes at once."""
    loss: Tensor = network(input_ids=ids, labels=ids).loss
    return loss


def gpt2_head(network: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the last hidden state, the weight that makes them logits, and the next words."""
    hidden = network.transformer(input_ids=ids).last_hidden_state
    return hidden[:, :-1].flatten(0, 1), network.lm_head.weight, ids[:, 1:].flatten()


def classifier_loss(network: Any, images: Tensor) -> Tensor:
    """Cross entropy against fixed classes."""
    classes = torch.arange(len(images), device=images.device) % 10
    return nn.functional.cross_entropy(network(images), classes)


def reconstruction_loss(network: Any, images: Tensor) -> Tensor:
    """Mean square distance to the images themselves."""
    return nn.functional.mse_loss(network(images), images)


# ------------------------------------------------------------------------------------------ language


def _gpt2(vocabulary: int, layers: int, width: int) -> nn.Module:
    transformers = import_transformers()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=128,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    network: nn.Module = transformers.GPT2LMHeadModel(config)
    network.loss_type = "ForCausalLM"  # what it would choose anyway, with a warning that cannot be captured
    return network


def _llama() -> nn.Module:
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=512,
        max_position_embeddings=128,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        use_cache=False,
    )
    network: nn.Module = transformers.LlamaForCausalLM(config)
    return network


def _t5() -> nn.Module:
    transformers = import_transformers()
    config = transformers.T5Config(
        vocab_size=512,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    network: nn.Module = transformers.T5ForConditionalGeneration(config)
    return network


def _tokens(vocabulary: int = 512, batch: int = 8) -> Tensor:
    return torch.randint(vocabulary, (batch, 128), generator=torch.Generator().manual_seed(1))


# -------------------------------------------------------------------------------------------- images


def _resnet(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        network: nn.Module = getattr(import_torchvision().models, name)(num_classes=10)
        return network

    return make


def _resnet_blocks(network: Any) -> list[nn.Module]:
    return [block for i in range(1, 5) for block in getattr(network, f"layer{i}")]


def _vit() -> nn.Module:
    network: nn.Module = import_torchvision().models.VisionTransformer(
        image_size=96,
        patch_size=16,
        num_layers=8,
        num_heads=4,
        hidden_dim=128,
        mlp_dim=512,
        num_classes=10,
    )
    return network


class ConvBlock(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inside: int, outside: int) -> None:
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


CHANNELS = 3  # of the images


class UNet(nn.Module):
    """A U-Net of three levels, two blocks each on the way down and on the way up, and one before the head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(ConvBlock(i, o), ConvBlock(o, o))
            for i, o in itertools.pairwise([CHANNELS, *widths])
        )
        upward = list(itertools.pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in upward)
        self.up = nn.ModuleList(nn.Sequential(ConvBlock(2 * o, o), ConvBlock(o, o)) for _, o in upward)
        self.up[-1].append(ConvBlock(width, width))
        self.head = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Images of the same shape."""
        x = self.down[0](images)
        skips = []
        for level in self.down[1:]:
            skips.append(x)
            x = level(nn.functional.max_pool2d(x, 2))
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            x = level(torch.cat([skips.pop(), enlarge(x)], dim=1))
        found: Tensor = self.head(x)
        return found


def _unet_blocks(network: Any) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, ConvBlock)]


def _images(batch: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, 96, 96, generator=torch.Generator().manual_seed(1))


MODELS = {
    "gpt2": Model(
        about="8 layers of 128, 4 heads, vocabulary 512, no dropout, batch 8 x 128",
        make=lambda: _gpt2(512, layers=8, width=128),
        sample=_tokens,
        loss=transformer_loss,
        blocks=lambda network: list(network.transformer.h),
        promises={0: 16.0, 51: 0.0, 45: 3.0},
    ),
    "gpt2_words": Model(
        about="4 layers of 256, 4 heads, GPT-2's vocabulary of 50,257, no dropout, batch 4 x 128",
        make=lambda: _gpt2(50_257, layers=4, width=256),
        sample=lambda: _tokens(50_257, batch=4),
        loss=transformer_loss,
        blocks=lambda network: list(network.transformer.h),
        head=gpt2_head,
    ),
    "llama": Model(
        about="8 layers of 128, 4 heads, vocabulary 512, batch 8 x 128",
        make=_llama,
        sample=_tokens,
        loss=transformer_loss,
        blocks=lambda network: list(network.model.layers),
        branches=True,
    ),
    "t5": Model(
        about="4 + 4 layers of 128, 4 heads, vocabulary 512, no dropout, batch 8 x 128",
        make=_t5,
        sample=_tokens,
        loss=transformer_loss,
        blocks=lambda network: [*network.encoder.block, *network.decoder.block],
        onward=t5_onward,
    ),
    "resnet18": Model(
        about="10 classes, batch 8 x 3 x 96 x 96",
        make=_resnet("resnet18"),
        sample=_images(8),
        loss=classifier_loss,
        blocks=_resnet_blocks,
    ),
    "resnet50": Model(
        about="10 classes, batch 4 x 3 x 96 x 96",
        make=_resnet("resnet50"),
        sample=_images(4),
        loss=classifier_loss,
        blocks=_resnet_blocks,
    ),
    "unet": Model(
        about="3 levels of 16 to 64 channels, 11 blocks, batch 2 x 3 x 96 x 96",
        make=lambda: UNet(16),
        sample=_images(2),
        loss=reconstruction_loss,
        blocks=_unet_blocks,
    ),
    "vit": Model(
        about="8 layers of 128, 4 heads, patches of 16, no dropout, 10 classes, batch 8 x 3 x 96 x 96",
        make=_vit,
        sample=_images(8),
        loss=classifier_loss,
        blocks=lambda network: list(network.encoder.layers),
    ),
}
