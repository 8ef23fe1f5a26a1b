"""What other ways to run ops bring: floors and overheads with and without them, from one run.

    python benchmarks/implementations.py [MODEL ...] [--seconds S] [--rounding] [--json FILE]

Training steps in bfloat16 (batch norms in float32) on the `Roofline()` platform, traced from shapes on the
CPU, so nothing is allocated and nothing runs. Percentages are of the step that was captured before there were
rewrites and ways: its save-all peak and its time, in `BEFORE`. `floor` is certified, `found` is the smallest
budget for which a plan was found, and the other columns are the times of plans at 100, 50, 40 and 30 % of
that peak, less that time. Each budget has one solve with every way off (`none`) and one with a choice
(`exact`), both with the same limit by the clock; both graphs have the rewrites. With `--rounding`, a third
also has the ways that differ within rounding. A row is wrong if a plan with a choice is slower than one
without.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_executor import estimated_graph
from remat_executor.ways.registry import EXACT, rounding_families
from remat_executor.ways.substitution import Family
from remat_graph import Graph, Roofline, noremat_peak_nbytes
from remat_solvers import Deadline, Problem, compile_loops, get_solver, min_budget, solve_switches
from tests.helpers.models import import_torchvision, import_transformers

SHARES = (1.0, 0.5, 0.4, 0.3)

BEFORE: Mapping[str, tuple[int, float]] = {
    "gpt2_nodrop": (9400360968, 0.035552024363973506),
    "gpt2": (20676222984, 0.06604417348482701),
    "llama128k_8": (19190546440, 0.12331360919853332),
    "llama32k_8": (9728196616, 0.0872620563690936),
    "t5": (10570235908, 0.036466539227306964),
    "vgg16": (2973648856, 0.019525946890879997),
    "mobilenet_v2": (2501796440, 0.0060924572874666745),
    "efficientnet_b0": (2821316760, 0.010587010141013336),
    "resnet50": (2798266072, 0.01042193951850668),
    "vit_b": (3829812184, 0.027016263195946726),
    "unet": (1375747852, 0.006038926541119992),
}
"""Save-all peak in bytes and seconds of the graph at commit 4128af0, which had neither rewrites nor ways."""

LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

Made = tuple[nn.Module, dict[str, Tensor]]


class LanguageLoss(nn.Module):
    """The loss of a language model, without its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """As the library computes it."""
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


class ImageLoss(nn.Module):
    """The cross entropy of a classifier of images or of their pixels, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        """The mean over images."""
        return F.cross_entropy(self.model(images).float(), target)


def language_model(kind: str, config: str, batch: int, tokens: int, **sizes: Any) -> Made:
    """A model of the transformers library on the meta device, and the layout of a batch."""
    transformers = import_transformers()
    settings = getattr(transformers, config)(use_cache=False, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, kind)(settings)
    if "Conditional" not in kind:
        model.loss_type = "ForCausalLM"
    ids = torch.randint(3, settings.vocab_size, (batch, tokens))
    return LanguageLoss(model), {"input_ids": ids, "labels": ids.clone()}


def classifier(name: str, batch: int) -> Made:
    """A model of torchvision on the meta device, and the layout of a batch."""
    models = import_torchvision().models
    with torch.device("meta"):
        model = getattr(models, name)()
    target = torch.zeros(batch, dtype=torch.long)
    return ImageLoss(model), {"images": torch.empty(batch, 3, 224, 224), "target": target}


class ConvPair(nn.Sequential):
    """Two convolutions, each with a batch norm and a relu."""

    def __init__(self, given: int, made: int) -> None:
        layers: list[nn.Module] = []
        for channels in (given, made):
            convolution = nn.Conv2d(channels, made, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(made), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """A U-Net of five levels that pools on the way down and interpolates on the way up."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        down = [3, width, 2 * width, 4 * width, 8 * width, 8 * width]
        up = [(16 * width, 4 * width), (8 * width, 2 * width), (4 * width, width), (2 * width, width)]
        self.down = nn.ModuleList(itertools.starmap(ConvPair, itertools.pairwise(down)))
        self.up = nn.ModuleList(itertools.starmap(ConvPair, up))
        self.shrink = nn.MaxPool2d(2)
        self.enlarge = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """A score for each pixel and class."""
        first, *others = self.down
        levels = [first(images)]
        for level in others:
            levels.append(level(self.shrink(levels[-1])))
        x = levels.pop()
        for level in self.up:
            x = level(torch.cat([self.enlarge(x), levels.pop()], dim=1))
        scores: Tensor = self.head(x)
        return scores


def unet() -> Made:
    """A U-Net on the meta device, and the layout of a batch of 8 x 256 x 256 pixels."""
    with torch.device("meta"):
        model = UNet()
    target = torch.zeros(8, 256, 256, dtype=torch.long)
    return ImageLoss(model), {"images": torch.empty(8, 3, 256, 256), "target": target}


MODELS: Mapping[str, Callable[[], Made]] = {
    "gpt2_nodrop": lambda: language_model("GPT2LMHeadModel", "GPT2Config", 8, 1024, **NO_DROPOUT),
    "gpt2": lambda: language_model("GPT2LMHeadModel", "GPT2Config", 8, 1024),
    "llama128k_8": lambda: language_model(
        "LlamaForCausalLM", "LlamaConfig", 4, 2048, vocab_size=128256, **LLAMA
    ),
    "llama32k_8": lambda: language_model(
        "LlamaForCausalLM", "LlamaConfig", 4, 2048, vocab_size=32000, **LLAMA
    ),
    "t5": lambda: language_model("T5ForConditionalGeneration", "T5Config", 16, 512, decoder_start_token_id=0),
    "vgg16": lambda: classifier("vgg16", 64),
    "mobilenet_v2": lambda: classifier("mobilenet_v2", 64),
    "efficientnet_b0": lambda: classifier("efficientnet_b0", 64),
    "resnet50": lambda: classifier("resnet50", 64),
    "vit_b": lambda: classifier("vit_b_16", 64),
    "unet": unet,
}


def traced(name: str, *, ways: str) -> Graph:
    """The graph of a model's step, with the ways of ``"none"``, ``"exact"`` or ``"rounding"``."""
    families = {"none": (), "exact": EXACT, "rounding": rounding_families()}
    return traced_step(*MODELS[name](), ways=families[ways])


def traced_step(model: nn.Module, inputs: Mapping[str, Tensor], *, ways: tuple[Family, ...]) -> Graph:
    """The graph of a training step in bfloat16, with batch norms in float32, on the `Roofline()` platform."""
    model = model.bfloat16().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.float()
    inputs = {key: t.bfloat16() if t.is_floating_point() else t for key, t in inputs.items()}
    return estimated_graph(model, (), inputs, Roofline(), ways=ways)


@attrs.frozen(kw_only=True)
class Row:
    """One model with or without a choice of ways; shares are of `BEFORE`.

    Attributes:
        model: its name.
        ways: ``"none"``, ``"exact"`` or ``"rounding"``.
        ops: of the graph.
        switches: of the graph.
        save_all: peak of the unplanned step.
        floor: below it no schedule exists.
        found: smallest budget with a plan.
        extra: per share of the original peak, time of the plan less the original time; None without a plan.
        on: per share, how many switches the plan has on.
        planned_s: seconds of the four solves.
    """

    model: str
    ways: str
    ops: int
    switches: int
    save_all: float
    floor: float
    found: float
    extra: dict[str, float | None]
    on: dict[str, int]
    planned_s: float


def row_of(name: str, ways: str, seconds: float) -> Row:
    """Trace, bound and solve."""
    graph = traced(name, ways=ways)
    peak_nbytes, time_s = BEFORE[name]
    smallest = min_budget(graph, Deadline(seconds))
    extra: dict[str, float | None] = {}
    on: dict[str, int] = {}
    began_s = time.perf_counter()
    for share in SHARES:
        problem = Problem(graph, int(share * peak_nbytes))
        found = solve_switches(get_solver("auto"), problem, Deadline(seconds))
        key = f"{share:.0%}"
        extra[key] = None if found.time_s is None else found.time_s / time_s - 1
        on[key] = len([name for name in str(found.stats.get("switched", "")).split(", ") if name])
    return Row(
        model=name,
        ways=ways,
        ops=len(graph.ops),
        switches=len(graph.switches),
        save_all=noremat_peak_nbytes(graph) / peak_nbytes,
        floor=smallest.floor_nbytes / peak_nbytes,
        found=smallest.nbytes / peak_nbytes,
        extra=extra,
        on=on,
        planned_s=time.perf_counter() - began_s,
    )


def shown(row: Row) -> str:
    """A line of the table."""
    times = " ".join(
        f"{'-' if extra is None else f'{extra:+.1%}':>7}{'*' if row.on[key] else ' '}"
        for key, extra in row.extra.items()
    )
    shares = " ".join(f"{share:7.1%}" for share in (row.save_all, row.floor, row.found))
    return f"{row.model:16} {row.ways:8} {row.ops:5} {row.switches:3} {shares} {times} {row.planned_s:6.0f} s"


def slower(none: Row, exact: Row) -> list[str]:
    """The budgets at which a choice of ways lost a plan, or made it slower by more than a thousandth."""
    wrong = []
    for key, extra in none.extra.items():
        chosen = exact.extra[key]
        if extra is not None and (chosen is None or chosen > extra + 1e-3):
            wrong.append(f"{none.model} at {key}: {extra:+.2%} without a choice of {exact.ways} ways")
    return wrong


def main() -> int:
    """Print the table; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help="all by default")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each solve")
    parser.add_argument("--rounding", action="store_true", help="also with ways that differ within rounding")
    parser.add_argument("--json", type=Path, help="write the rows here, after each model")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    compile_loops()  # once for an installation, which the limits do not count
    columns = " ".join(f"{f'{share:.0%}':>7} " for share in SHARES)
    print(f"{'model':16} {'ways':8}   ops  on save-all   floor   found {columns}  planned   (*: a switch on)")
    rows: list[Row] = []
    wrong: list[str] = []
    for name in options.models:
        tried = ("none", "exact", "rounding") if options.rounding else ("none", "exact")
        none, *others = [row_of(name, ways, options.seconds) for ways in tried]
        rows += [none, *others]
        for row in others:
            wrong += slower(none, row)
        print("\n".join(map(shown, (none, *others))), flush=True)
        if options.json:
            record.write(
                options.json,
                [attrs.asdict(row) for row in rows],
                packages=("torch", "transformers", "torchvision"),
                platform="roofline",
                seconds=options.seconds,
                before="4128af0",
            )
    print("\n".join(wrong) or "no plan with a choice is slower than one without")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
