"""How well data sheets predict training: against published figures, and against our own measured steps.

    python benchmarks/platforms.py [ROW ...] [--json FILE]

Models are built on the meta device from their definitions and traced for a GPU that need not be there;
nothing is downloaded and nothing runs. A prediction is the sum of the operators' times of one forward and
backward, nothing recomputed. The optimizer, the communication and the data, which published figures include,
are left out. `remat_graph.platforms.data_sheets` says which of its shares were chosen after a comparison with
these rows.

Published figures are ranges over reports, in units a second and GPU; the predictions of rows that are `held`
lie within 20 % of the range. Reports whose runs recomputed activations or were not compiled are at its lower
end. The other rows of llm-foundry's report, which are 18 to 29 % off, are printed and not held.

* Llama 3 8B, 8,192 tokens, bf16, H100: 5,762 eager and 6,667 compiled (torchtitan, 8 GPUs at 500 W, selective
  checkpoints), 7,890 (torchtitan's graph trainer), 8,678 (lightning-thunder, issue 2116).
* Llama 2 7B, 4,096 tokens, bf16, H100: 9,600, compiled (fms-fsdp, README).
* MPT of 760M, 1,024 tokens, bf16, H100: 78,581 (llm-foundry, scripts/train/benchmarking), 70,000 to 80,000
  over similar models. Not held: its other lengths, 1B, 3B and 7B there, on 8 GPUs in 2023.
* ResNet-50 under AMP, channels last, batch 512, A100: 2,500 to 2,600 images (timm, issue 1491).

Our own rows are the eager steps in `results/nvidia-h100-80gb-hbm3.json`, of the models of `gpu.py`; `ratio`
is predicted over measured. Each row that is more than 20 % off says so; the exit status is not zero if one
of them is held.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu, record
from remat_executor import estimated_graph
from remat_graph import Platform
from remat_graph.platforms.data_sheets import a100, h100
from tests.helpers.models import import_torchvision, import_transformers

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "nvidia-h100-80gb-hbm3.json"
WITHIN = 0.2
# As torch prefers them on Hopper with a recent cuDNN, and elsewhere.
HOPPER = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
OTHERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
ALWAYS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Block(nn.Module):
    """A layer of a GPT: attention and two products around an exact GELU, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape, [batch, tokens, width]."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


class GPT(nn.Module):
    """A language model with learned positions and a tied head; returns its loss."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int = 50368) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The mean cross entropy, in float32."""
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = F.linear(self.norm(self.blocks(hidden)), self.words.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), x.flatten())


class Classifier(nn.Module):
    """An image model under AMP in float16; returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The cross entropy with class 0."""
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.network(x)
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


def gpt(layers: int, width: int, heads: int, batch: int, tokens: int) -> tuple[nn.Module, Tensor]:
    """An MPT's shape, in bf16, and a batch."""
    return GPT(layers, width, heads, tokens).bfloat16(), torch.zeros(batch, tokens, dtype=torch.long)


def llama(batch: int, tokens: int, **sizes: int) -> tuple[nn.Module, Tensor]:
    """Hugging Face's Llama in bf16, and a batch."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(use_cache=False, max_position_embeddings=tokens, **sizes)
    network = transformers.LlamaForCausalLM(config).bfloat16()
    network.loss_type = "ForCausalLM"
    return gpu.WithLoss(network), torch.zeros(batch, tokens, dtype=torch.long)


def resnet50(batch: int) -> tuple[nn.Module, Tensor]:
    """ResNet-50 with channels last, and a batch."""
    network = import_torchvision().models.resnet50().to(memory_format=torch.channels_last)
    images = torch.empty(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    return Classifier(network), images


@attrs.frozen(kw_only=True)
class Published:
    """A figure that others reported.

    Attributes:
        make: builds the model and its batch.
        units: tokens or images of the batch.
        low, high: units a second and GPU, over the reports.
        platform: of the GPU.
        hopper: whether cuDNN's attention is preferred, as by recent versions of torch on Hopper.
        held: whether the prediction must be within 20 % of the range.
        source: where it was reported.
    """

    make: Callable[[], tuple[nn.Module, Tensor]]
    units: int
    low: float
    high: float
    platform: Callable[..., Platform] = h100
    hopper: bool = True
    held: bool = True
    source: str


_LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_LLAMA_2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


def _mpt(
    shape: tuple[int, int, int], batch: int, tokens: int, figures: tuple[float, float], *, held: bool = False
) -> Published:
    return Published(
        make=partial(gpt, *shape, batch, tokens),
        units=batch * tokens,
        low=figures[0],
        high=figures[1],
        hopper=False,
        held=held,
        source="llm-foundry, scripts/train/benchmarking",
    )


PUBLISHED: Mapping[str, Published] = {
    "llama-3-8b 8192": Published(
        make=partial(llama, 1, 8192, **_LLAMA_3_8B),
        units=8192,
        low=5762,
        high=8678,
        source="torchtitan; lightning-thunder, issue 2116",
    ),
    "llama-2-7b 4096": Published(
        make=partial(llama, 2, 4096, **_LLAMA_2_7B),
        units=8192,
        low=9600,
        high=9600,
        source="fms-fsdp, README",
    ),
    "mpt-760m 1024": _mpt((24, 1536, 12), 32, 1024, (70_000, 80_000), held=True),
    "mpt-760m 2048": _mpt((24, 1536, 12), 16, 2048, (63_147, 68_551)),
    "mpt-1b 2048": _mpt((24, 2048, 16), 16, 2048, (45_455, 45_455)),
    "mpt-3b 8192": _mpt((32, 2560, 20), 2, 8192, (16_578, 16_578)),
    "mpt-7b 2048": _mpt((32, 4096, 32), 8, 2048, (10_643, 10_643)),
    "resnet50 amp": Published(
        make=partial(resnet50, 512),
        units=512,
        low=2500,
        high=2600,
        platform=a100,
        hopper=False,
        source="timm, issue 1491",
    ),
}


def predicted_s(module: nn.Module, sample: Tensor, platform: Platform, *, hopper: bool) -> float:
    """Seconds of a step's forward and backward, nothing recomputed."""
    order = [*(HOPPER if hopper else OTHERS), *ALWAYS]
    with sdpa_kernel(order, set_priority=True):
        graph = estimated_graph(module.train(), (sample,), {}, platform, device="cuda")
    return sum(op.first.time_s for op in graph.ops)


@attrs.frozen(kw_only=True)
class Row:
    """A figure and its prediction: of units a second if it was published, of seconds if it was measured."""

    name: str
    platform: str
    unit: str
    low: float
    high: float
    predicted: float
    held: bool
    source: str

    @property
    def off(self) -> float:
        """How far the prediction is outside of the range, as a share of its nearer end; 0 within."""
        nearest = min(max(self.predicted, self.low), self.high)
        return self.predicted / nearest - 1

    @property
    def missed(self) -> bool:
        """Whether the prediction is more than 20 % outside of the range, held or not."""
        return abs(self.off) > WITHIN

    def line(self) -> str:
        """The row for people."""
        figure = f"{self.low:,.6g}" if self.low == self.high else f"{self.low:,.6g} to {self.high:,.6g}"
        ratio = (
            f"ratio {self.predicted / self.low:.3f}" if self.unit == "s" else f"off {100 * self.off:+.1f} %"
        )
        missed = "  MISSED" if self.missed else ""
        return f"{self.name:16} {figure:>18} {self.unit:9} predicted {self.predicted:,.6g}  {ratio}{missed}"


def published(name: str) -> Row:
    """Predict a published figure."""
    wanted = PUBLISHED[name]
    platform = wanted.platform()
    with torch.device("meta"):
        module, sample = wanted.make()
    time_s = predicted_s(module, sample, platform, hopper=wanted.hopper)
    return Row(
        name=name,
        platform=platform.name,
        unit="a second",
        low=wanted.low,
        high=wanted.high,
        predicted=wanted.units / time_s,
        held=wanted.held,
        source=wanted.source,
    )


def measured(name: str, eager_s: float) -> Row:
    """Predict a step that was measured here."""
    platform, model = h100(), gpu.models(small=False)[name]
    with torch.device("meta"):
        module = gpu.WithLoss(model.make())
    time_s = predicted_s(module, model.sample().to("meta"), platform, hopper=True)
    return Row(
        name=name,
        platform=platform.name,
        unit="s",
        low=eager_s,
        high=eager_s,
        predicted=time_s,
        held=False,
        source=MEASURED.name,
    )


def measured_steps() -> dict[str, float]:
    """Seconds of the eager steps that were measured, by model: the median where a model has several rows."""
    rows: dict[str, list[float]] = {}
    for row in json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]:
        if row["eager_s"]:
            rows.setdefault(row["model"], []).append(row["eager_s"])
    return {name: sorted(each)[len(each) // 2] for name, each in rows.items()}


def main() -> int:
    """Predict, print each row, and write them."""
    parser = argparse.ArgumentParser(description="predictions from data sheets against figures")
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    steps = measured_steps()
    chosen = arguments.rows or [*PUBLISHED, *steps]
    unknown = [name for name in chosen if name not in PUBLISHED and name not in steps]
    if unknown:
        parser.error(f"no row {unknown[0]!r}: there are {', '.join([*PUBLISHED, *steps])}")
    rows = []
    for name in chosen:
        rows.append(published(name) if name in PUBLISHED else measured(name, steps[name]))
        print(rows[-1].line(), flush=True)
    if arguments.json is not None:
        record.write(
            arguments.json, list(map(attrs.asdict, rows)), packages=["torch", "torchvision", "transformers"]
        )
    return 1 if any(row.held and row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
