"""Plans for the ways in which a module is called: made when one is first needed, kept, found again."""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import nn

from remat_executor import torch_private
from remat_executor.buckets import Buckets
from remat_executor.cost_cache import CostCache
from remat_executor.errors import NothingToDifferentiate, UntruePlan, warn
from remat_executor.forks import ForkAwareLock
from remat_executor.garbage import rare_collections
from remat_executor.guards import Signature
from remat_executor.handler import Handlers
from remat_executor.plans import Plans
from remat_executor.rehearsal import within_budget
from remat_executor.runtime.choose import new_runtime
from remat_executor.snapshot import Snapshot
from remat_executor.step import PlannedStep
from remat_executor.stepgraph import Progress, capture_graph
from remat_executor.tensors import Tensors
from remat_graph import Graph, OverBudget, simulate
from remat_graph.plan import Plan
from remat_graph.platform import Platform
from remat_graph.units import format_seconds


class Planner(Protocol):
    """Any function from a graph to a plan on it."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""
        ...


@attrs.define(kw_only=True, eq=False)
class Planning:
    """How a planned module plans, and what it has planned.

    Attributes:
        handlers: for what plans do beside computing.
        device: where plans run.
        steps: the planned steps by how the module was called; `latest` is the one that ran last, for
            `latest_signature`.
        undifferentiable: ways of calling it whose outputs require no gradient.
        lock: held while the module is captured, when it holds stand-ins for its tensors.
        runs: see `PlannedModule`.
        said: what has been said, which is said once.
        in_vain: calls in a row that were captured anew and found the plan they had.
        forward: the module's, as Dynamo leaves it alone; made late, since Dynamo takes seconds to import.
    """

    ENOUGH: ClassVar[int] = 3

    planner: Planner
    platform: Platform | None
    cache: CostCache
    differentiate: tuple[int, ...] | None
    on_progress: Progress | None
    runtime: str
    part_nbytes: int | None
    buckets: Buckets | None
    handlers: Handlers | None
    device: torch.device
    steps: Plans[Signature, PlannedStep]
    undifferentiable: Plans[Signature, bool] = attrs.field(factory=Plans)
    lock: Any = attrs.field(factory=lambda: ForkAwareLock("a module that is planned"))
    runs: Counter[str] = attrs.field(factory=Counter)
    said: set[str] = attrs.field(factory=set)
    in_vain: int = 0
    snapshot: Snapshot | None = None
    latest: Any = None
    latest_signature: Any = None
    forward: Any = None

    def copied(self) -> "Planning":
        """For a copy of the module: the same plans, nothing that it has seen or run."""
        return attrs.evolve(self, snapshot=None, steps=self.steps.copy(), said=set(self.said), runs=Counter())

    def look_at(self, module: nn.Module) -> Snapshot:
        """The module as it is now."""
        snapshot = self.snapshot
        if snapshot is None or not snapshot.holds():
            with self.lock:
                snapshot = self.snapshot = Snapshot.take(module)
        return snapshot

    def seen(self, snapshot: Snapshot, tensors: Tensors) -> Signature:
        """The signature of a call; what moves does not run where it is."""
        return snapshot.signature(tensors, None if self.handlers is None else self.device)

    def step_for(self, module: nn.Module, tensors: Tensors, seen: Signature) -> PlannedStep | None:
        """The step for a call of this kind, or None; the first one is planned, and that is said."""
        step: PlannedStep | None = self.steps.get(seen)
        if step is not None:
            self.in_vain = 0
        elif not self.undifferentiable.get(seen):
            try:
                step = self._plan_anew(module, tensors, seen)
            except NothingToDifferentiate:
                self.undifferentiable[seen] = True
        if step is not None:
            self.latest, self.latest_signature = step, seen
        return step

    def _plan_anew(self, module: nn.Module, tensors: Tensors, seen: Signature) -> PlannedStep:
        with self.lock:
            step: PlannedStep | None = self.steps.get(seen)
            if step is not None:  # by another thread, meanwhile
                return step
            changes = seen.changes(self.latest_signature)
            began_s = time.perf_counter()
            step = self.plan(module, tensors, seen)
            took = format_seconds(time.perf_counter() - began_s)
            self._say_once(
                "replanned",
                f"called in another way ({changes} changed): planning again took {took}",
            )
            self.runs["replanned"] += 1
            self._note_dropped()
            if self.in_vain == self.ENOUGH:
                self._say_once(
                    "in vain",
                    f"each call is captured anew because {changes} changes, and no op depends on it: keep it "
                    "outside of the module",
                )
            return step

    @rare_collections()
    def plan(self, module: nn.Module, tensors: Tensors, seen: Signature) -> PlannedStep:
        """Capture, measure, plan and lower the step of a call; the plan for the same work serves again."""
        if self.handlers is not None:
            # Capture sets flags for the whole process: an optimizer that steps meanwhile, in a lane's thread,
            # takes itself to be compiled, and rounds otherwise.
            self.handlers.wait()
        captured, translation, graph = capture_graph(
            module,
            tensors,
            seen,
            cache=self.cache,
            platform=self.platform,
            differentiate=self.differentiate,
            on_progress=self.on_progress,
            device=self.device,
        )
        if self.handlers is not None:
            graph = self.handlers.extended(graph, tensors)
        same = next((step.plan for step in self.steps if _same_work(step.graph, graph)), None)
        self.in_vain = self.in_vain + 1 if same is not None else 0
        plan = same or self.planner(graph)
        if self.handlers is not None:
            graph = self.handlers.settle(graph, frozenset(plan.on_host), tensors)
            seen = self.seen(self.look_at(module), tensors)  # some of its tensors are elsewhere now

        def build(plan: Plan) -> PlannedStep:
            _believe(graph, plan)
            runtime = new_runtime(self.runtime)
            with torch_private.without_any_autocast():  # as it will run
                return PlannedStep.build(
                    captured, translation, graph, plan, runtime, self.part_nbytes, self.handlers
                )

        step = build(plan)
        if self.runtime != "eager":
            step = within_budget(step, tensors, self.planner, build, self.runtime)
        self.latest = self.steps[seen] = step
        self.latest_signature = seen
        return step

    def count_original(self, reason: str) -> None:
        """Note that the original runs, and why."""
        self.runs["original"] += 1
        if torch.is_grad_enabled():  # otherwise there is nothing to plan, and that is no news
            self._say_once("original", f"the original module runs without a plan: {reason}")

    def original(self) -> contextlib.AbstractContextManager[object]:
        """In it the original can run."""
        return contextlib.nullcontext() if self.handlers is None else self.handlers.original()

    def run_original(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
    ) -> Any:
        """Run it in the place of a plan, and note why."""
        self.count_original(reason)
        with self.original():
            return module(*args, **kwargs)

    def _note_dropped(self) -> None:
        if self.steps.dropped > self.runs["dropped"]:
            self.runs["dropped"] = self.steps.dropped
            self._say_once(
                "dropped",
                f"called in more than {self.steps.most} ways: the plan not used for the longest time is "
                "dropped for each new one; pad lengths with buckets=, or raise max_plans=",
            )

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            warn(message)


def _believe(graph: Graph, plan: Plan) -> None:
    """Take no planner's word: the referee says what the schedule peaks at.

    Raises:
        InvalidSchedule: the schedule cannot be carried out.
        OverBudget: it peaks above the plan's budget, whatever the plan says.
        UntruePlan: its peak is not the one that the plan promises; where an optimizer steps, gradients that
            are there already may take more than is seen here, and the plan promise it.
    """
    peak_nbytes = simulate(graph, plan.schedule).peak_nbytes
    if peak_nbytes > plan.budget_nbytes:
        raise OverBudget(solver=plan.solver, peak_nbytes=peak_nbytes, budget_nbytes=plan.budget_nbytes)
    if peak_nbytes > plan.peak_nbytes or (peak_nbytes < plan.peak_nbytes and not graph.updates):
        raise UntruePlan(solver=plan.solver, promised_nbytes=plan.peak_nbytes, peak_nbytes=peak_nbytes)


def _same_work(one: Graph, other: Graph) -> bool:
    """Whether a plan for one graph is a plan for the other: what changed did not reach it."""
    return (one.values, one.ops, one.conditions) == (other.values, other.ops, other.conditions)
