"""Make the plans that come with the package, by data sheets of devices; nothing of the models' size runs.

    python benchmarks/make_zoo.py [--model resnet50]... [--time-limit SECONDS]

Writes the plans and the manifest that `remat zoo` shows. With --model only those of the named models are
made, and the others stay. About a minute of one core a model.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from remat_executor import estimated_graph
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.shipped_plans import MANIFEST, SHIPPED, ShippedPlan, shipped_plans
from remat_graph import Graph, get_platform, save_plan, structure
from remat_solvers.facts import plain
from tests.helpers.models import import_torchvision, import_transformers

BUDGETS = ("60%", "40%")


class WithLoss(nn.Module):
    """A classifier called as `limit_memory(model, budget, loss=F.cross_entropy)` has it called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, *, target: Tensor) -> Tensor:
        """The loss of images [N, 3, S, S] with a class each [N]."""
        return F.cross_entropy(self.model(images), target)


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, and what it is called with."""


@attrs.frozen(kw_only=True)
class Known:
    """A model, and the call and the device that its plans are for."""

    model: str
    platform: str
    inputs: str
    make: Callable[[], Call]
    loss: str = ""


def _classifier(name: str, platform: str) -> Known:
    """A classifier of torchvision with a batch of 64 images."""

    def make() -> Call:
        model = getattr(import_torchvision().models, name)(weights=None)
        named: type[WithLoss] = type(type(model).__name__, (WithLoss,), {})  # plans and tables show it
        return named(model), (torch.randn(64, 3, 224, 224),), {"target": torch.zeros(64).long()}

    return Known(
        model=f"torchvision.models.{name}",
        platform=platform,
        inputs="images 64x3x224x224, target 64",
        make=make,
        loss="torch.nn.functional.cross_entropy",
    )


def _gpt2() -> Call:
    transformers = import_transformers()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    return model, (), {"input_ids": tokens, "labels": tokens}


MODELS = {
    "resnet50": _classifier("resnet50", "v100-spec"),
    "vit_b_16": _classifier("vit_b_16", "a100-spec"),
    "gpt2": Known(
        model="transformers.GPT2LMHeadModel",
        platform="a100-spec",
        inputs="input_ids 8x1024, labels 8x1024",
        make=_gpt2,
    ),
}


def graph_of(known: Known) -> Graph:
    """The step of a model, from shapes alone."""
    with torch.device("meta"):
        model, args, kwargs = known.make()
    return estimated_graph(model.train(), args, kwargs, get_platform(known.platform), device="cuda")


def made(name: str, known: Known, time_limit_s: float) -> list[ShippedPlan]:
    """Make and write the plans of a model."""
    platform = get_platform(known.platform)
    graph = graph_of(known)
    found = []
    for budget in BUDGETS:
        planner = RecomputePlanner(
            budget=budget, method=Method(time_limit_s=time_limit_s), platform=platform.name, on_progress=print
        )
        plan = planner(graph)
        full = f"{name}-{known.platform.removesuffix('-spec')}-{budget.rstrip('%')}"
        save_plan(plan, SHIPPED / f"{full}.json")
        found.append(
            ShippedPlan(
                name=full,
                model=known.model,
                inputs=known.inputs,
                dtype="float32",
                loss=known.loss,
                budget=budget,
                budget_nbytes=plan.budget_nbytes,
                peak_nbytes=plan.peak_nbytes,
                unplanned_nbytes=plan.noremat_peak_nbytes,
                overhead=plan.overhead,
                lower_bound_overhead=plan.lower_bound_overhead,
                platform=platform.name,
                structure=structure(graph),
                versions=dict(plan.versions),
            )
        )
    return found


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default: all")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds of a search")
    arguments = parser.parse_args()
    SHIPPED.mkdir(exist_ok=True)
    entries = {each.name: each for each in shipped_plans()}
    for name in arguments.model or MODELS:
        for each in made(name, MODELS[name], arguments.time_limit):
            entries[each.name] = each
            text = json.dumps([plain(entry) for _, entry in sorted(entries.items())], indent=1)
            (SHIPPED / MANIFEST).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
