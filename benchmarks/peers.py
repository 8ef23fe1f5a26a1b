"""Peers: what memory costs in recomputed FLOPs and bytes by checkpoints, torch's memory budget, and remat.

    python benchmarks/peers.py [--models gpt2 gpt2_words llama ...] [--quick] [--json FILE]

One table a model, its rows read by one meter in one run: bytes of live tensor storages above what was
there when the forward began (parameters, the sample, any `.grad`), through forward and backward of a model
that returns its loss. Two peaks: with `.grad` None, where the gradients stay and count, and with `.grad`
there already. FLOPs are counted as they run, and so are the bytes of what operators make. Loss, gradients
and buffers after one step are compared with eager's to the bit.

Rows: eager; `torch.utils.checkpoint` around each block, and around each two neighbours; the same around
each block, selective: what matrix products, convolutions and attention return is kept; torch's
`activation_memory_budget`, on the graph as captured ("torch 0.5") and on one taken apart by decompositions
("torch 0.5 d"); torch's `linear_cross_entropy`, which never holds the logits, alone and with a checkpoint
per block, on models that have such a head; remat at 70 to 20 % of what eager holds beyond its gradients, at
the peak of each of them that recomputes, and at the budgets of our promises. remat plans on the platform
`flops`, the currency of the others, and its budget binds both states of `.grad`; rows that say ".grad" are
of plans with `gradients="present"`, at the peaks of the others in steps that find gradients, and run in
such only. Rows that say "rounding" have ways that round too, at the peaks of `linear_cross_entropy`, which
rounds as well; the meter does not see into it, so peaks there are the allocator's, scratch included.
Elsewhere the budget covers what the meter sees: scratch inside kernels counts on neither side.

Last, Inductor alone and under remat's plans. The meter cannot see into compiled kernels, so these rows have
no FLOPs, and their peak is the allocator's, scratch included; their budgets are shares of that reading, their
plans are made from measured times, and their numbers are compared within rounding. Where a model makes more
of that (the batch norms of a deep network that has not been trained amplify another order of summing), the
same schedule is compiled again in double precision and compared there.

Step times are medians over pairs that alternate with eager, as a ratio, so that other load on the machine
cancels.

The exit status is not zero if a promise is broken: on gpt2 at most 16 % recomputed at the lower of the two
peaks of a checkpoint per block, nothing at 51 MiB, 3 % at 45 MiB; on every model remat's peaks within its
budget, eager's numbers, no peer with eager's numbers that takes at most remat's memory, FLOPs and bytes and
less of one, and from 40 % up a plan within a point of the bound printed beside it (the
tight one where the fast one does not do).
"""

import argparse
import contextlib
import functools
import gc
import importlib
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

from benchmarks import record
from benchmarks.peer_models import MODELS, Model, Step
from remat_executor import MemoryMeter, PlannedModule, StepOverBudget, allocator_peak
from remat_executor.module.gradient_states import GradientsState
from remat_facade import Hiremate
from remat_facade.planning.known_plans import PLANNING_S
from remat_graph import Grads, Graph, Op, Plan, Schedule, get_platform, simulate
from remat_solvers import (
    Deadline,
    InfeasibleBudget,
    Problem,
    get_solver,
    min_budget,
    min_present_budget,
    solve_present,
    solve_switches,
)
from remat_solvers.bounds import tight_bound
from remat_solvers.present_gradients import freed_when_made

MIB = 1 << 20
TORCH_BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
BACKENDS = {"": "aot_eager", " d": "aot_eager_decomp_partition"}  # both run torch's partitioner
PER_BLOCK = "checkpoint per block"
EAGER = "eager"
INDUCTOR = "inductor"
SHARES_PCT, QUICK_SHARES_PCT = (70, 50, 40, 30, 20), (70, 40)  # of eager's peak by the meter
INDUCTOR_SHARES_PCT = (70, 40)  # of eager's peak by the allocator
BOUND_S = 150.0  # by the clock, for a tighter bound where a plan is too far from its own
MOST_GAP = 1.0  # points from a plan to its bound, for budgets
TIGHT_FROM_PCT = 40  # from this share of it up
ROUNDING = 1e-4  # relative; how far compiled numbers may be from eager's
DOUBLE_ROUNDING = 1e-9  # the same in double precision, for a model that amplifies it
SAME_PCT = 0.005  # what the table shows as equal is equal

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


# ------------------------------------------------------------------------------------------ the methods

Call = Callable[[Tensor], Tensor]


def per_block(model: Model, step: Step, **options: Any) -> Call:
    """A checkpoint around each block."""
    for block in model.blocks(step.network):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return step


class Pair(nn.Module):
    """Two neighbours as one block, in the place of both."""

    def __init__(self, model: Model, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._onward = model.onward

    def forward(self, *given: Any, **options: Any) -> Any:
        """What the second returns."""
        output = None
        for place, block in enumerate(self.blocks):
            if place:
                given = self._onward(output, given)
            output = block(*given, **options)
        return output


def per_two_blocks(model: Model, step: Step) -> Call:
    """A checkpoint around each two blocks that one container runs one after the other."""
    blocks = set(model.blocks(step.network))
    pairs: list[nn.Module] = []
    for container in [module for module in step.network.modules() if blocks.intersection(module.children())]:
        inside = list(container.children())
        found = [Pair(model, *inside[i : i + 2]) for i in range(0, len(inside), 2)]
        del container[:]
        container.extend(found)
        pairs += found
    return per_block(attrs.evolve(model, blocks=lambda _: pairs), step)


def selective(model: Model, step: Step) -> Call:
    """A checkpoint around each block, but what is dear to compute is kept."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return per_block(model, step, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def fused_head(model: Model, step: Step) -> Call:
    """torch's head without logits, which sums the weight's gradient over chunks of rows."""
    head = model.head
    assert head is not None
    options = nn.LinearCrossEntropyOptions(acc_dtype=torch.float32)

    def call(sample: Tensor) -> Tensor:
        hidden, weight, labels = head(step.network, sample)
        return nn.functional.linear_cross_entropy(hidden, weight, labels, options=options)

    return call


def budgeted(backend: str, share: float, model: Model, step: Step) -> Call:
    """torch's own budget; it is read when the first call compiles, so each call has it set."""
    torch.compiler.reset()
    compiled = torch.compile(step, backend=backend)

    def call(sample: Tensor) -> Tensor:
        with activation_memory_budget(share):
            loss: Tensor = compiled(sample)
        return loss

    return call


def compiled(step: Step) -> Call:
    """Inductor, which decides by itself what it computes again."""
    torch.compiler.reset()
    call: Call = torch.compile(step)
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


@attrs.frozen
class MeteredPlanner:
    """Plans within a budget of the peak as the meter sees it.

    Attributes:
        budget_nbytes: the budget.
        close: whether the plan is promised to be close to its bound, which is worth minutes.
        grads: the state of `.grad` that the step finds.
    """

    budget_nbytes: int
    close: bool = True
    grads: Grads = Grads.NEW

    def for_grads(self, grads: Grads) -> "MeteredPlanner":
        """The planner for a state of `.grad`."""
        return attrs.evolve(self, grads=grads)

    def planning_s(self, plan: Plan) -> float:
        """The seconds that planning took."""
        return float(plan.solver_stats[PLANNING_S])

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph.

        Raises:
            InfeasibleBudget: no schedule was found.
        """
        began_s = time.perf_counter()
        metered, present = without_workspaces(graph), self.grads is Grads.PRESENT
        solve = solve_present if present else solve_switches
        solution = solve(get_solver("auto"), Problem(metered, self.budget_nbytes))
        if solution.schedule is None:
            least = min_present_budget(metered) if present else min_budget(metered)
            raise least.as_error(self.budget_nbytes, metered)
        found = Plan.from_schedule(
            graph,
            solution.schedule,
            budget_nbytes=simulate(graph, solution.schedule, grads=self.grads).peak_nbytes,  # with workspaces
            lower_bound_s=solution.lower_bound_s,
            solver="auto",
            solver_stats={PLANNING_S: time.perf_counter() - began_s},
            grads=self.grads,
        )
        bounded = freed_when_made(metered) if present else metered
        return better_bounded(found, bounded, self.budget_nbytes) if self.close else found


def planned(
    step: Step,
    sample: Tensor,
    budget_nbytes: int,
    cache: Path,
    *,
    close: bool = True,
    gradients: GradientsState = "new",
) -> PlannedModule:
    """Ours.

    Args:
        step: the model and its loss.
        sample: its input.
        budget_nbytes: of the peak as the meter sees it.
        cache: folder of measured costs.
        close: as for `MeteredPlanner`.
        gradients: what its calls find in `.grad`.

    Raises:
        InfeasibleBudget: no schedule was found.
    """
    planner, flops = MeteredPlanner(budget_nbytes, close), get_platform("flops")
    return PlannedModule(step, (sample,), {}, planner, platform=flops, cache_dir=cache, gradients=gradients)


def better_bounded(plan: Plan, graph: Graph, budget_nbytes: int) -> Plan:
    """The plan with a tighter bound, if it is too far from its own."""
    if 100 * (plan.time_s - plan.lower_bound_s) <= MOST_GAP * graph.time_s:
        return plan
    bound_s = tight_bound(graph, budget_nbytes, Deadline(BOUND_S), known_s=plan.time_s)
    return attrs.evolve(plan, lower_bound_s=max(plan.lower_bound_s, bound_s))


def without_workspaces(graph: Graph) -> Graph:
    """The graph as the meter sees it: it counts storages alone, and among them those of kernels in Python."""
    return attrs.evolve(graph, ops=tuple(map(without_scratch, graph.ops)))


def without_scratch(op: Op) -> Op:
    """The op without the workspaces of its own kernels; other ways have chunks, which are storages."""
    ways = {i for other in op.alternatives for i in (other.first, other.again)}
    implementations = tuple(
        each if i in ways else attrs.evolve(each, workspace_nbytes=0)
        for i, each in enumerate(op.implementations)
    )
    return attrs.evolve(op, implementations=implementations)


# ------------------------------------------------------------------------------------------ measuring


@attrs.frozen(kw_only=True, eq=False)
class Numbers:
    """What a step computes."""

    loss: Tensor
    gradients: list[Tensor]
    buffers: list[Tensor]


@attrs.frozen(kw_only=True)
class Row:
    """One method on one model; percentages are of eager's, the model's and bound's of the unplanned step.

    What the meter cannot see, in compiled kernels, is None; `allocated_nbytes` is the allocator's peak there,
    and eager's to compare.

    `loss`, `gradients` and `buffers` say how far they are from eager's: 0 is equal to the bit, otherwise the
    norm of the difference over the norm. `in_double` is the largest of these in double precision, where they
    are more than rounding. `branch`: eager ran as if captured for this comparison. `rounding`: the method may
    round otherwise than eager.
    """

    model: str
    method: str
    budget_nbytes: int | None = None
    gradient_nbytes: int = 0
    peak_nbytes: int | None = None
    accumulating_peak_nbytes: int | None = None
    allocated_nbytes: int | None = None
    flops: int | None = None
    recomputed_pct: float | None = None
    made_nbytes: int | None = None
    made_again_pct: float | None = None
    modelled_pct: float | None = None
    bound_pct: float | None = None
    loss: float | None = None
    gradients: float | None = None
    buffers: float | None = None
    in_double: float | None = None
    branch: bool = False
    rounding: bool = False
    step_ratio: float | None = None
    prepare_s: float | None = None
    note: str = ""

    @property
    def metered_nbytes(self) -> int | None:
        """The larger peak of the two states of `.grad`, if the meter could see it."""
        peaks = [n for n in (self.peak_nbytes, self.accumulating_peak_nbytes) if n is not None]
        return max(peaks, default=None)

    @property
    def trains_exactly(self) -> bool:
        """Whether loss and gradients are eager's; a checkpointed batch norm counts the batch twice."""
        return self.loss == self.gradients == 0.0

    @property
    def exact(self) -> bool:
        """Whether all numbers are eager's."""
        return self.trains_exactly and self.buffers == 0.0

    @property
    def exact_but_for_rounding(self) -> bool:
        """Whether all numbers are as near to eager's as another order of summing leaves them."""
        if all(off <= ROUNDING for off in (self.loss, self.gradients, self.buffers)):  # NaN is not
            return True
        return self.in_double is not None and self.in_double <= DOUBLE_ROUNDING

    def dominated_by(self, other: "Row") -> bool:
        """Whether the other takes no more memory, recomputes no more FLOPs and bytes, and less of one.

        Bytes belong to it: a plan uses the headroom that its budget leaves to keep also what costs no FLOPs.
        """
        fewer_pct = self.recomputed_pct - other.recomputed_pct
        # A plan for steps that find gradients is compared in such.
        theirs = other.metered_nbytes if self.peak_nbytes is not None else other.accumulating_peak_nbytes
        fewer = (self.metered_nbytes - theirs, self.made_nbytes - other.made_nbytes)
        no_worse = min(fewer) >= 0 and fewer_pct > -SAME_PCT
        return no_worse and (max(fewer) > 0 or fewer_pct >= SAME_PCT)


class Bench:
    """One model's table: eager first, then any method against it."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.model, self.rounds = name, MODELS[name], rounds
        self.sample = self.model.sample()
        self.rows: list[Row] = []
        self.eager = Step(self.model)
        self.gradient_nbytes = sum(p.nbytes for p in self.eager.parameters())
        self.references: list[tuple[bool, Numbers]] = []
        if self.model.branches:
            with as_if_captured():
                self.references = [(True, numbers(self.fresh(), self.sample, None))]

    def fresh(self) -> Step:
        """The model with its first weights."""
        return Step(self.model)

    def measure(
        self,
        method: str,
        step: Step,
        call: Call,
        *,
        opaque: bool = False,
        budget_nbytes: int | None = None,
        plan: Plan | None = None,
        prepare_s: float | None = None,
        in_double: Callable[[], float] | None = None,
        present: bool = False,
        rounding: bool = False,
    ) -> Row:
        """Run a method: one step to compare, some to read its memory, a few to time; print its row.

        Args:
            method: its name.
            step: the model that it trains.
            call: what runs the step.
            opaque: its kernels are compiled, and the meter sees nothing of what they hold.
            budget_nbytes: what it may take.
            plan: what it runs.
            prepare_s: the preparation before the first step; None if that step is the preparation.
            in_double: measures the distance from eager in double precision; asked if it is above rounding.
            present: it is for steps that find a `.grad` for every parameter, and only run in such.
            rounding: it may round otherwise than eager.
        """
        if present:
            for parameter in step.parameters():
                parameter.grad = torch.zeros_like(parameter)
        began_s = time.perf_counter()
        first = numbers(step, self.sample, call)
        if prepare_s is None:
            prepare_s = time.perf_counter() - began_s
        is_eager = not self.rows
        if is_eager:
            self.references.insert(0, (False, first))
        branch, *distances = self.compare(first)
        loss, gradients, buffers = distances
        row = Row(
            model=self.name,
            method=method,
            budget_nbytes=budget_nbytes,
            gradient_nbytes=self.gradient_nbytes,
            **({} if opaque else self.metered(step, call, present)),
            allocated_nbytes=self.allocated(step, call) if opaque or is_eager else None,
            modelled_pct=None if plan is None else 100 * plan.overhead,
            bound_pct=None if plan is None else 100 * plan.lower_bound_overhead,
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            in_double=None if in_double is None or all(d <= ROUNDING for d in distances) else in_double(),
            branch=branch,
            rounding=rounding,
            step_ratio=self.ratio(call),
            prepare_s=prepare_s,
        )
        return self.show(row)

    def show(self, row: Row) -> Row:
        """Print a row, keep it."""
        self.rows.append(row)
        print(shown(row), flush=True)
        return row

    def metered(self, step: Step, call: Call, present: bool) -> dict[str, Any]:
        """What the meter reads, in both states of `.grad` or with one there, as fields of a row."""
        if not present:
            step.zero_grad()
        new, accumulating = (self.meter(step, call) for _ in range(2))
        eager = self.rows[0] if self.rows else None
        return {
            "peak_nbytes": None if present else new.peak_nbytes,
            "accumulating_peak_nbytes": accumulating.peak_nbytes,
            "flops": new.flops,
            "recomputed_pct": 100 * (new.flops / eager.flops - 1) if eager else 0.0,
            "made_nbytes": new.made_nbytes,
            "made_again_pct": 100 * (new.made_nbytes / eager.made_nbytes - 1) if eager else 0.0,
        }

    def meter(self, step: Step, call: Call) -> MemoryMeter:
        """One step, its loss held until the backward ends."""
        gc.collect()
        with MemoryMeter(step, self.sample) as meter:
            loss = call(self.sample)
            loss.backward()
        return meter

    def allocated(self, step: Step, call: Call) -> int:
        """The allocator's peak, the larger of both states of `.grad`."""
        step.zero_grad()
        gc.collect()
        device = self.sample.device
        return max(allocator_peak(lambda: call(self.sample).backward(), device).peak_nbytes for _ in range(2))

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
    loss = (step if call is None else call)(sample)
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
    norm = sum(float(b.square().sum()) for _, b in pairs)
    return math.sqrt(off / norm) if norm else math.inf


# ------------------------------------------------------------------------------------------ the tables


def bench(name: str, *, quick: bool, cache: Path) -> list[Row]:
    """One table."""
    run = Bench(name, rounds=3 if quick else 7)
    model = run.model
    print(f"\n{name}: {model.about}; {run.gradient_nbytes / MIB:.1f} MiB of parameters")
    print(HEADER, flush=True)

    step = run.fresh()
    eager = run.measure(EAGER, step, step)
    step = run.fresh()
    blocks = run.measure(PER_BLOCK, step, per_block(model, step))
    step = run.fresh()
    peers = [run.measure("checkpoint per two blocks", step, per_two_blocks(model, step))]
    step = run.fresh()
    peers.append(run.measure("selective checkpoint", step, selective(model, step)))
    for mark, backend in BACKENDS.items():
        for share in (0.5, 0.1) if quick else TORCH_BUDGETS:
            step = run.fresh()
            peers.append(run.measure(f"torch {share}{mark}", step, budgeted(backend, share, model, step)))

    run_rounding(run, cache)

    budgets = {promised << 20: f"remat at {promised} MiB" for promised in model.promises if promised}
    for percent in QUICK_SHARES_PCT if quick else SHARES_PCT:
        budgets[share_of(eager.peak_nbytes, run.gradient_nbytes, percent)] = f"remat at {percent} %"
    budgets[blocks.peak_nbytes] = f"remat as {PER_BLOCK}"
    for row in peers:
        useful = row.recomputed_pct > 0.05 and row.peak_nbytes < eager.peak_nbytes
        if useful and not (quick and model.promises):
            budgets.setdefault(row.peak_nbytes, f"remat as {row.method}")
    least_nbytes, close_nbytes = 0, share_of(eager.peak_nbytes, run.gradient_nbytes, TIGHT_FROM_PCT)
    for budget_nbytes in sorted(budgets, reverse=True):
        method = budgets[budget_nbytes]
        if budget_nbytes < least_nbytes:
            run.show(infeasible_row(run, method, budget_nbytes, least_nbytes))
        elif found_nbytes := run_planned(
            run, method, budget_nbytes, cache, close=budget_nbytes >= close_nbytes
        ):
            least_nbytes = found_nbytes
            run_planned(run, "remat at the least that works", least_nbytes, cache)
    run_present(run, [blocks, *peers], cache)
    if not quick:
        step = run.fresh()
        run.measure(INDUCTOR, step, compiled(step), opaque=True)
        for percent in INDUCTOR_SHARES_PCT:
            budget_nbytes = share_of(eager.allocated_nbytes, run.gradient_nbytes, percent)
            run_by_allocator(run, f"remat at {percent} %, inductor", budget_nbytes, cache, compiled=True)
    return run.rows


def share_of(peak_nbytes: int, gradient_nbytes: int, percent: int) -> int:
    """The budget of so many percent, as everywhere: of what the step holds beyond its gradients."""
    return gradient_nbytes + math.ceil((peak_nbytes - gradient_nbytes) * percent / 100)


def run_rounding(run: Bench, cache: Path) -> None:
    """Torch's head without logits, and ours at the same peaks."""
    model = run.model
    if model.head is None:
        return
    rows = []
    for method, around in (("linear_cross_entropy", False), ("linear_cross_entropy, per block", True)):
        step = run.fresh()
        if around:
            per_block(model, step)
        rows.append(run.measure(method, step, fused_head(model, step), opaque=True, rounding=True))
    for row in rows:
        run_by_allocator(run, f"remat as {row.method}, rounding", row.allocated_nbytes, cache, compiled=False)


def run_present(run: Bench, peers: list[Row], cache: Path) -> None:
    """Rows of ours for steps that find gradients: at the peaks of peers in such, and at the least."""
    eager = run.rows[0]
    budgets = {
        row.accumulating_peak_nbytes: f"remat as {row.method}, .grad"
        for row in reversed(peers)
        if row.recomputed_pct > 0.05 and row.accumulating_peak_nbytes < eager.accumulating_peak_nbytes
    }
    close_nbytes = eager.accumulating_peak_nbytes * TIGHT_FROM_PCT // 100
    for budget_nbytes in sorted(filter(None, budgets), reverse=True):
        close = budget_nbytes >= close_nbytes
        found_nbytes = run_planned(
            run, budgets[budget_nbytes], budget_nbytes, cache, close=close, present=True
        )
        if found_nbytes:
            run_planned(run, "remat at the least that works, .grad", found_nbytes, cache, present=True)
            return


def run_planned(
    run: Bench, method: str, budget_nbytes: int, cache: Path, *, close: bool = False, present: bool = False
) -> int | None:
    """A row of ours; the least budget that works if this one does not."""
    step = run.fresh()
    state: GradientsState = "present" if present else "new"
    try:
        module = planned(step, run.sample, budget_nbytes, cache, close=close, gradients=state)
    except InfeasibleBudget as error:
        run.show(infeasible_row(run, method, budget_nbytes, error.smallest_nbytes))
        return error.smallest_nbytes
    prepare_s = module.plan.solver_stats[PLANNING_S]
    run.measure(
        method,
        step,
        module,
        budget_nbytes=budget_nbytes,
        plan=module.plan,
        prepare_s=prepare_s,
        present=present,
    )
    return None


def run_by_allocator(run: Bench, method: str, budget_nbytes: int, cache: Path, *, compiled: bool) -> None:
    """A row of ours whose budget is of the allocator's peak: by way of Inductor, or with ways that round.

    Planning, compiling and rehearsing are its preparation.
    """
    step = run.fresh()
    options: dict[str, Any] = {"runtime": "inductor"} if compiled else {"ways": "rounding"}
    began_s = time.perf_counter()
    try:
        module = Hiremate(step, run.sample, budget_nbytes, cache_dir=cache, **options)
    except InfeasibleBudget as error:
        run.show(infeasible_row(run, method, budget_nbytes, error.smallest_nbytes))
    except StepOverBudget as error:
        run.show(Row(model=run.name, method=method, budget_nbytes=budget_nbytes, note=str(error)))
    else:
        prepare_s = time.perf_counter() - began_s
        plan, in_double = module.plan, None
        if compiled:  # its plan is made for what Inductor leaves of the budget
            in_double = functools.partial(distance_in_double, run, plan.schedule, cache)
            plan = better_bounded(plan, module.graph, plan.budget_nbytes)
        run.measure(
            method,
            step,
            module,
            opaque=True,
            budget_nbytes=budget_nbytes,
            plan=plan,
            prepare_s=prepare_s,
            in_double=in_double,
            rounding=not compiled,
        )


@attrs.frozen
class Fixed:
    """Plans a schedule that is given, with room for whatever a compiler takes."""

    schedule: Schedule

    def __call__(self, graph: Graph) -> Plan:
        """The schedule's plan."""
        return Plan.from_schedule(
            graph,
            self.schedule,
            budget_nbytes=self.budget_for(graph),
            lower_bound_s=0.0,
            solver="fixed",
        )

    def budget_for(self, graph: Graph) -> int:
        """Four times what it takes."""
        return 4 * simulate(graph, self.schedule).peak_nbytes


def distance_in_double(run: Bench, schedule: Schedule, cache: Path) -> float:
    """How far a schedule's numbers are from eager's in double precision: what is left is no rounding."""
    sample = run.sample.double() if run.sample.is_floating_point() else run.sample
    step = run.fresh().double()
    module = PlannedModule(step, (sample,), {}, Fixed(schedule), runtime="inductor", cache_dir=cache)
    wanted, found = numbers(run.fresh().double(), sample, None), numbers(step, sample, module)
    distances = (
        distance([found.loss], [wanted.loss]),
        distance(found.gradients, wanted.gradients),
        distance(found.buffers, wanted.buffers),
    )
    return max(distances, key=lambda off: (math.isnan(off), off))


def infeasible_row(run: Bench, method: str, budget_nbytes: int, least_nbytes: int) -> Row:
    """A row that says what would work."""
    note = f"infeasible: {least_nbytes / MIB:.2f} MiB is the least that works"
    return Row(model=run.name, method=method, budget_nbytes=budget_nbytes, note=note)


def broken(rows: list[Row]) -> list[str]:
    """The promises that the rows break."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.model, []).append(row)
    return [
        f"{name}: {problem}" for name, table in tables.items() for problem in broken_in(MODELS[name], table)
    ]


def broken_in(model: Model, rows: list[Row]) -> Iterator[str]:
    """The promises that one table breaks."""
    eager = next(row for row in rows if row.method == EAGER)
    ran = [row for row in rows if not row.note]
    peers = [row for row in ran if row.budget_nbytes is None and row.metered_nbytes and row.trains_exactly]
    heads = [row for row in ran if row.budget_nbytes is None and row.rounding]
    ours = [row for row in ran if row.budget_nbytes is not None]
    for row in ours:
        by_meter = row.metered_nbytes is not None
        peak_nbytes = row.metered_nbytes if by_meter else row.allocated_nbytes
        full_nbytes = eager.peak_nbytes if by_meter else eager.allocated_nbytes
        least_nbytes = share_of(full_nbytes, row.gradient_nbytes, TIGHT_FROM_PCT)
        if by_meter and row.peak_nbytes is None:  # in steps that find gradients
            least_nbytes = eager.accumulating_peak_nbytes * TIGHT_FROM_PCT // 100
        if peak_nbytes > row.budget_nbytes:
            yield f"{row.method}: the peak of {peak_nbytes} bytes is above the budget of {row.budget_nbytes}"
        if not (row.exact if by_meter else row.exact_but_for_rounding):
            yield f"{row.method}: the numbers are not eager's"
        gap = row.modelled_pct - row.bound_pct
        if gap > MOST_GAP and row.budget_nbytes >= least_nbytes:
            yield f"{row.method}: the plan is {gap:.2f} points above its bound"
        if by_meter:
            for peer in filter(row.dominated_by, peers):
                yield f"{row.method}: {place(row)} is dominated by {peer.method}, {place(peer)}"
        for head in heads if row.rounding else ():
            if head.allocated_nbytes <= row.allocated_nbytes and head.step_ratio < row.step_ratio:
                yield f"{row.method}: slower than {head.method}, with no less memory"
    blocks = next(row for row in rows if row.method == PER_BLOCK)
    for promised, most in model.promises.items():
        peaks = (blocks.peak_nbytes, blocks.accumulating_peak_nbytes)
        budget = promised << 20 or min(nbytes for nbytes in peaks if nbytes is not None)
        found = next((row for row in ours if row.budget_nbytes == budget), None)
        if found is None:
            yield f"nothing at {budget / MIB:.2f} MiB"
        elif found.recomputed_pct > most + SAME_PCT:
            yield f"{found.recomputed_pct:.2f} % at {budget / MIB:.2f} MiB, promised {most} %"


def place(row: Row) -> str:
    """What it recomputes in what peak."""
    again = f"{row.recomputed_pct:+.2f} % of FLOPs and {row.made_again_pct:+.2f} % of bytes"
    return f"{again} at {row.metered_nbytes / MIB:.2f} MiB"


COLUMNS = (
    ("budget", 8),
    ("peak", 8),
    (".grad there", 12),
    ("allocator", 10),
    ("FLOPs %", 9),
    ("bytes %", 9),
    ("modelled", 9),
    ("bound", 8),
    ("loss", 9),
    ("gradients", 10),
    ("buffers", 9),
    ("double", 8),
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
        _mib(row.allocated_nbytes),
        _fixed(row.recomputed_pct, "+.2f"),
        _fixed(row.made_again_pct, "+.2f"),
        _fixed(row.modelled_pct, "+.2f"),
        _fixed(row.bound_pct, "+.2f"),
        _equal(row.loss, row.branch),
        _equal(row.gradients, row.branch),
        _equal(row.buffers, row.branch),
        _fixed(row.in_double, ".0e"),
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
peak: metered MiB with .grad None, then with .grad there. allocator: the allocator's larger peak of the two,
kernels' scratch included; budgets of rows that say inductor are of eager's peak by this reading. FLOPs %:
recomputed, as counted while running, over eager's. bytes %: the same of the bytes of all storages that
operators made. modelled, bound: what the plan predicts, and below which no schedule gets at that budget.
loss, gradients, buffers: equal to the bit, or how far off (equal*: to eager in the branch that the model
takes when it is captured); a checkpointed batch norm updates its running statistics twice. double: how far
off in double precision, asked of compiled rows that are off by more than rounding. time x: step
time over eager's. prepare s: planning; for rows that say inductor the whole preparation, for the others the
first step, which compiles where there is something to compile."""


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two of torch's budgets, fewer of ours, no inductor, fewer timed steps",
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()

    print(f"torch {torch.__version__} on CPU, {torch.get_num_threads()} threads")
    rows: list[Row] = []
    facts = {"packages": ["torch", "transformers"], "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as cache:
        for name in arguments.models:
            rows += bench(name, quick=arguments.quick, cache=Path(cache))
            if arguments.json:
                record.write(arguments.json, list(map(attrs.asdict, rows)), **facts)
    print(LEGEND)
    problems = broken(rows)
    for problem in problems:
        print(f"broken: {problem}")
    if not problems:
        print("every promise is kept")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
