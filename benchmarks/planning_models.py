"""The graphs on which planning is timed: the tests' models, twenty of no other table, and two deep ones.

Times are a roofline's, so a graph does not depend on the machine: the tests' models on that of a CPU, the
others in bfloat16, at batches for a GPU, traced from shapes on the meta device. All exact ways are on offer.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import implementations
from benchmarks.implementations import ImageLoss, LanguageLoss, Made
from remat_executor import estimated_graph
from remat_executor.ways.registry import EXACT
from remat_graph import Graph, Roofline
from tests.helpers.acceptance import whole_step
from tests.helpers.models import CASES, import_torchvision, import_transformers

CPU = Roofline(flops_per_s=5e10, nbytes_per_s=8e9)
"""About two cores."""


INITIALIZED_FROM_VALUES = ("regnet_y_400mf",)  # which the meta device does not have


def images(name: str, batch: int, size: int = 224) -> Made:
    """A classifier of torchvision and its batch."""
    make = getattr(import_torchvision().models, name)
    if name in INITIALIZED_FROM_VALUES:
        return _with_loss(make(), batch, size)
    with torch.device("meta"):
        model = make(init_weights=False) if name == "inception_v3" else make()
    return _with_loss(model, batch, size)


def timm_images(name: str, batch: int, size: int = 224) -> Made:
    """A classifier of timm and its batch."""
    import_torchvision()
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    return _with_loss(model, batch, size)


def _with_loss(model: nn.Module, batch: int, size: int) -> Made:
    target = torch.zeros(batch, dtype=torch.long)
    return ImageLoss(_Scores(model)), {"images": torch.empty(batch, 3, size, size), "target": target}


class _Scores(nn.Module):
    """The scores alone of a classifier that may return others beside them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found = self.model(images)
        scores: Tensor = getattr(found, "logits", found)
        return scores


def words(kind: str, config: str, batch: int, tokens: int, **sizes: Any) -> Made:
    """A model of transformers with its own loss, and its batch."""
    transformers = import_transformers()
    settings = getattr(transformers, config)(**sizes)
    settings.use_cache = False
    settings._attn_implementation = "eager" if kind.startswith("Gemma2") else "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, kind)(settings)
    ids = torch.randint(3, settings.vocab_size, (batch, tokens))
    return LanguageLoss(model), {"input_ids": ids, "labels": ids.clone()}


def pixels(kind: str, config: str, batch: int, size: int = 224, **sizes: Any) -> Made:
    """A classifier of images of transformers and its batch."""
    transformers = import_transformers()
    settings = getattr(transformers, config)(num_labels=1000, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, kind)(settings)
    return _with_loss(model, batch, size)


SMALL: Mapping[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
UNSEEN: Mapping[str, Callable[[], Made]] = {
    "shufflenet_v2_x1_0": lambda: images("shufflenet_v2_x1_0", 64),
    "squeezenet1_1": lambda: images("squeezenet1_1", 64),
    "regnet_y_400mf": lambda: images("regnet_y_400mf", 64),
    "convnext_tiny": lambda: images("convnext_tiny", 32),
    "mnasnet1_0": lambda: images("mnasnet1_0", 64),
    "resnext50_32x4d": lambda: images("resnext50_32x4d", 32),
    "inception_v3": lambda: images("inception_v3", 32, 299),
    "swin_v2_t": lambda: images("swin_v2_t", 32, 256),
    "opt": lambda: words("OPTForCausalLM", "OPTConfig", 8, 1024, ffn_dim=4096, **SMALL),
    "phi3": lambda: words(
        "Phi3ForCausalLM", "Phi3Config", 4, 1024, intermediate_size=2816, pad_token_id=0, **SMALL
    ),
    "gemma2": lambda: words(
        "Gemma2ForCausalLM", "Gemma2Config", 2, 1024, intermediate_size=4096, num_key_value_heads=8, **SMALL
    ),
    "gpt_neox": lambda: words(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", 4, 1024, intermediate_size=4096, **SMALL
    ),
    "bart": lambda: words(
        "BartForConditionalGeneration", "BartConfig", 8, 512, encoder_layers=4, decoder_layers=4
    ),
    "electra": lambda: words("ElectraForMaskedLM", "ElectraConfig", 32, 512),
    "distilbert": lambda: words("DistilBertForMaskedLM", "DistilBertConfig", 32, 512),
    "dinov2": lambda: pixels("Dinov2ForImageClassification", "Dinov2Config", 32),
    "segformer": lambda: pixels("SegformerForImageClassification", "SegformerConfig", 32),
    "ghostnet_100": lambda: timm_images("ghostnet_100", 64),
    "poolformer_s12": lambda: timm_images("poolformer_s12", 32),
    "mixer_b16_224": lambda: timm_images("mixer_b16_224", 32),
}
DEEP: Mapping[str, Callable[[], Made]] = {
    "gpt2_30_layers": lambda: implementations.language_model(
        "GPT2LMHeadModel", "GPT2Config", 8, 1024, n_layer=30
    ),
    "gpt2_112_layers": lambda: implementations.language_model(
        "GPT2LMHeadModel", "GPT2Config", 8, 1024, n_layer=112
    ),
}
NAMES = (*(case.name for case in CASES), *UNSEEN, *DEEP)


def graphs(names: list[str]) -> Iterator[tuple[str, Graph]]:
    """The graphs of these names, in the order of `NAMES`."""
    for case in CASES:
        if case.name in names:
            model, _ = whole_step(case)
            yield case.name, estimated_graph(model, *case.sample(0), CPU, ways=EXACT)
    for name, make in {**UNSEEN, **DEEP}.items():
        if name in names:
            yield name, implementations.traced_step(*make(), ways=EXACT)
