"""Make graphs in the corpus format from models that the corpus does not hold, to try the solvers on.

    python benchmarks/graphs.py FOLDER [--model NAME]...
    python benchmarks/solvers.py FOLDER

Wide early layers (mobile networks), dense connections, windows and shifts, an encoder-decoder of images,
language models with a head: torchvision and transformers models with random weights, bf16, at batch sizes for
a GPU, of which nothing runs. Times are the corpus' roofline. Half a minute to some minutes a model.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from remat_executor import step_graph
from remat_graph import Graph, Role, Roofline
from tests.helpers.models import import_torchvision, import_transformers


class ImageLoss(nn.Module):
    """A classifier or a segmentation model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        """Images [N, 3, S, S] and one class an image [N]."""
        found = self.model(images)
        logits = found["out"] if isinstance(found, dict) else found
        if logits.ndim == 4:
            target = target[:, None, None].expand(-1, *logits.shape[2:]).contiguous()
        return F.cross_entropy(logits.float(), target)


@attrs.frozen
class Images:
    """A torchvision model on square images."""

    make: Callable[[Any], nn.Module]
    batch: int
    size: int = 224

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model and its sample."""
        model = ImageLoss(self.make(import_torchvision().models))
        images = torch.randn(self.batch, 3, self.size, self.size)
        return model, {"images": images.bfloat16(), "target": torch.zeros(self.batch, dtype=torch.long)}


@attrs.frozen
class Tokens:
    """A transformers language model that returns its loss."""

    kind: str
    config: str
    batch: int
    length: int
    options: dict[str, int] = attrs.field(factory=dict)

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model and its sample."""
        transformers = import_transformers()
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = "eager"
        ids = torch.randint(3, config.vocab_size, (self.batch, self.length))
        return getattr(transformers, self.kind)(config), {"input_ids": ids, "labels": ids}


LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
MODELS: dict[str, Images | Tokens] = {
    "mobilenet_v3": Images(lambda models: models.mobilenet_v3_large(), 64),
    "densenet121": Images(lambda models: models.densenet121(), 32),
    "efficientnet_b0": Images(lambda models: models.efficientnet_b0(), 32),
    "swin_t": Images(lambda models: models.swin_t(), 32),
    "fcn_resnet50": Images(lambda models: models.segmentation.fcn_resnet50(weights_backbone=None), 8, 320),
    "googlenet": Images(lambda models: models.googlenet(aux_logits=False, init_weights=False), 64),
    "vit_b": Images(lambda models: models.vit_b_16(), 32),
    "bert": Tokens("BertForMaskedLM", "BertConfig", 8, 512),
    "gpt2_head": Tokens("GPT2LMHeadModel", "GPT2Config", 4, 512),
    "llama32_head": Tokens("LlamaForCausalLM", "LlamaConfig", 4, 2048, LLAMA),
}


def corpus(graph: Graph, name: str) -> dict[str, Any]:
    """The corpus' JSON of a graph: values that some op makes, first runs only."""
    made = [v for op in graph.ops for v in op.first.outputs if not graph.values[v].external]
    number = {v: i for i, v in enumerate(made)}
    maker = {v: i for i, op in enumerate(graph.ops) for v in op.first.outputs}
    values = [
        {
            "id": number[v],
            "op": maker[v],
            "bytes": graph.values[v].nbytes,
            "is_grad_output": graph.values[v].role is Role.GRAD,
            "is_fwd_output": graph.values[v].role is Role.OUTPUT,
        }
        for v in made
    ]
    ops = [
        {
            "id": i,
            "name": op.name,
            "op": op.target,
            "inputs": [number[v] for v in op.first.inputs if v in number],
            "outputs": [number[v] for v in op.first.outputs if v in number],
            "is_backward": op.backward,
            "time_us": op.first.time_s * 1e6,
        }
        for i, op in enumerate(graph.ops)
    ]
    loss = next(value["id"] for value in values if value["is_fwd_output"])
    return {"name": name, "loss_value": loss, "ops": ops, "values": values}


def main() -> int:
    """Capture and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="only these")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.model or MODELS:
        start = time.perf_counter()
        model, sample = MODELS[name].build()
        graph = step_graph(model.to(torch.bfloat16).train(), (), sample, platform=Roofline())
        (arguments.folder / f"{name}.json").write_text(json.dumps(corpus(graph, name)))
        print(f"{name}: {len(graph.ops)} ops, {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
