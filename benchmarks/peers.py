"""Peers: what memory costs in recomputed FLOPs by hand-placed checkpoints, torch's memory budget, and remat.

    python benchmarks/peers.py [--models gpt2 llama resnet18] [--quick] [--json FILE]

One table a model, every row read by one meter in one run: bytes of live tensor storages above what was
there when the forward began (parameters, the sample, any `.grad`), through forward and backward of a model
that returns its loss. Two peaks: with `.grad` None, where the gradients stay and count, and with `.grad`
there already. FLOPs are counted as they run. Loss, gradients and buffers after one step are compared with
eager's to the bit.

Rows: eager; `torch.utils.checkpoint` around each block; the same, selective: what matrix products,
convolutions and attention return is kept; torch's `activation_memory_budget`, on the graph as captured
("torch 0.5") and on one taken apart by decompositions ("torch 0.5 d"); remat at the peak of each of them
that recomputes, and at the budgets of our promises. remat plans on the platform `flops`, the currency of
the others, and its budget binds both states of `.grad`. Here the budget covers what the meter sees: scratch
inside kernels counts on neither side.

Step times are medians over pairs that alternate with eager, as a ratio, so that other load on the machine
cancels.

The exit status is not zero if a promise is broken: on gpt2 at most 16 % recomputed at the lower of the two
peaks of a checkpoint per block, nothing at 51 MiB, 3 % at 45 MiB; on every model remat's metered peaks
within its budget and eager's numbers.
"""

import argparse
import contextlib
import datetime
import functools
import gc
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from remat_executor import MemoryMeter, PlannedModule
from remat_facade.planner import PLANNING_S
from remat_graph import Graph, get_platform, simulate
from remat_graph.plan import Plan
from remat_solvers import InfeasibleBudget, Problem, get_solver
from remat_solvers.questions import infeasible
from tests.models import import_torchvision, import_transformers

MIB = 1 << 20
TORCH_BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
BACKENDS = {"": "aot_eager", " d": "aot_eager_decomp_partition"}  # both run torch's partitioner
PER_BLOCK = "checkpoint per block"

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


@attrs.frozen(kw_only=True)
class Model:
    """What is trained in one table.

    Attributes:
        about: for the table's head.
        make: a fresh network.
        sample: its input.
        loss: of network and sample.
        blocks: what is checkpointed.
        branches: it computes something else (a few ulp) where it believes that it is being captured.
        promises: budget in MiB -> most percent of FLOPs recomputed; 0 stands for the peak of `PER_BLOCK`.
    """

    about: str
    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    blocks: Callable[[Any], list[nn.Module]]
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


def classifier_loss(network: Any, images: Tensor) -> Tensor:
    """Cross entropy against fixed classes."""
    classes = torch.arange(len(images), device=images.device) % 10
    return nn.functional.cross_entropy(network(images), classes)


def _gpt2() -> nn.Module:
    transformers = import_transformers()
    config = transformers.GPT2Config(
        vocab_size=512,
        n_positions=128,
        n_embd=128,
        n_layer=8,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    network = transformers.GPT2LMHeadModel(config)
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
    return transformers.LlamaForCausalLM(config)


def _resnet18() -> nn.Module:
    return import_torchvision().models.resnet18(num_classes=10)


def _tokens() -> Tensor:
    return torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(1))


def _images() -> Tensor:
    return torch.randn(8, 3, 96, 96, generator=torch.Generator().manual_seed(1))


def _resnet_blocks(network: Any) -> list[nn.Module]:
    return [block for i in range(1, 5) for block in getattr(network, f"layer{i}")]


MODELS = {
    "gpt2": Model(
        about="8 layers of 128, 4 heads, vocabulary 512, no dropout, batch 8 x 128",
        make=_gpt2,
        sample=_tokens,
        loss=transformer_loss,
        blocks=lambda network: list(network.transformer.h),
        promises={0: 16.0, 51: 0.0, 45: 3.0},
    ),
    "llama": Model(
        about="8 layers of 128, 4 heads, vocabulary 512, batch 8 x 128",
        make=_llama,
        sample=_tokens,
        loss=transformer_loss,
        blocks=lambda network: list(network.model.layers),
        branches=True,
    ),
    "resnet18": Model(
        about="10 classes, batch 8 x 3 x 96 x 96",
        make=_resnet18,
        sample=_images,
        loss=classifier_loss,
        blocks=_resnet_blocks,
    ),
}


# ------------------------------------------------------------------------------------------ the methods

Call = Callable[[Tensor], Tensor]


def per_block(model: Model, step: Step, **options: Any) -> Call:
    """A checkpoint around each block."""
    for block in model.blocks(step.network):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return step


def selective(model: Model, step: Step) -> Call:
    """The same, but what is dear to compute is kept."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return per_block(model, step, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def budgeted(backend: str, share: float, model: Model, step: Step) -> Call:
    """torch's own budget; it is read when the first call compiles, so each call has it set."""
    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend)

    def call(sample: Tensor) -> Tensor:
        with activation_memory_budget(share):
            loss: Tensor = compiled(sample)
        return loss

    return call


def activation_memory_budget(share: float) -> contextlib.AbstractContextManager[Any]:
    """Private: there is no public way to set the budget for a backend that runs eager's kernels."""
    manager: contextlib.AbstractContextManager[Any] = importlib.import_module(
        "torch._functorch.config"
    ).patch(activation_memory_budget=share)
    return manager


@contextlib.contextmanager
def as_if_captured() -> Iterator[None]:
    """Private: eager takes the branch that capture takes."""
    compiler: Any = torch.compiler
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = False


def planned(step: Step, sample: Tensor, budget_nbytes: int, cache: Path) -> PlannedModule:
    """Ours.

    Raises:
        InfeasibleBudget: no schedule was found.
    """

    def plan(graph: Graph) -> Plan:
        began_s = time.perf_counter()
        metered = without_scratch(graph)
        solution = get_solver("auto").solve(Problem(metered, budget_nbytes))
        if solution.schedule is None:
            raise infeasible(metered, budget_nbytes)
        return Plan.from_schedule(
            graph,
            solution.schedule,
            budget_nbytes=simulate(graph, solution.schedule).peak_nbytes,  # scratch on top
            lower_bound_s=solution.lower_bound_s,
            solver="auto",
            solver_stats={PLANNING_S: time.perf_counter() - began_s},
        )

    return PlannedModule(step, (sample,), {}, plan, platform=get_platform("flops"), cache_dir=cache)


def without_scratch(graph: Graph) -> Graph:
    """The graph as the meter sees it, which counts storages alone."""
    ops = (
        attrs.evolve(
            op, implementations=tuple(attrs.evolve(i, workspace_nbytes=0) for i in op.implementations)
        )
        for op in graph.ops
    )
    return attrs.evolve(graph, ops=tuple(ops))


# ------------------------------------------------------------------------------------------ measuring


@attrs.frozen(kw_only=True, eq=False)
class Numbers:
    """What a step computes."""

    loss: Tensor
    gradients: list[Tensor]
    buffers: list[Tensor]


@attrs.frozen(kw_only=True)
class Row:
    """One method on one model; percentages are of eager's FLOPs, the model's and bound's of the plan's.

    `loss`, `gradients` and `buffers` say how far they are from eager's: 0 is equal to the bit, otherwise the
    norm of the difference over the norm. `branch`: eager ran as if captured for this comparison.
    """

    model: str
    method: str
    budget_nbytes: int | None = None
    peak_nbytes: int | None = None
    accumulating_peak_nbytes: int | None = None
    flops: int | None = None
    recomputed_pct: float | None = None
    modelled_pct: float | None = None
    bound_pct: float | None = None
    loss: float | None = None
    gradients: float | None = None
    buffers: float | None = None
    branch: bool = False
    step_ratio: float | None = None
    prepare_s: float | None = None
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether the numbers are eager's."""
        return self.loss == self.gradients == self.buffers == 0.0


class Bench:
    """One model's table: eager first, then any method against it."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.model, self.rounds = name, MODELS[name], rounds
        self.sample = self.model.sample()
        self.flops = 0
        self.rows: list[Row] = []
        self.eager = Step(self.model)
        self.references: list[tuple[bool, Numbers]] = []
        if self.model.branches:
            with as_if_captured():
                self.references = [(True, numbers(self.fresh(), self.sample, None))]

    def fresh(self) -> Step:
        """The model with its first weights."""
        return Step(self.model)

    def measure(
        self, method: str, step: Step, call: Call, budget_nbytes: int | None = None, plan: Plan | None = None
    ) -> Row:
        """Run a method: one step to compare, two to meter, a few to time; print its row."""
        began_s = time.perf_counter()
        first = numbers(step, self.sample, call)
        prepare_s = time.perf_counter() - began_s
        step.zero_grad()
        new, accumulating = (self.meter(step, call) for _ in range(2))
        if not self.references or self.references[0][0]:
            self.references.insert(0, (False, first))
            self.flops = new.flops
        branch, loss, gradients, buffers = self.compare(first)
        row = Row(
            model=self.name,
            method=method,
            budget_nbytes=budget_nbytes,
            peak_nbytes=new.peak_nbytes,
            accumulating_peak_nbytes=accumulating.peak_nbytes,
            flops=new.flops,
            recomputed_pct=100 * (new.flops / self.flops - 1),
            modelled_pct=None if plan is None else 100 * plan.overhead,
            bound_pct=None if plan is None else 100 * plan.lower_bound_overhead,
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            branch=branch,
            step_ratio=self.ratio(call),
            prepare_s=prepare_s if plan is None else plan.solver_stats[PLANNING_S],
        )
        return self.show(row)

    def show(self, row: Row) -> Row:
        """Print a row, keep it."""
        self.rows.append(row)
        print(shown(row), flush=True)
        return row

    def meter(self, step: Step, call: Call) -> MemoryMeter:
        """One step, its loss held until the backward ends."""
        gc.collect()
        with MemoryMeter(step, self.sample) as meter:
            loss = call(self.sample)
            loss.backward()
        return meter

    def compare(self, found: Numbers) -> tuple[bool, float, float, float]:
        """Distances from eager, or from eager as if captured where that is what was run."""
        results = [
            (
                branch,
                distance([found.loss], [wanted.loss]),
                distance(found.gradients, wanted.gradients),
                distance(found.buffers, wanted.buffers),
            )
            for branch, wanted in self.references
        ]
        return next((r for r in results if r[1:] == (0.0, 0.0, 0.0)), results[0])

    def ratio(self, call: Call) -> float:
        """Step time over eager's, the median of alternating pairs."""
        if not self.rows:
            return 1.0
        return statistics.median(self.seconds(call) / self.seconds(self.eager) for _ in range(self.rounds))

    def seconds(self, call: Call) -> float:
        """One step by the clock."""
        began_s = time.perf_counter()
        call(self.sample).backward()
        return time.perf_counter() - began_s


def numbers(step: Step, sample: Tensor, call: Call | None) -> Numbers:
    """Loss, gradients and buffers after one step from the model as it is."""
    loss = (call or step)(sample)
    loss.backward()
    gradients = [p.grad.clone() for p in step.network.parameters() if p.grad is not None]
    return Numbers(
        loss=loss.detach(), gradients=gradients, buffers=[b.clone() for b in step.network.buffers()]
    )


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """0.0 for equal to the bit, else the norm of the difference over the norm; infinite if one is missing."""
    if len(found) != len(wanted):
        return math.inf
    if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        return 0.0
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(off / sum(float(b.square().sum()) for _, b in pairs))


# ------------------------------------------------------------------------------------------ the tables


def bench(name: str, *, quick: bool, cache: Path) -> list[Row]:
    """One table."""
    run = Bench(name, rounds=3 if quick else 7)
    model = run.model
    parameter_nbytes = sum(p.nbytes for p in run.eager.parameters())
    print(f"\n{name}: {model.about}; {parameter_nbytes / MIB:.1f} MiB of parameters")
    print(HEADER, flush=True)

    step = run.fresh()
    eager = run.measure("eager", step, step)
    step = run.fresh()
    blocks = run.measure(PER_BLOCK, step, per_block(model, step))
    step = run.fresh()
    peers = [run.measure("selective checkpoint", step, selective(model, step))]
    for mark, backend in BACKENDS.items():
        for share in (0.5, 0.1) if quick else TORCH_BUDGETS:
            step = run.fresh()
            peers.append(run.measure(f"torch {share}{mark}", step, budgeted(backend, share, model, step)))

    budgets = {promised << 20: f"remat at {promised} MiB" for promised in model.promises if promised}
    budgets[blocks.peak_nbytes] = f"remat as {PER_BLOCK}"
    budgets[blocks.accumulating_peak_nbytes] = f"remat as {PER_BLOCK}, .grad"
    for row in peers:
        useful = row.recomputed_pct > 0.05 and row.peak_nbytes < eager.peak_nbytes
        if useful and not (quick and model.promises):
            budgets.setdefault(row.peak_nbytes, f"remat as {row.method}")
    for budget_nbytes in sorted(budgets, reverse=True):
        method = budgets[budget_nbytes]
        least_nbytes = run_planned(run, method, budget_nbytes, cache)
        if least_nbytes is not None:
            run_planned(run, "remat at the least that works", least_nbytes, cache)
            break
    return run.rows


def run_planned(run: Bench, method: str, budget_nbytes: int, cache: Path) -> int | None:
    """A row of ours; the least budget that works if this one does not."""
    step = run.fresh()
    try:
        module = planned(step, run.sample, budget_nbytes, cache)
    except InfeasibleBudget as error:
        note = f"infeasible: {error.smallest_nbytes / MIB:.2f} MiB is the least that works"
        run.show(Row(model=run.name, method=method, budget_nbytes=budget_nbytes, note=note))
        return error.smallest_nbytes
    run.measure(method, step, module, budget_nbytes, module.plan)
    return None


def broken(rows: list[Row]) -> list[str]:
    """The promises that the rows break."""
    found = []
    ours = [row for row in rows if row.budget_nbytes is not None and row.peak_nbytes is not None]
    for row in ours:
        peak = max(row.peak_nbytes, row.accumulating_peak_nbytes)
        where = f"{row.model}, {row.method}"
        if peak > row.budget_nbytes:
            found.append(
                f"{where}: the metered peak of {peak} bytes is above the budget of {row.budget_nbytes}"
            )
        if not row.exact:
            found.append(f"{where}: the numbers are not eager's")
    for name in {row.model: None for row in rows}:
        blocks = next(row for row in rows if row.model == name and row.method == PER_BLOCK)
        for promised, most in MODELS[name].promises.items():
            budget = promised << 20 or min(blocks.peak_nbytes, blocks.accumulating_peak_nbytes)
            row = next((r for r in ours if r.model == name and r.budget_nbytes == budget), None)
            if row is None:
                found.append(f"{name}: nothing at {budget / MIB:.2f} MiB")
            elif row.recomputed_pct > most + 0.005:  # what the table shows as equal is equal
                found.append(
                    f"{name}: {row.recomputed_pct:.2f} % at {budget / MIB:.2f} MiB, promised {most} %"
                )
    return found


COLUMNS = (
    ("budget", 8),
    ("peak", 8),
    (".grad there", 12),
    ("FLOPs %", 9),
    ("modelled", 9),
    ("bound", 8),
    ("loss", 9),
    ("gradients", 10),
    ("buffers", 9),
    ("time x", 7),
    ("prepare s", 10),
)
HEADER = f"{'method':<34}" + "".join(f"{title:>{width}}" for title, width in COLUMNS)


def shown(row: Row) -> str:
    """A line of the table: MiB, percentages, what is equal, times."""
    if row.note:
        return f"{row.method:<34}{_mib(row.budget_nbytes):>8}  {row.note}"
    cells = (
        _mib(row.budget_nbytes),
        _mib(row.peak_nbytes),
        _mib(row.accumulating_peak_nbytes),
        _fixed(row.recomputed_pct, "+.2f"),
        _fixed(row.modelled_pct, "+.2f"),
        _fixed(row.bound_pct, "+.2f"),
        _equal(row.loss, row.branch),
        _equal(row.gradients, row.branch),
        _equal(row.buffers, row.branch),
        _fixed(row.step_ratio, ".2f"),
        _fixed(row.prepare_s, ".1f"),
    )
    return f"{row.method:<34}" + "".join(f"{c:>{w}}" for c, (_, w) in zip(cells, COLUMNS, strict=True))


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.2f}"


def _fixed(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _equal(difference: float | None, branch: bool) -> str:
    return ("equal*" if branch else "equal") if difference == 0.0 else f"{difference:.0e}"


LEGEND = """
peak: metered MiB with .grad None, then with .grad there. FLOPs %: recomputed, as counted while running,
over eager's. modelled, bound: what the plan predicts, and below which no schedule gets at that budget.
loss, gradients, buffers: equal to the bit, or how far off (equal*: to eager in the branch that the model
takes when it is captured); a checkpointed batch norm updates its running statistics twice. time x: step
time over eager's. prepare s: planning; for the others the first step, which compiles where there is
something to compile."""


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument(
        "--quick", action="store_true", help="two of torch's budgets, fewer of ours, fewer timed steps"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()

    print(f"torch {torch.__version__} on CPU, {torch.get_num_threads()} threads")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in arguments.models:
            rows += bench(name, quick=arguments.quick, cache=Path(cache))
    print(LEGEND)
    problems = broken(rows)
    for problem in problems:
        print(f"broken: {problem}")
    if not problems:
        print("every promise is kept")
    if arguments.json:
        data = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rows": [attrs.asdict(r) for r in rows],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
