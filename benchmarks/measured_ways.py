"""What other ways to run ops bring on this machine: peaks, smallest budgets and step times, from one run.

    python benchmarks/measured_ways.py [MODEL ...] [--ways none exact] [--steps N] [--json FILE]

Language models with their real vocabularies and image models, small enough for a CPU. Each is planned with
every choice of `ways` in turn, at its smallest budget and at 100, 60 and 40 % of the peak of the unplanned
step without ways. Steps take turns with eager's; what is printed are medians of ratios, so that other load on
the machine cancels. `modelled` is the plan's overhead by the measured times of its ops.

A row is wrong if the allocator's peak is not the predicted one to the byte, or the meter's where no ways are
on (the meter sees the chunks of kernels that are written in Python, which a plan counts as workspace); if a
peak is above the budget; if loss or gradients differ from eager's in a bit, but for ways that round; or if at
60 % a step takes longer than the plan says by more than two points.
"""

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.peer_models import UNet
from remat_executor import MemoryMeter, allocator_peak
from remat_facade import Hiremate
from remat_solvers import InfeasibleBudget
from tests.helpers.models import import_torchvision, import_transformers

SHARES = ("smallest", "100%", "60%", "40%")
JUDGED = "60%"
SLACK = 0.02  # of a step, beyond what the plan says
MIB = 1 << 20


class Step(nn.Module):
    """A network with its loss."""

    def __init__(self, network: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, sample: Tensor) -> Tensor:
        """The loss."""
        return self._loss(self.network, sample)


def language_loss(network: nn.Module, ids: Tensor) -> Tensor:
    """The loss that the library computes."""
    loss: Tensor = network(input_ids=ids, labels=ids).loss
    return loss


def image_loss(network: nn.Module, images: Tensor) -> Tensor:
    """Cross entropy against fixed classes."""
    return nn.functional.cross_entropy(network(images), torch.arange(len(images)))


def mask_loss(network: nn.Module, images: Tensor) -> Tensor:
    """Mean square distance to the images themselves."""
    return nn.functional.mse_loss(network(images), images)


def language(kind: str, vocabulary: int, **sizes: object) -> tuple[Step, Tensor]:
    """A language model without dropout, and a batch of 2 x 256 tokens."""
    transformers = import_transformers()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes
    )
    network = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[kind])(config)
    network.loss_type = "ForCausalLM"
    return Step(network, language_loss), torch.randint(vocabulary, (2, 256))


def vision(name: str, batch: int, size: int) -> tuple[Step, Tensor]:
    """A model of torchvision with ten classes; VGG's large linear layers would be most of its memory."""
    network = getattr(import_torchvision().models, name)(num_classes=10)
    if name.startswith("vgg"):
        network.avgpool, network.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 10)
    return Step(network, image_loss), torch.randn(batch, 3, size, size)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: Mapping[str, Callable[[], tuple[Step, Tensor]]] = {
    "gpt2": lambda: language("GPT2", 50257, n_layer=4, n_embd=256, n_head=4, n_positions=256, **NO_DROPOUT),
    "llama": lambda: language(
        "Llama",
        128256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
    "mobilenet_v2": lambda: vision("mobilenet_v2", 8, 128),
    "resnet50": lambda: vision("resnet50", 8, 96),
    "vgg16": lambda: vision("vgg16", 4, 128),
    "unet": lambda: (Step(UNet(16), mask_loss), torch.randn(4, 3, 96, 96)),
    "vit_b": lambda: vision("vit_b_16", 2, 224),
}


@attrs.frozen(kw_only=True)
class Row:
    """One model, one choice of ways, one budget.

    Attributes:
        model: its name.
        ways: the option of the entry point.
        share: the budget as given: percents are of the step without ways.
        budget_nbytes: the budget.
        eager_nbytes: the allocator's peak of eager's step.
        peak_nbytes: the allocator's peak of the planned step.
        predicted_nbytes: the same by the plan.
        metered_nbytes: live bytes of the planned step, by the meter.
        live_nbytes: the same by the plan.
        ratio: median of planned over eager's seconds; None if not timed.
        modelled: the plan's overhead.
        least: the plan's lower bound on it.
        families: how many switches of each family are on.
        planning_s: seconds to the planned module.
        exact: whether loss and gradients have eager's bits; None if ways may round.
    """

    model: str
    ways: str
    share: str
    budget_nbytes: int
    eager_nbytes: int
    peak_nbytes: int
    predicted_nbytes: int
    metered_nbytes: int
    live_nbytes: int
    ratio: float
    modelled: float
    least: float
    families: dict[str, int]
    planning_s: float
    exact: bool | None

    def wrong(self) -> Iterator[str]:
        """What is wrong with the row."""
        name = f"{self.model} {self.ways} {self.share}"
        if self.peak_nbytes != self.predicted_nbytes:
            yield f"{name}: peak of {self.peak_nbytes} bytes, {self.predicted_nbytes} predicted"
        if not self.families and self.metered_nbytes != self.live_nbytes:
            yield f"{name}: {self.metered_nbytes} live bytes, {self.live_nbytes} predicted"
        if self.peak_nbytes > self.budget_nbytes:
            yield f"{name}: {self.peak_nbytes - self.budget_nbytes} bytes above the budget"
        if self.exact is False:
            yield f"{name}: other bits than eager's"
        if self.share == JUDGED and self.ratio > 1 + max(self.modelled, 0.0) + SLACK:
            yield f"{name}: {self.ratio:.3f} of eager's step, planned at {1 + self.modelled:.3f}"


def run(module: nn.Module, sample: Tensor) -> list[Tensor]:
    """Loss and gradients of a step, with the same draws each time."""
    module.zero_grad()
    torch.manual_seed(0)
    loss: Tensor = module(sample)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def peaks(module: nn.Module, sample: Tensor) -> tuple[int, int]:
    """Allocator's and meter's peak of a step whose gradients are new."""
    run(module, sample)
    module.zero_grad()
    nbytes = allocator_peak(lambda: run(module, sample)).peak_nbytes
    module.zero_grad()
    with MemoryMeter(module, sample) as meter:
        run(module, sample)
    return nbytes, meter.peak_nbytes


def ratio_of(planned: nn.Module, eager: nn.Module, sample: Tensor, steps: int) -> float:
    """Median of the planned step's time over the mean of the eager steps around it."""
    ratios = []
    times = [0.0, 0.0, 0.0]
    for _ in range(steps):
        for i, module in enumerate((eager, planned, eager)):
            module.zero_grad()
            began_s = time.perf_counter()
            module(sample).backward()
            times[i] = time.perf_counter() - began_s
        ratios.append(2 * times[1] / (times[0] + times[2]))
    return statistics.median(ratios)


def smallest_nbytes(model: nn.Module, sample: Tensor, ways: str, limit_s: float) -> int:
    """The smallest budget for which a plan is found."""
    try:
        Hiremate(copy.deepcopy(model), sample, 1, ways=ways, time_limit_s=limit_s)
    except InfeasibleBudget as error:
        return error.smallest_nbytes
    raise AssertionError("a plan within one byte")


def rows_of(name: str, every: list[str], steps: int, limit_s: float) -> Iterator[Row]:
    """All rows of a model."""
    torch.manual_seed(0)
    eager, sample = MODELS[name]()
    eager.train()
    start = copy.deepcopy(eager.state_dict())
    wanted = [t.clone() for t in run(copy.deepcopy(eager), sample)]
    eager_nbytes, _ = peaks(copy.deepcopy(eager), sample)
    for share in SHARES:
        for ways in every:
            budget: int | str = share
            if share == "smallest":
                budget = smallest_nbytes(eager, sample, ways, limit_s)
            began_s = time.perf_counter()
            try:
                planned = Hiremate(copy.deepcopy(eager), sample, budget, ways=ways, time_limit_s=limit_s)
            except InfeasibleBudget as error:
                print(f"{name:13} {ways:8} {share:>8} none: from {error.smallest_nbytes / MIB:.1f} MiB on")
                continue
            planning_s = time.perf_counter() - began_s
            found = [t.clone() for t in run(planned, sample)]
            exact = all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
            planned.load_state_dict(start)
            peak_nbytes, metered_nbytes = peaks(planned, sample)
            plan = planned.plan
            counts: dict[str, int] = {}
            for switch in plan.switched:
                family = switch.partition(".")[0]
                counts[family] = counts.get(family, 0) + 1
            yield Row(
                model=name,
                ways=ways,
                share=share,
                budget_nbytes=plan.budget_nbytes,
                eager_nbytes=eager_nbytes,
                peak_nbytes=peak_nbytes,
                predicted_nbytes=plan.peak_nbytes,
                metered_nbytes=metered_nbytes,
                live_nbytes=plan.live_peak_nbytes,
                ratio=ratio_of(planned, eager, sample, steps),
                modelled=plan.overhead,
                least=plan.lower_bound_overhead,
                families=counts,
                planning_s=planning_s,
                exact=exact if ways in ("none", "exact") else None,
            )
            del planned
            gc.collect()


def shown(row: Row) -> str:
    """A line of the table."""
    sizes = (row.budget_nbytes, row.peak_nbytes, row.eager_nbytes)
    columns = " ".join(f"{nbytes / MIB:8.1f}" for nbytes in sizes)
    times = f"{row.ratio:7.3f} {1 + row.modelled:8.3f} {1 + row.least:7.3f}"
    ways = ", ".join(f"{family} {count}" for family, count in row.families.items()) or "-"
    bits = {True: "same", False: "OTHER", None: "rounds"}[row.exact]
    head = f"{row.model:13} {row.ways:8} {row.share:>8}"
    return f"{head} {columns} {times} {row.planning_s:7.1f} {bits:>6}  {ways}"


def main() -> int:
    """Print the table; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help="all by default")
    parser.add_argument("--ways", nargs="+", default=["none", "exact"], help="of the entry point")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each row")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each planning")
    parser.add_argument("--json", type=Path, help="write the rows here, after each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = ("budget", "peak", "eager")
    columns = " ".join(f"{head:>8}" for head in heads)
    print(
        f"{'model':13} {'ways':8} {'share':>8} {columns}   ratio modelled   least  plan s   bits  on"
        "   (MiB; times over eager's)"
    )
    rows: list[Row] = []
    wrong: list[str] = []
    for name in options.models:
        for row in rows_of(name, options.ways, options.steps, options.seconds):
            rows.append(row)
            wrong += row.wrong()
            print(shown(row), flush=True)
            if options.json:
                record.write(
                    options.json,
                    [attrs.asdict(row) for row in rows],
                    packages=("torch", "transformers", "torchvision"),
                    seconds=options.seconds,
                )
    print("\n".join(wrong) or "no row is wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
