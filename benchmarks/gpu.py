"""What remat does on an accelerator, in one command of minutes that can be taken up again row by row.

    python benchmarks/gpu.py [--seconds 560] [--out FOLDER] [--models NAME ...] [--small] [--again]

It writes `<out>/<device>.json` after every row, and what each operator was measured to take into
`platforms/<device>.json`, for plans that are made elsewhere, and draws the table in docs/benchmarks.md. It
skips the rows that are there and ends in time: run it again for the rest, and for rows that failed. Models
are built from their definitions, nothing is downloaded, and where cvxpy or highspy are absent the portfolio
goes on without them.
Rows, the most telling first:

* the five models of MONeT's README at its batch sizes, at a third of the memory (UNet at 416 x 608);
* GPT-2 medium and large and a Llama of a billion parameters, at 70, 50 and 30 %;
* of each, eager, a checkpoint around each block, torch's `activation_memory_budget`, and ours with nothing
  recomputed.

A row is judged by the allocator: the peak is `max_memory_allocated` above `memory_allocated` when the step
began, with `.grad` None; a method's steps alternate with eager's, and times are medians. "of memory" is of
what eager's step takes beyond its gradients, as percentages of a budget are.

Goals: the budget is met in every row; the peak is predicted within 1 %, the time within 5 %; with nothing
recomputed a step takes at most 1.5 % more than eager's; at a third of the memory the overhead is below what
MONeT published. Each is printed beside what was measured.

A row without figures says why. That a budget has no plan, or that the device is too small, is a result. The
exit status is 1 if a budget is broken, or if a row failed in any other way.

`--small` runs the same rows on models that fit a laptop, on the CPU too, to test the script; it has no limit
of time.
"""

import argparse
import copy
import functools
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record, report
from benchmarks.device_steps import (
    Side,
    current_device,
    device_name,
    first_line,
    interleaved_s,
    keep,
    peak_nbytes,
    release,
    reserved_nbytes,
    too_small,
    without_inductor,
)
from remat_facade import Hiremate
from remat_graph import resolve_budget
from remat_graph.platforms.measured import Measurement
from tests.helpers.models import import_torchvision, import_transformers

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30
THIRD = 1 / 3
TORCH_BUDGETS = (0.5, 0.1)
STEPS = 7


class DoubleConv(nn.Sequential):
    """Two convolutions with batch norm."""

    def __init__(self, inside: int, outside: int) -> None:
        layers: list[nn.Module] = []
        for width in (inside, outside):
            layers += [
                nn.Conv2d(width, outside, 3, padding=1),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """The usual U-Net: five levels, bilinear upsampling, skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        down = [width, 2 * width, 4 * width, 8 * width, 8 * width]
        up = [8 * width, 4 * width, 2 * width, width, width]
        self.first = DoubleConv(3, width)
        self.down = nn.ModuleList(map(DoubleConv, down, down[1:]))
        skips = down[-2::-1]
        self.up = nn.ModuleList(
            DoubleConv(x + skip, y) for x, skip, y in zip(up, skips, up[1:], strict=False)
        )
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Two channels of the input's height and width."""
        kept = [self.first(x)]
        for level in self.down:
            kept.append(level(nn.functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for level in self.up:
            skip = kept.pop()
            x = nn.functional.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=True)
            x = level(torch.cat((skip, x), 1))
        found: Tensor = self.last(x)
        return found


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the first output, or a language model's own loss on its input."""
        if not x.is_floating_point():
            loss: Tensor = self.network(input_ids=x, labels=x).loss
            return loss
        found = self.network(x)
        output: Tensor = found if isinstance(found, Tensor) else found[0]
        return output.float().square().mean()


@attrs.frozen(kw_only=True)
class Model:
    """A model of the table.

    Attributes:
        make: builds it, on the CPU.
        sample: a batch of it.
        blocks: what a checkpoint goes around.
        fractions: of eager's memory, at which ours is planned.
        published_pct: MONeT's overhead at a third of the memory.
    """

    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    blocks: Callable[[Any], list[nn.Module]]
    fractions: tuple[float, ...]
    published_pct: float | None = None


def _vision(name: str, **options: Any) -> nn.Module:
    model: nn.Module = getattr(import_torchvision().models, name)(**options)
    return model


def _images(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1))


def _tokens(*size: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1))


def _language(kind: str, head: str, **config: Any) -> nn.Module:
    transformers = import_transformers()
    ids = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    network: nn.Module = getattr(transformers, head)(getattr(transformers, kind)(**config, **ids))
    network.loss_type = "ForCausalLM"
    return network.bfloat16()


def _gpt2(layers: int, width: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length}
    return _language("GPT2Config", "GPT2LMHeadModel", vocab_size=vocabulary, **sizes)


def _llama(layers: int, width: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    attention = {"num_attention_heads": heads, "max_position_embeddings": length}
    return _language("LlamaConfig", "LlamaForCausalLM", vocab_size=vocabulary, **sizes, **attention)


def _bottlenecks(network: Any) -> list[nn.Module]:
    """The blocks of a ResNet."""
    return [*network.layer1, *network.layer2, *network.layer3, *network.layer4]


def _inceptions(network: Any) -> list[nn.Module]:
    """The blocks of a GoogLeNet."""
    return [m for m in network.children() if type(m).__name__ == "Inception"]


def _up_to_poolings(network: Any) -> list[nn.Module]:
    """The blocks of a VGG, whose layers it holds one by one; those that end with a pooling become one.

    A ReLU writes over its input, so it cannot be checkpointed without the layer before.
    """
    blocks: list[list[nn.Module]] = [[]]
    for layer in network.features:
        blocks[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            blocks.append([])
    network.features = nn.Sequential(*(nn.Sequential(*layers) for layers in blocks if layers))
    return list(network.features)


def _layers(network: Any) -> list[nn.Module]:
    """The layers of a language model."""
    return list(network.transformer.h if hasattr(network, "transformer") else network.model.layers)


def models(*, small: bool) -> dict[str, Model]:
    """The models of the table, or small ones of their kinds."""
    table = {}
    for name, batch, published_pct, blocks, options in (
        ("resnet50", 184, 11.95, _bottlenecks, {}),
        ("vgg16", 176, 9.11, _up_to_poolings, {}),
        ("mobilenet_v2", 272, 8.72, lambda network: list(network.features), {}),
        ("googlenet", 320, 15.77, _inceptions, {"aux_logits": False, "init_weights": False}),
    ):
        size = (4, 3, 64, 64) if small else (batch, 3, 224, 224)
        table[name] = Model(
            make=functools.partial(_vision, name, **options),
            sample=functools.partial(_images, *size),
            blocks=blocks,
            fractions=(THIRD,),
            published_pct=published_pct,
        )
    table["unet"] = Model(
        make=functools.partial(UNet, 4 if small else 64),
        sample=functools.partial(_images, *((2, 3, 64, 96) if small else (11, 3, 416, 608))),
        blocks=lambda network: [network.first, *network.down, *network.up],
        fractions=(THIRD, 0.4),
        published_pct=11.51,
    )
    length, vocabulary = (16, 64) if small else (1024, 50304)
    for name, make, batch, layers, width, heads in (
        ("gpt2-medium", _gpt2, 8, 24, 1024, 16),
        ("gpt2-large", _gpt2, 8, 36, 1280, 20),
        ("llama-1b", _llama, 4, 16, 2048, 32),
    ):
        shape = (2, 32, 2) if small else (layers, width, heads)
        table[name] = Model(
            make=functools.partial(make, *shape, vocabulary, length),
            sample=functools.partial(_tokens, 2 if small else batch, length, vocabulary=vocabulary),
            blocks=_layers,
            fractions=(0.5, 0.3, 0.7),
        )
    return table


@attrs.frozen(kw_only=True)
class Row:
    """One method on one model; bytes by the allocator, times are medians.

    Attributes:
        model, method: which.
        fraction: of eager's memory that the budget is; None without a budget.
        budget_nbytes: what the step may take.
        predicted_nbytes: what the plan says that it takes.
        peak_nbytes: what it took.
        requested_nbytes: what its tensors asked the allocator for, at most at once; None on the CPU.
        eager_nbytes: what eager's took.
        gradient_nbytes: of both, the gradients.
        reserved_nbytes: what the allocator had taken from the device.
        step_s: of a step.
        eager_s: of an eager step beside it.
        predicted_s: of a step, by the plan.
        predicted_eager_s: of an eager step, by the plan.
        predicted_ratio: step over eager's step by the plan.
        bound_pct: overhead below which there is no plan.
        ready_s: until the module was there.
        published_pct: MONeT's overhead, on the rows that compare with it.
        note: why there are no figures.
        failed: whether that is a failure, and no result.
    """

    model: str
    method: str
    fraction: float | None = None
    budget_nbytes: int | None = None
    predicted_nbytes: int | None = None
    peak_nbytes: int | None = None
    requested_nbytes: int | None = None
    eager_nbytes: int | None = None
    gradient_nbytes: int | None = None
    reserved_nbytes: int | None = None
    step_s: float | None = None
    eager_s: float | None = None
    predicted_s: float | None = None
    predicted_eager_s: float | None = None
    predicted_ratio: float | None = None
    bound_pct: float | None = None
    ready_s: float | None = None
    published_pct: float | None = None
    note: str = ""
    failed: bool = False

    @property
    def key(self) -> tuple[str, str, float | None]:
        """Which row it is."""
        return self.model, self.method, self.fraction

    @property
    def broken(self) -> bool:
        """Whether it took more than its budget."""
        return bool(self.peak_nbytes and self.budget_nbytes and self.peak_nbytes > self.budget_nbytes)

    @property
    def overhead(self) -> float | None:
        """Extra time over eager's, as a ratio."""
        return None if self.step_s is None or not self.eager_s else self.step_s / self.eager_s - 1


def methods(model: Model) -> Iterator[tuple[str, float | None]]:
    """Names of the rows of a model, and the fractions of those with a budget; the most telling first."""
    yield from (("remat", fraction) for fraction in model.fractions)
    yield "remat", 1.0
    yield "checkpoint", None
    yield from ((f"torch {share}", None) for share in TORCH_BUDGETS)
    yield "remat inductor", 0.4


Measurements = list[Measurement]


def measure(
    name: str, model: Model, method: str, fraction: float | None, device: torch.device
) -> tuple[Row, Measurements]:
    """Run one row; what its operators took, if they were measured."""
    row = Row(model=name, method=method, fraction=fraction)
    reason = without_inductor(device) if method.endswith("inductor") else ""
    if reason:
        return attrs.evolve(row, note=f"skipped: {reason}"), []
    torch.manual_seed(0)
    network = WithLoss(model.make()).to(device).train()
    eager = copy.deepcopy(network)
    sample = model.sample().to(device)
    start = time.perf_counter()
    try:
        call, planned = _prepare(network, model, method, fraction, sample)
        ready_s = time.perf_counter() - start
        side, eager_side = Side(call, network, sample), Side(eager, eager, sample)
        row_nbytes, requested_nbytes = peak_nbytes(side, device)
        eager_nbytes, _ = peak_nbytes(eager_side, device)
        step_s, eager_s = interleaved_s((side, eager_side), device, STEPS)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are run
        return attrs.evolve(row, note=first_line(error), failed=not too_small(error)), []
    plan = planned.plan if planned is not None else None
    row = attrs.evolve(
        row,
        budget_nbytes=_budget_nbytes(planned, fraction),
        predicted_nbytes=plan.peak_nbytes if plan is not None else None,
        peak_nbytes=row_nbytes,
        requested_nbytes=requested_nbytes,
        eager_nbytes=eager_nbytes,
        gradient_nbytes=sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad),
        reserved_nbytes=reserved_nbytes(device),
        step_s=step_s,
        eager_s=eager_s,
        predicted_s=plan.time_s if plan is not None else None,
        predicted_eager_s=plan.noremat_step_s if plan is not None else None,
        predicted_ratio=1 + plan.overhead if plan is not None else None,
        bound_pct=100 * plan.lower_bound_overhead if plan is not None else None,
        ready_s=ready_s,
        published_pct=model.published_pct if fraction == THIRD else None,
    )
    return row, [] if planned is None else planned.measurements()


def _prepare(
    network: WithLoss, model: Model, method: str, fraction: float | None, sample: Tensor
) -> tuple[Callable[[Tensor], Tensor], Hiremate | None]:
    """What to call, and the planned module if it is one."""
    if method.startswith("remat"):
        assert fraction is not None
        runtime = "inductor" if method.endswith("inductor") else "eager"
        planned = Hiremate(network, sample, _percentage(fraction), runtime=runtime, zoo=False)
        return planned, planned
    if method == "checkpoint":
        for block in model.blocks(network.network):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return network, None
    torch.compiler.reset()
    config: Any = importlib.import_module("torch._functorch.config")
    compiled = torch.compile(network, backend="aot_eager_decomp_partition")

    def call(x: Tensor) -> Tensor:
        with config.patch(activation_memory_budget=float(method.split()[1])):
            loss: Tensor = compiled(x)
        return loss

    return call, None


def _percentage(fraction: float) -> str:
    return f"{100 * fraction:.4f}%"


def _budget_nbytes(planned: Hiremate | None, fraction: float | None) -> int | None:
    """The budget of a row; that of its plan is smaller where the plan has a margin."""
    if planned is None or fraction is None:
        return None
    return resolve_budget(_percentage(fraction), planned.graph)


def main() -> int:
    """Measure what is not there yet, write after each row, print the table."""
    parser = argparse.ArgumentParser(description="what remat does on an accelerator")
    parser.add_argument(
        "--seconds", type=float, help="begin no row after that (default: 560; with --small, no limit)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--small", action="store_true", help="small models, to test the script")
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    arguments = parser.parse_args()
    limit_s: float = arguments.seconds
    if arguments.seconds is None:
        limit_s = float("inf") if arguments.small else 560.0
    began_s = time.perf_counter()
    device = current_device()
    table = models(small=arguments.small)
    unknown = sorted({*(arguments.models or ())} - {*table})
    if unknown:
        parser.error(f"no model {unknown[0]}: there are {', '.join(table)}")
    path = arguments.out / f"{device_name(device)}{'-small' if arguments.small else ''}.json"
    platforms = (arguments.out if arguments.small else Path(__file__).parents[1]) / "platforms"
    rows = []
    if path.exists() and not arguments.again:
        rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
        rows = [row for row in rows if not row.failed]
    done = {row.key for row in rows}
    chosen = arguments.models or list(table)
    ranked = [(rank, name, *row) for name in chosen for rank, row in enumerate(methods(table[name]))]
    for _, name, method, fraction in sorted(ranked, key=itemgetter(0)):
        if (name, method, fraction) in done:
            continue
        if time.perf_counter() - began_s > limit_s:
            print("out of time: run again for the rest")
            break
        row, measurements = measure(name, table[name], method, fraction, device)
        rows.append(row)
        if measurements:
            keep(platforms, measurements, device)
        gc.collect()
        release(device)
        _write(path, rows, device)
        print(line(row), flush=True)
    if arguments.out == RESULTS:
        report.main()
    return conclude(rows)


def conclude(rows: list[Row]) -> int:
    """Print how many rows there are, and what is wrong; the exit status."""
    print(f"{len(rows)} rows, {sum(bool(row.note) for row in rows)} without figures")
    for row in rows:
        if row.broken:
            print(f"broken: {row.model} {row.method}: {row.peak_nbytes} bytes of {row.budget_nbytes}")
        if row.failed:
            print(f"failed: {line(row)}")
    return 1 if any(row.broken or row.failed for row in rows) else 0


def _write(path: Path, rows: list[Row], device: torch.device) -> None:
    record.write(path, list(map(attrs.asdict, rows)), packages=["torch"], device=device_name(device))


def line(row: Row) -> str:
    """One row for people, beside its goals."""
    name = f"{row.model:13} {row.method:15} {f'{row.fraction:.0%}' if row.fraction else '':>5}"
    if row.note:
        return f"{name} {row.note}"
    assert row.peak_nbytes is not None
    assert row.eager_nbytes is not None
    assert row.overhead is not None
    parts = [
        f"{row.peak_nbytes / GIB:8.2f} of {row.eager_nbytes / GIB:6.2f} GiB{_asked(row)}",
        f"{100 * row.overhead:+6.2f} %",
        f"step {1e3 * (row.step_s or 0):8.2f} ms",
    ]
    if row.predicted_nbytes and row.predicted_ratio:
        peak_off = row.peak_nbytes / row.predicted_nbytes - 1
        time_off = (1 + row.overhead) / row.predicted_ratio - 1
        parts.append(f"peak {100 * peak_off:+.2f} %, time {100 * time_off:+.2f} % of the prediction")
        if row.predicted_s is not None and row.predicted_eager_s is not None and row.eager_s:
            predicted_ms, eager_ms = 1e3 * row.predicted_s, 1e3 * row.predicted_eager_s
            parts.append(
                f"predicted {predicted_ms:.2f} ms, eager {eager_ms:.2f} of {1e3 * row.eager_s:.2f} ms"
            )
        parts.append(f"bound {row.bound_pct:.2f} %, ready in {row.ready_s:.0f} s")
    if row.published_pct is not None:
        parts.append(f"published {row.published_pct} %")
    return f"{name} {'; '.join(parts)}"


def _asked(row: Row) -> str:
    return f", {row.requested_nbytes / GIB:.2f} requested" if row.requested_nbytes is not None else ""


if __name__ == "__main__":
    sys.exit(main())
