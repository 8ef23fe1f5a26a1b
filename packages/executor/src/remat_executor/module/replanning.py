"""Plans for the ways in which a module is called: made when one is first needed, kept, found again."""

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from remat_executor.autograd.chain import Call
from remat_executor.capture.captured import Captured
from remat_executor.errors import NothingToDifferentiate, warn
from remat_executor.fork_lock import ForkAwareLock
from remat_executor.guards.external_state import state_key
from remat_executor.guards.signature import Signature
from remat_executor.guards.snapshot import Snapshot
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.step_handler import Handlers
from remat_executor.module.buckets import Buckets
from remat_executor.module.forward_binding import ForwardBinding
from remat_executor.module.forward_descriptor import Called
from remat_executor.module.gc_pause import rare_collections
from remat_executor.module.pipeline import CallToPlan, Planner, Stages, planned_step
from remat_executor.module.plan_cache import Plans
from remat_executor.module.planned_step import PlannedStep
from remat_executor.torch_private.dynamo import under_dynamo
from remat_graph import Graph
from remat_graph.plan import Plan
from remat_graph.platforms.base import Platform
from remat_graph.units import format_seconds


@attrs.define(kw_only=True, eq=False)
class Planning:
    """How a planned module plans, and what it has planned.

    Attributes:
        binding: the module that is planned, and which of its forwards is called.
        planner: from a graph to a plan.
        stages: what else is needed on the way from a call to a planned step.
        platform: gives the times instead of the clock, if it does.
        buckets: pads inputs to a few lengths.
        steps: the planned steps by how the module was called; `latest` is the one that ran last, for
            `latest_signature`.
        undifferentiable: ways of calling it whose outputs require no gradient.
        lock: held while the module is captured, when it holds stand-ins for its tensors.
        runs: see `PlannedModule`.
        said: what has been said, which is said once.
        usual: structure of what the first captured step returned.
        last_call: a weak reference to the call that began last.
        clock: tells the seconds that planning again took.
        in_vain: calls in a row that were captured anew and found the plan they had.
        outside: what was assigned and cannot be captured, by its key, and why: it runs as it is, around
            planned calls.
    """

    ENOUGH: ClassVar[int] = 3

    binding: ForwardBinding
    planner: Planner
    stages: Stages
    platform: Platform | None
    buckets: Buckets | None
    steps: Plans[Signature, PlannedStep]
    undifferentiable: Plans[Signature, bool] = attrs.field(factory=Plans)
    lock: Any = attrs.field(factory=lambda: ForkAwareLock("a module that is planned"))
    runs: Counter[str] = attrs.field(factory=Counter)
    said: set[str] = attrs.field(factory=set)
    clock: Callable[[], float] = time.perf_counter
    in_vain: int = 0
    snapshot: Snapshot | None = None
    latest: Any = None
    latest_signature: Any = None
    last_call: Any = None
    usual: Any = None
    outside: Plans[Any, str] = attrs.field(factory=Plans)

    def copied(self, original: nn.Module) -> "Planning":
        """For a copy of the module: the same plans, nothing that it has seen or run."""
        return attrs.evolve(
            self,
            binding=self.binding.copied(original),
            snapshot=None,
            # What was assigned may mean the module that is copied, whose step is not the copy's.
            steps=self.steps.copy(lambda seen: seen.forward is None),
            undifferentiable=Plans(),
            outside=Plans(),
            said=set(self.said),
            runs=Counter(),
            last_call=None,
        )

    @property
    def original(self) -> nn.Module:
        """The module that is planned."""
        return self.binding.original

    @property
    def handlers(self) -> Handlers | None:
        """For what plans do beside computing."""
        return self.stages.handlers

    # -- plans

    def look_at(self, called: Called) -> Snapshot:
        """The module as it is now, and what a forward that stands in its place can read."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.called is not called or not snapshot.holds():
            with self.lock:
                snapshot = self.snapshot = Snapshot.take(self.original, called)
        return snapshot

    def seen(self, snapshot: Snapshot, tensors: Tensors, called: Called = None) -> Signature:
        """The signature of a call; what moves does not run where it is."""
        found = snapshot.signature(tensors, None if self.handlers is None else self.stages.device)
        if called is self.original.__dict__.get("forward"):  # an attribute like others
            return found
        return attrs.evolve(found, forward=(called is None, state_key(called)))

    def step_for(self, tensors: Tensors, seen: Signature, called: Called) -> PlannedStep | None:
        """The step for a call of this kind, or None; the first one is planned, and that is said."""
        step: PlannedStep | None = self.steps.get(seen)
        if step is not None:
            self.in_vain = 0
        elif not self.undifferentiable.get(seen):
            try:
                step = self._plan_anew(tensors, seen, called)
            except NothingToDifferentiate:
                self.undifferentiable[seen] = True
        if step is not None:
            self.latest, self.latest_signature = step, seen
        return step

    def _plan_anew(self, tensors: Tensors, seen: Signature, called: Called) -> PlannedStep:
        with self.lock:
            step: PlannedStep | None = self.steps.get(seen)
            if step is not None:  # by another thread, meanwhile
                return step
            changes = seen.changes(self.latest_signature)
            began_s = self.clock()
            step = self.plan(tensors, seen, called)
            took = format_seconds(self.clock() - began_s)
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
    def plan(self, tensors: Tensors, seen: Signature, called: Called) -> PlannedStep:
        """Capture, measure, plan and lower the step of a call; the plan for the same work serves again."""
        if self.handlers is not None:
            # Capture sets flags for the whole process: an optimizer that steps meanwhile, in a lane's thread,
            # takes itself to be compiled, and rounds otherwise.
            self.handlers.wait()
        before = self.look_at(called)

        def on_measured(captured: Captured) -> None:
            nonlocal seen
            if self.usual is None:
                self.usual = captured.out_spec
            if self._tell_surroundings(before):
                seen = attrs.evolve(seen, own=self.look_at(called).own)  # or each call would find it changed

        call = CallToPlan(
            model=self.original,
            tensors=tensors,
            conditions=seen.conditions(),
            forward=self.binding.traced(called),
            usual=None if called == self.binding.first else self.usual,
            on_measured=on_measured,
        )
        step = planned_step(self.stages, call, self._known_or_new)
        if self.handlers is not None:
            seen = self.seen(self.look_at(called), tensors, called)  # some of its tensors are elsewhere now
        self.latest = self.steps[seen] = step
        self.latest_signature = seen
        return step

    def _known_or_new(self, graph: Graph) -> Plan:
        """The plan for the same work, if there is one, or a new one."""
        same = next((step.plan for step in self.steps if _same_work(step.graph, graph)), None)
        self.in_vain = self.in_vain + 1 if same is not None else 0
        return same or self.planner(graph)

    def begins(self, call: Call) -> None:
        """Note a call; say once that the one before it is in flight still."""
        last = None if self.last_call is None else self.last_call()
        if last is not None and last.saved is not None:
            self._say_once(
                "in flight",
                "called again before the backward of the call before, which is held as well: each call in "
                "flight takes a budget of its own; call backward first, or give that much less as budget",
            )
        self.last_call = weakref.ref(call)
        # Asked ever more rarely: a walk up the stack costs some microseconds.
        count = self.runs["planned"]
        if not count & (count - 1) and "compiled" not in self.said and under_dynamo():
            self.say_compiled()

    def count_original(self, reason: str) -> None:
        """Note that the original runs, and why."""
        self.runs["original"] += 1
        if torch.is_grad_enabled():  # otherwise there is nothing to plan, and that is no news
            self._say_once("original", f"the original module runs without a plan: {reason}")

    def original_runs(self) -> contextlib.AbstractContextManager[object]:
        """In it the original can run."""
        return contextlib.nullcontext() if self.handlers is None else self.handlers.original()

    def run_original(
        self, called: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
    ) -> Any:
        """Run it in the place of a plan, and note why."""
        self.count_original(reason)
        with self.original_runs(), self.binding.running():
            return self.binding.resolved(called)(*args, **kwargs)

    def run_outside(self, called: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str) -> Any:
        """Run what was assigned and cannot be captured: the forwards that it calls are planned."""
        before = self.runs["planned"], self.runs["original"]
        result = self.binding.resolved(called)(*args, **kwargs)
        if before == (self.runs["planned"], self.runs["original"]):
            self.count_original(f"what was assigned to its forward cannot be captured ({why})")
        else:
            self._say_once(
                "outside",
                f"what was assigned to its forward lies outside of the plan and the budget ({why})",
            )
        return result

    def _tell_surroundings(self, before: Snapshot) -> bool:
        """Say what a forward reads or changes outside of its module that a plan does not.

        Args:
            before: the module when its capture began.

        Returns:
            whether the capture changed it.
        """
        if before.clocks:
            self._say_once(
                "clock",
                f"the forward reads the clock ({', '.join(before.clocks)}): a planned module keeps what it "
                "read when it was planned; pass the time as an argument",
            )
        now = self.look_at(before.called).own.external_state
        changed = {label for label, _ in {*before.own.external_state} ^ {*now}}
        if changed:
            self._say_once(
                "globals",
                f"the forward changes {', '.join(sorted(changed)[:3])} outside of its module: a planned "
                "module does not do that",
            )
        return bool(changed)

    def say_compiled(self) -> None:
        """Tell whoever compiles the planned module that it changes nothing."""
        self._say_once(
            "compiled",
            "torch.compile changes nothing of a planned module, whose plan runs as it is: give "
            'runtime="inductor" to compile the plan',
        )

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


def _same_work(one: Graph, other: Graph) -> bool:
    """Whether a plan for one graph is a plan for the other: what changed did not reach it."""
    return (one.values, one.ops, one.conditions) == (other.values, other.ops, other.conditions)
