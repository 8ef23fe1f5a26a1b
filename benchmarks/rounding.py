"""Errors of the ways that round, against float64, beside those of the captured calls.

    python benchmarks/rounding.py [CASE ...] [--draws N] [--json FILE]

Each case is a training step with all ways of one family on; activations are repeated once. The same step in
float64, with the same numbers as parameters and inputs, is the reference. An error is the norm of the
difference as a share of the norm, over several inputs. The tangent of the loss is 0.37, so that a product
with it rounds. `gradients` is the error of all gradients together, `worst` the largest ratio of the errors of
a single parameter's gradient.

A row is wrong if an error of a way is more than 1.5 times that of the captured calls; for the loss, also more
than a unit in its last place.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.peer_models import UNet
from remat_executor.ways.fused_gelu import fused_gelu
from remat_executor.ways.linear_head import linear_head
from remat_executor.ways.norm_activations import norm_activations
from remat_executor.ways.substitution import Family
from tests.helpers.models import import_torchvision, import_transformers
from tests.helpers.rounding_errors import MOST, UNIT, LanguageLoss, errors, repeated

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DTYPES = (torch.float32, torch.bfloat16)

any_linear_head = partial(linear_head, least_nbytes=0)

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Classes(nn.Module):
    """A network with the cross entropy of fixed classes, or a mean square if it makes images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """In float32, or float64."""
        made: Tensor = self.network(images)
        made = made if made.dtype is torch.float64 else made.float()
        return F.cross_entropy(made, torch.arange(len(made))) if made.ndim == 2 else made.square().mean()


class Head(nn.Module):
    """Two linear layers and a loss over many classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 5003)
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """In float32, or float64."""
        logits = self.second(torch.tanh(self.first(x)))
        logits = logits if logits.dtype is torch.float64 else logits.float()
        weight = self.options.get("weight")
        given = {**self.options, "weight": None if weight is None else weight.to(logits.dtype)}
        return F.cross_entropy(logits, target, **given)


def language(kind: str, vocabulary: int, **sizes: Any) -> Made:
    """A small language model, and 4 x 64 tokens."""
    transformers = import_transformers()
    config = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, use_cache=False, **sizes)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[kind])(config)
    model.loss_type = "ForCausalLM"
    return LanguageLoss(model), (torch.randint(vocabulary, (4, 64)),)


def gpt2() -> Made:
    """Two layers and a tied weight."""
    return language("GPT2", 3001, n_layer=2, n_embd=128, n_head=4, n_positions=64, **NO_DROPOUT)


def llama() -> Made:
    """Two layers and an own weight."""
    return language(
        "Llama", 3001, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )


def head(**options: Any) -> Made:
    """Rows in chunks of 128."""
    return Head(**options), (torch.randn(1024, 64), torch.randint(5003, (1024,)))


def vision(name: str, **options: Any) -> Made:
    """A model of torchvision, and eight small images."""
    network = getattr(import_torchvision().models, name)(num_classes=10, **options)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Classes(network), (torch.randn(8, 3, 64, 64),)


CASES: Mapping[str, tuple[Family, Callable[[], Made]]] = {
    "head": (any_linear_head, head),
    "head, sum": (any_linear_head, lambda: head(reduction="sum")),
    "head, weights": (any_linear_head, lambda: head(weight=torch.rand(5003))),
    "gpt2": (any_linear_head, gpt2),
    "llama": (any_linear_head, llama),
    "gpt2, gelu": (fused_gelu, gpt2),
    "resnet18": (norm_activations, lambda: vision("resnet18")),
    "mobilenet_v2": (norm_activations, lambda: vision("mobilenet_v2", dropout=0.0)),
    "mobilenet_v3_small": (norm_activations, lambda: vision("mobilenet_v3_small", dropout=0.0)),
    "efficientnet_b0": (
        norm_activations,
        lambda: vision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
    ),
    "unet": (norm_activations, lambda: (Classes(UNet(16)), (torch.randn(4, 3, 64, 64),))),
}


@attrs.frozen(kw_only=True)
class Row:
    """One step in one dtype; each pair is the error of the captured calls and that with the ways.

    Attributes:
        case: its name.
        family: the ways that are on.
        ways: how many.
        dtype: of parameters and activations; norms are in float32.
        loss: relative error.
        gradients: of all gradients together.
        worst: largest ratio of the errors of one parameter's gradient.
    """

    case: str
    family: str
    ways: int
    dtype: str
    loss: tuple[float, float]
    gradients: tuple[float, float]
    worst: float

    def wrong(self) -> Iterator[str]:
        """What is wrong with the row."""
        name = f"{self.case} in {self.dtype}"
        if self.loss[1] > max(MOST * self.loss[0], UNIT):
            yield f"{name}: the loss is off by {self.loss[1]:.1e}, captured by {self.loss[0]:.1e}"
        if self.worst > MOST:
            yield f"{name}: a gradient's error is {self.worst:.2f} times that of the captured calls"


def row_of(case: str, dtype: torch.dtype, draws: int) -> Row:
    """Run a step in its three forms."""
    torch.manual_seed(0)
    family, make = CASES[case]
    model, inputs = make()
    model.train().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    planner = repeated if family is norm_activations else None
    found = errors(model, inputs, [family], planner=planner, draws=draws)
    both = (found.eager, found.ours)
    together = [math.hypot(*each[1:]) / math.hypot(*found.norms[1:]) for each in both]
    loss = [each[0] / found.norms[0] for each in both]
    switches = found.module.graph.switches
    return Row(
        case=case,
        family=switches[0].partition(".")[0],
        ways=len(switches),
        dtype=str(dtype).removeprefix("torch."),
        loss=(loss[0], loss[1]),
        gradients=(together[0], together[1]),
        worst=max(ours / eager for eager, ours in zip(*(each[1:] for each in both), strict=True) if eager),
    )


def shown(row: Row) -> str:
    """A line of the table."""
    loss, gradients = (f"{one:9.2e} {other:9.2e}" for one, other in (row.loss, row.gradients))
    return f"{row.case:19} {row.family:17} {row.ways:4} {row.dtype:9} {loss}  {gradients}  {row.worst:6.2f}"


def main() -> int:
    """Print the table; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), help="all by default")
    parser.add_argument("--draws", type=int, default=16, help="inputs of each row")
    parser.add_argument("--json", type=Path, help="write the rows here, after each row")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(
        f"{'case':19} {'family':17} {'ways':>4} {'dtype':9} {'loss':>9} {'':9}  {'gradients':>9} {'':9}  "
        "worst   (errors as captured and with the ways)"
    )
    rows: list[Row] = []
    wrong: list[str] = []
    for case in options.cases:
        for dtype in DTYPES:
            row = row_of(case, dtype, options.draws)
            rows.append(row)
            wrong += row.wrong()
            print(shown(row), flush=True)
            if options.json:
                record.write(
                    options.json,
                    [attrs.asdict(row) for row in rows],
                    packages=("torch", "transformers", "torchvision"),
                    draws=options.draws,
                )
    print("\n".join(wrong) or "no error is larger than 1.5 times that of the captured calls")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
