"""Runtime: what a step of a planned module costs beside eager's, with nothing recomputed.

    python benchmarks/runtime.py [--models NAME ...] [--repeats N] [--json FILE]

One run, side by side: eager, a second copy of eager as the control, and the module planned at its full budget
take turns, and what is printed are medians of ratios to the mean of the eager steps beside it, so that other
load on the machine cancels. A step is `zero_grad`, forward, loss and backward, on one thread, with Python's
collector off. Planning is excluded and printed apart.

Launch-bound models are so small that a step is spent in Python and in dispatch; there the ratio may be 1.05
at the most. Compute-bound ones spend it in kernels; there it may be 1 plus the spread of the control, which
is the larger distance of its quartiles from 1. The exit status is not zero where a ratio is above.

"adding" is the same ratio for steps that add to the gradients of the step before. It is printed and not
judged: where gradients are megabytes it is the C library that decides how many pages it gives back to the
system between one gradient and the next, and figures jump by a fifth with the size of a part (ResNet-50:
12,576 or 22,272 page faults a step; none, and a ratio as in the other column, when it is told to keep them).

"us an op" is the time of a planned step divided by the ops of its graph; "first us" is the time from the
call to the first operator, which an idle device waits for, and "eager us" the same of eager, both under the
profiler; "look us" is what a call spends on looking whether the module is what it was; "ready s" is the time
from the model to the planned module, with costs measured before where the user's cache has them, and "plan s"
the solver's share of it.
"""

import argparse
import copy
import functools
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.device_steps import Side, traced
from remat_executor.guards.snapshot import Snapshot
from remat_facade import Hiremate
from remat_facade.planning.known_plans import PLANNING_S
from tests.helpers.models import import_torchvision, import_transformers

LAUNCH_BOUND_RATIO = 1.05

Made = tuple[nn.Module, dict[str, Any]]


def _language(name: str, length: int, **config: Any) -> Made:
    transformers = import_transformers()
    settings = getattr(transformers, f"{name}Config")(
        vocab_size=64, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0, **config
    )
    model = getattr(transformers, _HEADS[name])(settings)
    tokens = torch.randint(1, 64, (1, length))
    return model, {"input_ids": tokens, "labels": tokens}


_HEADS = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "T5": "T5ForConditionalGeneration"}


def _gpt2(layers: int, width: int, length: int) -> Callable[[], Made]:
    return lambda: _language("GPT2", length, n_layer=layers, n_embd=width, n_head=2, n_positions=512)


def _llama(layers: int, width: int, length: int) -> Callable[[], Made]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return lambda: _language("Llama", length, num_hidden_layers=layers, **sizes, **heads)


def _t5(layers: int, width: int, length: int) -> Callable[[], Made]:
    sizes = {"d_model": width, "d_ff": 2 * width, "d_kv": width // 2, "num_heads": 2}
    return lambda: _language("T5", length, num_layers=layers, decoder_start_token_id=0, **sizes)


class _Scored(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def _vision(name: str, size: int) -> Callable[[], Made]:
    def build() -> Made:
        model = getattr(import_torchvision().models, name)(num_classes=10)
        return _Scored(model), {"x": torch.randn(2, 3, size, size)}

    return build


def _densenet() -> Made:
    build = import_torchvision().models.DenseNet
    model = build(growth_rate=4, block_config=(6, 12, 24, 16), num_init_features=8, num_classes=10)
    return _Scored(model), {"x": torch.randn(2, 3, 32, 32)}


def _perceptron() -> Made:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(200)]
    return _Scored(nn.Sequential(*layers)), {"x": torch.randn(2, 16)}


FIRST = 15  # calls of which the time to the first operator is read
FEWER = 12  # times fewer steps of compute-bound models, which are long
LAUNCH_BOUND: dict[str, Callable[[], Made]] = {
    "gpt2 12 layers": _gpt2(12, 32, 8),
    "gpt2 24 layers": _gpt2(24, 32, 8),
    "llama 12 layers": _llama(12, 32, 8),
    "t5 8 + 8 layers": _t5(8, 32, 8),
    "mobilenet_v3 32x32": _vision("mobilenet_v3_small", 32),
    "slim densenet": _densenet,
    "mlp 200 layers": _perceptron,
}
COMPUTE_BOUND: dict[str, Callable[[], Made]] = {
    "gpt2 width 512": _gpt2(4, 512, 256),
    "llama width 512": _llama(4, 512, 256),
    "resnet50 160x160": _vision("resnet50", 160),
}


@attrs.frozen(kw_only=True)
class Row:
    """One model.

    Attributes:
        model: its name.
        kind: "launch" or "compute".
        ops: of its graph.
        parts: of its backward.
        eager_s: median step of eager.
        ratio: median of planned over eager.
        adding: the same where gradients are there already.
        control: median of the second eager over the first, with its quartiles
        control_low, control_high.
        limit: what the ratio may be at most.
        per_op_s: planned step over ops.
        first_s: from the call to the first operator.
        eager_first_s: the same of eager.
        look_s: what a call spends on looking whether the module is what it was.
        ready_s: from the model to the planned module, planning included.
        planning_s: of that the solver's.
    """

    model: str
    kind: str
    ops: int
    parts: int
    eager_s: float
    ratio: float
    adding: float
    control: float
    control_low: float
    control_high: float
    limit: float
    per_op_s: float
    first_s: float
    eager_first_s: float
    look_s: float
    ready_s: float
    planning_s: float


def measure(name: str, kind: str, build: Callable[[], Made], repeats: int) -> Row:
    """Plan one model at its full budget, and time it beside two copies of itself."""
    torch.manual_seed(0)
    model, sample = build()
    model.train()
    eager, control = copy.deepcopy(model), copy.deepcopy(model)
    start = time.perf_counter()
    planned = Hiremate(model, (), "100%", sample_kwargs=sample)
    ready_s = time.perf_counter() - start
    sides = (eager, planned, control)
    fresh = [
        _ratios(*sides, sample, repeats, adding=False),
        _ratios(*sides, sample, repeats // 3, adding=True),
    ]
    snapshot = Snapshot.take(model)
    (eager_s, planned_s, ratios, controls), (_, _, adding, _) = fresh
    first_s, eager_first_s = _first_s(planned, eager, sample)
    low, middle, high = statistics.quantiles(controls, n=4)
    spread = max(1 - low, high - 1, 0.0)
    return Row(
        model=name,
        kind=kind,
        ops=len(planned.graph.ops),
        parts=planned.parts,
        eager_s=statistics.median(eager_s),
        ratio=statistics.median(ratios),
        adding=statistics.median(adding),
        control=middle,
        control_low=low,
        control_high=high,
        limit=LAUNCH_BOUND_RATIO if kind == "launch" else 1 + spread,
        per_op_s=statistics.median(planned_s) / len(planned.graph.ops),
        first_s=first_s,
        eager_first_s=eager_first_s,
        look_s=statistics.median(_look_s(snapshot) for _ in range(repeats)),
        ready_s=ready_s,
        planning_s=float(planned.plan.solver_stats[PLANNING_S]),
    )


def _ratios(
    eager: nn.Module,
    planned: nn.Module,
    control: nn.Module,
    sample: dict[str, Any],
    repeats: int,
    *,
    adding: bool,
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps in turns: seconds of eager and planned; ratios of planned to its neighbours, of the control."""
    eager_s: list[float] = []
    planned_s: list[float] = []
    control_s: list[float] = []
    for i in range(-3, repeats):
        first, last = (eager_s, eager), (control_s, control)
        if i % 2:
            first, last = last, first
        for times, module in (first, (planned_s, planned), last):
            taken_s = _step_s(module, sample, adding=adding)
            if i >= 0:
                times.append(taken_s)
    ratios = [2 * p / (e + c) for e, p, c in zip(eager_s, planned_s, control_s, strict=True)]
    return eager_s, planned_s, ratios, [c / e for e, c in zip(eager_s, control_s, strict=True)]


def _step_s(module: nn.Module, sample: dict[str, Any], *, adding: bool) -> float:
    start = time.perf_counter()
    if not adding:
        module.zero_grad()
    output = module(**sample)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return time.perf_counter() - start


def _look_s(snapshot: Snapshot) -> float:
    start = time.perf_counter()
    assert snapshot.is_current()
    return time.perf_counter() - start


def _first_s(planned: nn.Module, eager: nn.Module, sample: dict[str, Any]) -> tuple[float, ...]:
    """Medians of the time from a call to its first operator, which take turns."""

    def loss(module: nn.Module, inputs: Any) -> Tensor:
        output = module(**inputs)
        found: Tensor = output if isinstance(output, Tensor) else output.loss
        return found

    sides = [Side(functools.partial(loss, module), module, sample) for module in (planned, eager)]
    taken: list[list[float]] = [[], []]
    for _ in range(FIRST):
        for times, side in zip(taken, sides, strict=True):
            times.append(traced(side, torch.device("cpu")).before_first_s)
    return tuple(map(statistics.median, taken))


def main() -> int:
    """Measure, print, write, judge."""
    parser = argparse.ArgumentParser(description="the time of a planned step beside eager's")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only those whose names begin so")
    parser.add_argument(
        "--repeats", type=int, default=240, help=f"steps of each side; compute-bound models take a {FEWER}th"
    )
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = "{:<19}{:>8}{:>6}{:>6}{:>10}{:>8}{:>8}{:>8}{:>9}{:>14}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}"
    print(f"torch {torch.__version__}, {platform.machine()}, one thread")
    heads = (
        "model",
        "bound",
        "ops",
        "parts",
        "eager ms",
        "ratio",
        "limit",
        "adding",
        "control",
        "its quartiles",
    )
    print(columns.format(*heads, "us an op", "first us", "eager us", "look us", "ready s", "plan s"))
    rows = []
    for kind, models in (("launch", LAUNCH_BOUND), ("compute", COMPUTE_BOUND)):
        for name, build in models.items():
            if arguments.models and not name.startswith(tuple(arguments.models)):
                continue
            gc.collect()
            gc.disable()
            row = measure(name, kind, build, arguments.repeats // (1 if kind == "launch" else FEWER))
            gc.enable()
            rows.append(row)
            quartiles = f"{row.control_low:.3f}-{row.control_high:.3f}"
            ratios = (f"{r:.3f}" for r in (row.ratio, row.limit, row.adding, row.control))
            figures = (f"{1e3 * row.eager_s:.2f}", *ratios)
            calls = (row.first_s, row.eager_first_s, row.look_s)
            times = (f"{1e6 * row.per_op_s:.1f}", *(f"{1e6 * seconds:.0f}" for seconds in calls))
            planning = (f"{row.ready_s:.1f}", f"{row.planning_s:.1f}")
            print(columns.format(name, kind, row.ops, row.parts, *figures, quartiles, *times, *planning))
            sys.stdout.flush()
    broken = [row for row in rows if row.ratio > row.limit]
    for row in broken:
        print(f"broken: {row.model} takes {row.ratio:.3f} times eager's step, and {row.limit:.3f} is allowed")
    if arguments.json:
        record.write(arguments.json, list(map(attrs.asdict, rows)), packages=["torch"])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
