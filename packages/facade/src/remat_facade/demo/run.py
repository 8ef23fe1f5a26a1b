"""Train one model twice from the same seed, unplanned and within a budget, and compare.

Steps of the two runs alternate, so that other load of the machine affects both alike. The memory meter
measures the first step and the allocator's records the second one, both with ``.grad`` None; later steps are
timed.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor import MemoryMeter, allocator_peak
from remat_executor.translation.dropped_outputs import OutputsState
from remat_facade.demo.tasks import Batch, Task
from remat_facade.entrypoints.rockmate import Hiremate
from remat_facade.planning.known_plans import PLANNING_S
from remat_facade.planning.planner import Progress, silent
from remat_facade.report import picture
from remat_facade.report.html import page
from remat_facade.report.table import Table, repeats_table
from remat_graph import Graph, Plan, format_nbytes, format_seconds, save_graph, save_plan
from remat_graph.serialization.outputs import save_to, write_whole
from remat_solvers.facts import plan_facts

SEED = 0
METERED, RECORDED, TIMED = 0, 1, 3
"""The steps that the meter and the allocator measure, and the first step that is timed."""


@attrs.define
class TrainingRun:
    """One of the two runs: the model, its random state, and the measurements."""

    model: nn.Module  # the model that trains
    task: Task  # the task
    batches: Iterator[Batch]  # the batches of the task
    losses: list[float] = attrs.field(factory=list)  # the loss of each step
    times_s: list[float] = attrs.field(factory=list)  # the times of the timed steps
    meter_nbytes: int = 0  # peak of the tensors of one step
    allocator_nbytes: int = 0  # peak of the allocator in one step, including workspaces of kernels
    _optimizer: torch.optim.Optimizer = attrs.field(init=False)
    _random: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.task.learning_rate)
        self._random = torch.Generator().manual_seed(SEED).get_state()

    def step(self) -> None:
        """Train one step, with the random state after the previous step of this run."""
        batch = next(self.batches)
        torch.set_rng_state(self._random)
        began_s = time.perf_counter()
        index = len(self.losses)
        if index == METERED:
            with MemoryMeter() as meter:
                loss = self._forward_backward(batch)
            self.meter_nbytes = meter.peak_nbytes
        elif index == RECORDED:
            record = allocator_peak(lambda: self._forward_backward(batch))
            self.allocator_nbytes, loss = record.peak_nbytes, record.result
        else:
            loss = self._forward_backward(batch)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if index >= TIMED:
            self.times_s.append(time.perf_counter() - began_s)
        self.losses.append(loss)
        self._random = torch.get_rng_state()

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return statistics.median(self.times_s)

    @property
    def facts(self) -> dict[str, Any]:
        """The measurements, for JSON."""
        names = ("meter_nbytes", "allocator_nbytes", "step_s", "losses")
        return {name: getattr(self, name) for name in names}

    def _forward_backward(self, batch: Batch) -> float:
        loss = self.task.loss(self.model(**batch))
        loss.backward()
        return float(loss.detach())


@attrs.frozen(kw_only=True)
class Demo:
    """The result of the demo."""

    unplanned: TrainingRun  # the run without a plan
    planned: TrainingRun  # the run within the budget
    plan: Plan  # the plan of the planned run
    graph: Graph  # the graph of the plan
    built_s: float  # seconds to capture, measure and plan
    same_weights: bool  # whether all parameters and buffers are bit-identical at the end
    fell_through: int  # number of steps of the planned run without a plan
    written: tuple[Path, ...] = ()  # the files

    @property
    def problems(self) -> tuple[str, ...]:
        """Violated promises, one line each."""
        found = []
        budget = self.plan.budget_nbytes
        for reading, nbytes in (
            ("the meter", self.planned.meter_nbytes),
            ("the allocator", self.planned.allocator_nbytes),
        ):
            if nbytes > budget:
                found.append(f"{reading} read {nbytes} bytes, {nbytes - budget} above the budget of {budget}")
        differing = [i for i, (a, b) in enumerate(self._losses) if a != b]
        if differing:
            found.append(f"the losses differ from step {differing[0] + 1} on")
        if not self.same_weights:
            found.append("the trained weights differ")
        if self.fell_through:
            found.append(f"{self.fell_through} steps ran without a plan")
        return tuple(found)

    @property
    def _losses(self) -> list[tuple[float, float]]:
        return list(zip(self.unplanned.losses, self.planned.losses, strict=True))

    @property
    def facts(self) -> dict[str, Any]:
        """What the tables show, for JSON."""
        return {
            "task": self.unplanned.task.about,
            "plan": plan_facts(self.plan),
            "unplanned": self.unplanned.facts,
            "planned": self.planned.facts,
            "built_s": self.built_s,
            "same_weights": self.same_weights,
            "holds": not self.problems,
            "problems": self.problems,
        }

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables to show."""
        if len(self.plan.schedule.order) == len(self.graph.ops):
            return self.comparison, self.losses
        return self.comparison, self.losses, repeats_table(self.graph, self.plan)

    @property
    def comparison(self) -> Table:
        """Memory, time and planning of both runs."""
        one, two, plan = self.unplanned, self.planned, self.plan
        time_one, time_two = one.step_s, two.step_s
        planned_time = f"{format_seconds(time_two)} ({time_two / time_one - 1:+z.0%})"
        ops = len(self.graph.ops)
        repeats = len(plan.schedule.order) - ops
        solving_s = float(plan.solver_stats.get(PLANNING_S, 0.0))
        rows = (
            ("budget", "", format_nbytes(plan.budget_nbytes)),
            ("peak, meter", *_against(one.meter_nbytes, two.meter_nbytes)),
            ("  predicted", "", format_nbytes(plan.live_peak_nbytes)),
            ("peak, allocator", *_against(one.allocator_nbytes, two.allocator_nbytes)),
            ("  predicted", "", format_nbytes(plan.peak_nbytes)),
            ("step time, median", format_seconds(time_one), planned_time),
            (
                "recomputed",
                "",
                f"{repeats} runs in a step of {ops} ops, {plan.recomputed_overhead:+z.1%} predicted",
            ),
            ("lower bound", "", f"{plan.lower_bound_overhead:+z.1%}"),
            ("losses", "", "identical" if all(a == b for a, b in self._losses) else "DIFFERENT"),
            ("weights at the end", "", "identical" if self.same_weights else "DIFFERENT"),
            ("time to plan", "", f"{format_seconds(self.built_s)}, solver {format_seconds(solving_s)}"),
        )
        note = (
            f"a percentage is of the part of the unplanned peak ({format_nbytes(plan.noremat_peak_nbytes)}) "
            f"beyond the gradients ({format_nbytes(plan.gradient_nbytes)})"
        )
        return Table(title=one.task.about, columns=("", "unplanned", "planned"), rows=rows, note=note)

    @property
    def losses(self) -> Table:
        """The loss of each step in both runs; identical means bit-identical."""
        rows = tuple(
            (f"{i}", f"{a:.6f}", f"{b:.6f}", "yes" if a == b else "NO")
            for i, (a, b) in enumerate(self._losses, 1)
        )
        return Table(title="loss", columns=("step", "unplanned", "planned", "identical"), rows=rows)


def run_demo(
    task: Task,
    budget: int | str,
    *,
    steps: int,
    out: Path,
    outputs: OutputsState = "kept",
    on_progress: Progress = silent,
) -> Demo:
    """Train twice, compare, and write the report.

    Args:
        task: the model and data.
        budget: as for `Rockmate`.
        steps: training steps, at least 4.
        outputs: as for `Rockmate`; the steps hold only the loss when the backward begins.
        out: folder for ``memory.png``, ``report.html``, ``plan.json`` and ``graph.json``.
        on_progress: called with a short description when a stage begins.

    Raises:
        InfeasibleBudget: no schedule fits the budget.
    """
    on_progress(f"building {task.name}")
    unplanned = TrainingRun(_seeded(task.build), task, task.batches(SEED))
    began_s = time.perf_counter()
    module = Hiremate(
        _seeded(task.build),
        next(task.batches(SEED)),
        budget,
        seed=SEED,
        outputs=outputs,
        on_progress=on_progress,
    )
    built_s = time.perf_counter() - began_s
    planned = TrainingRun(module, task, task.batches(SEED))
    for index in range(max(steps, TIMED + 1)):
        for training, what in ((unplanned, "unplanned"), (planned, f"in {budget}")):
            on_progress(f"step {index + 1} of {steps}, {what}")
            training.step()
    demo = Demo(
        unplanned=unplanned,
        planned=planned,
        plan=module.plan,
        graph=module.graph,
        built_s=built_s,
        same_weights=_same_weights(unplanned.model, module),
        fell_through=module.runs["original"] + module.runs["replanned"],
    )
    on_progress("drawing")
    return attrs.evolve(demo, written=_write(demo, out))


def _write(demo: Demo, out: Path) -> tuple[Path, ...]:
    figure = picture.draw(demo.graph, demo.plan)
    return (
        write_whole(out / "memory.png", picture.png(figure)),
        write_whole(out / "report.html", page(demo.graph, demo.plan, (demo.comparison, demo.losses))),
        save_to(out / "plan.json", lambda path: save_plan(demo.plan, path)),
        save_to(out / "graph.json", lambda path: save_graph(demo.graph, path)),
    )


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build()


def _same_weights(one: nn.Module, two: nn.Module) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _against(unplanned: int, planned: int) -> tuple[str, str]:
    return format_nbytes(unplanned), f"{format_nbytes(planned)} ({planned / max(unplanned, 1):.0%})"
