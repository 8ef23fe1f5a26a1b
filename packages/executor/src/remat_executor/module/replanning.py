"""Plans for each way a module is called: made at the first such call, kept, and found again."""

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import nn

from remat_executor.autograd.gradient_delivery import PlannedCall
from remat_executor.capture.captured import Captured
from remat_executor.capture.number_inputs import NumberIsRead
from remat_executor.errors import NothingToDifferentiate, warn
from remat_executor.fork_lock import ForkAwareLock
from remat_executor.guards.differences import Difference, differences, way_out
from remat_executor.guards.external_state import state_key
from remat_executor.guards.signature import Signature
from remat_executor.guards.snapshot import Snapshot
from remat_executor.inspection.read_recorder import ReadRecorder
from remat_executor.inspection.reads import EVERYTHING, Reads
from remat_executor.inspection.replaced_forwards import is_made_by, replacing_packages
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.step_handler import OffloadBackend
from remat_executor.module import notices
from remat_executor.module.buckets import Buckets
from remat_executor.module.changing_numbers import ChangingNumbers, check_same_operators
from remat_executor.module.forward_binding import ForwardBinding
from remat_executor.module.forward_descriptor import ForwardTarget
from remat_executor.module.gc_pause import raised_gc_threshold
from remat_executor.module.gradient_states import GradientStates
from remat_executor.module.pipeline import CallToPlan, PipelineStages, PlanFunction, planned_step
from remat_executor.module.plan_cache import LRUCache
from remat_executor.module.planned_step import PlannedStep
from remat_executor.module.shared_captures import kind_of
from remat_executor.module.training_watch import TrainingWatch
from remat_executor.torch_private.dynamo import under_dynamo
from remat_graph import Graph, Plan, Platform


@attrs.define(kw_only=True, eq=False)
class PlanManager:
    """The plans of one planned module, and how new ones are made.

    Attributes:
        binding: the module that is planned, and which of its forwards is called.
        planner: from a graph to a plan.
        stages: the other stages of the pipeline.
        platform: gives the times instead of the clock; None: times are measured.
        buckets: pads inputs to a few lengths.
        steps: the planned steps by signature; `latest` is the one that ran last, for `latest_signature`.
        undifferentiable: signatures of calls whose outputs require no gradient.
        lock: held during capture, when the module holds fake tensors.
        runs: see `PlannedModule`.
        warned: kinds of warnings that were given; each is given once.
        reference_spec: output structure of the first captured step whose output is the module's own.
        last_call: a weak reference to the call that began last.
        clock: gives the seconds that replanning took.
        unneeded_captures: consecutive captures that found an existing plan for the same work.
        uncapturable: why an assigned forward cannot be captured, by its key: it runs unplanned, and the
            forwards that it calls run planned.
        reads: the attributes that any of the captures read; only these are guarded.
        numbers: which numbers among the arguments are inputs of the plans.
        gradients: chooses a step's plan by the gradients that a call finds.
        watch: whether training steps the parameters without a call.
    """

    MOST_UNNEEDED_CAPTURES: ClassVar[int] = 3

    binding: ForwardBinding
    planner: PlanFunction
    stages: PipelineStages
    platform: Platform | None
    buckets: Buckets | None
    steps: LRUCache[Signature, PlannedStep]
    gradients: GradientStates
    undifferentiable: LRUCache[Signature, bool] = attrs.field(factory=LRUCache)
    lock: Any = attrs.field(factory=lambda: ForkAwareLock("a module that is planned"))
    runs: Counter[str] = attrs.field(factory=Counter)
    warned: set[str] = attrs.field(factory=set)
    clock: Callable[[], float] = time.perf_counter
    unneeded_captures: int = 0
    snapshot: Snapshot | None = None
    latest: Any = None
    latest_signature: Any = None
    last_call: Any = None
    reference_spec: Any = None
    uncapturable: LRUCache[Any, str] = attrs.field(factory=LRUCache)
    reads: Reads = EVERYTHING
    numbers: ChangingNumbers = attrs.field(factory=ChangingNumbers)
    watch: TrainingWatch | None = None

    def copied(self, original: nn.Module) -> "PlanManager":
        """The manager of a copied module: the same plans, without a record of calls."""
        return attrs.evolve(
            self,
            binding=self.binding.copied(original),
            snapshot=None,
            # An assigned forward may refer to the module that is copied; its step is not the copy's.
            steps=self.steps.copy(lambda signature: signature.forward is None),
            undifferentiable=LRUCache(),
            uncapturable=LRUCache(),
            warned=set(self.warned),
            runs=Counter(),
            last_call=None,
            numbers=self.numbers.copied(),
            watch=None,
        )

    @property
    def original(self) -> nn.Module:
        """The module that is planned."""
        return self.binding.original

    @property
    def backend(self) -> OffloadBackend | None:
        """Carries out what plans do in addition to computing."""
        return self.stages.backend

    # -- plans

    def current_snapshot(self, target: ForwardTarget) -> Snapshot:
        """The module's present state, and what a forward called in its place can read."""
        snapshot = self.snapshot
        known = snapshot is not None and snapshot.target is target and snapshot.own.reads is self.reads
        if snapshot is None or not known or not snapshot.is_current():
            with self.lock:
                snapshot = self.snapshot = Snapshot.take(self.original, target, self.reads)
        return snapshot

    def signature(
        self,
        snapshot: Snapshot,
        tensors: Tensors,
        target: ForwardTarget = None,
        reads: Reads | None = None,
    ) -> Signature:
        """The signature of a call; with offloading it runs on the plan's device, wherever its tensors are.

        Args:
            snapshot: the module's present state.
            tensors: the module's and the call's.
            target: what the call runs.
            reads: which attributes count; None: those that the latest step depends on.
        """
        if reads is None and self.latest_signature is not None:
            reads = self.latest_signature.own.reads
        found = snapshot.signature(tensors, None if self.backend is None else self.stages.device, reads)
        if target is self.original.__dict__.get("forward"):  # an attribute like others
            return found
        return attrs.evolve(found, forward=(target is None, state_key(target)))

    def step_for(
        self, tensors: Tensors, signature: Signature, target: ForwardTarget
    ) -> tuple[PlannedStep | None, Tensors]:
        """The step for a call, planned if it is new, and the call's tensors as it takes them.

        The step is None if the call returns nothing to differentiate.
        """
        step: PlannedStep | None = self.steps.get(signature)
        if step is None:
            signature = self._known(signature, target)
            step = self.steps.get(signature)
        if step is not None:
            self.unneeded_captures = 0
        elif not self.undifferentiable.get(signature):
            with contextlib.suppress(NothingToDifferentiate):
                step, tensors, signature = self._replan(tensors, signature, target)
        if step is not None:
            step = self.gradients.step_for(step, tensors)
            self.latest, self.latest_signature = step, signature
        return step, tensors

    def _known(self, signature: Signature, target: ForwardTarget) -> Signature:
        """The signature, or another one of the same call for which there is a step.

        Steps depend on different attributes if their captures took different branches.
        """
        if signature in self.steps or signature in self.undifferentiable:
            return signature
        snapshot = self.current_snapshot(target)
        known = (*self.steps.keys(), *self.undifferentiable.keys())
        for reads in dict.fromkeys(each.own.reads for each in known):
            other = attrs.evolve(signature, own=snapshot.own_for(reads))
            if other in self.steps or other in self.undifferentiable:
                return other
        return signature

    def _replan(
        self, tensors: Tensors, signature: Signature, target: ForwardTarget
    ) -> tuple[PlannedStep, Tensors, Signature]:
        with self.lock:
            step: PlannedStep | None = self.steps.get(signature)
            if step is not None:  # another thread has planned it meanwhile
                return step, tensors, signature
            before, began_s = self.latest_signature, self.clock()
            changed = differences(before, signature, tensors.labels)
            as_inputs = self._plan_with_numbers(tensors, signature, target)
            if as_inputs is None:
                tensors = self.numbers.as_constants(tensors)
                signature = self.signature(self.current_snapshot(target), tensors, target)
                step = self.steps.get(signature) or self.plan(tensors, signature, target)
            else:
                step, tensors, signature = as_inputs
            self.runs["replanned"] += 1
            advice = way_out(changed) if as_inputs is None else notices.NUMBERS_ARE_INPUTS
            self._warn_replanned(changed, self.clock() - began_s, advice)
            self._warn_dropped()
            return step, tensors, signature

    def _plan_with_numbers(
        self, tensors: Tensors, signature: Signature, target: ForwardTarget
    ) -> tuple[PlannedStep, Tensors, Signature] | None:
        """Plan a call with numbers as inputs: those that are, and those that changed; None if none can be."""
        candidates = self.numbers.candidates(self.latest_signature, signature, tensors)
        if self.stages.runtime == "cudagraph":  # a recorded graph would repeat its numbers
            return None
        if not candidates and not tensors.numbers:
            return None
        with_inputs = self.numbers.as_inputs(tensors, candidates)
        constant: Captured = self.latest.captured

        def check(captured: Captured) -> None:
            if candidates:
                check_same_operators(captured, with_inputs, constant)

        new = self.signature(self.current_snapshot(target), with_inputs, target)
        try:
            step = self.steps.get(new) or self.plan(with_inputs, new, target, check)
        except NumberIsRead:
            self.numbers.refuse(with_inputs)
            return None
        return step, with_inputs, new

    @raised_gc_threshold()
    def plan(
        self,
        tensors: Tensors,
        signature: Signature,
        target: ForwardTarget,
        on_captured: Callable[[Captured], None] = lambda captured: None,
    ) -> PlannedStep:
        """Capture, measure, plan and lower the step of a call; a plan for the same work is reused."""
        if self.backend is not None:
            # Capture sets process-wide flags: an optimizer that steps in another thread meanwhile would
            # behave as if it were compiled, and round differently.
            self.backend.wait()
        before = self.current_snapshot(target)

        standard_spec: Any = None

        def is_standard(output: Any, spec: Any) -> bool:
            nonlocal standard_spec
            if is_made_by(output, replacing_packages(self.original, target)):
                return False
            standard_spec = spec
            return target == self.binding.first or self.reference_spec in (None, spec)

        def on_measured(captured: Captured) -> None:
            if self.reference_spec is None:
                self.reference_spec = standard_spec
            self._warn_external_state(before)

        recorder, captures = ReadRecorder(), self.stages.captures
        kind = self._kind(tensors, target)
        call = CallToPlan(
            model=self.original,
            tensors=tensors,
            conditions=signature.conditions(),
            forward=self.binding.traced(target),
            is_standard=is_standard,
            on_captured=on_captured,
            on_measured=on_measured,
            recorder=recorder,
            sharing=None if captures is None else captures.of(kind),
        )
        try:
            step = planned_step(self.stages, call, self._reuse_or_plan)
        except NothingToDifferentiate:
            self.undifferentiable[self._guarded(signature, target, recorder.reads)] = True
            raise
        self._warn_once("fragments", notices.fragments(step.fragments_nbytes, step.rehearsed_nbytes))
        if self.backend is not None:
            # The backend may have moved some of the module's tensors.
            signature = self.signature(self.current_snapshot(target), tensors, target)
        step.captured.changes.fill_defaults()
        signature = self._guarded(signature, target, recorder.reads)
        self.latest = self.steps[signature] = step
        self.latest_signature = signature
        if captures is not None:
            captures.keep(self._kind(tensors, target), call.sharing, kind)
        return step

    def _kind(self, tensors: Tensors, target: ForwardTarget) -> Any:
        """What a call shares with those of other sizes: the module's state as far as any capture read it."""
        if self.stages.captures is None:
            return None
        return kind_of(self.signature(self.current_snapshot(target), tensors, target, self.reads), tensors)

    def _guarded(self, signature: Signature, target: ForwardTarget, reads: Reads) -> Signature:
        """The signature of a captured call, with the attributes that its capture read.

        The module is read again: a forward may have changed its external state during the capture, and each
        later call would find it changed.
        """
        known = [each.own.reads for each in (*self.steps.keys(), *self.undifferentiable.keys())]
        self.reads = functools.reduce(Reads.merged, known, reads)
        return attrs.evolve(signature, own=self.current_snapshot(target).own_for(reads))

    def _reuse_or_plan(self, graph: Graph) -> Plan:
        same = next((step.plan for step in self.steps if step.is_for(graph)), None)
        self.unneeded_captures = self.unneeded_captures + 1 if same is not None else 0
        return same or self.stages.with_slack(graph, self.planner(graph))

    # -- calls

    def begin_call(self, call: PlannedCall) -> None:
        """Record a call; warn once if the previous one is still pending."""
        last = None if self.last_call is None else self.last_call()
        if last is not None and last.saved is not None:
            self._warn_once("pending calls", notices.PENDING_CALLS)
        self.last_call = weakref.ref(call)
        call.on_kept = lambda nbytes: self._warn_once("kept outputs", notices.kept_outputs(nbytes))
        # Checked at calls 1, 2, 4, 8, ...: a walk up the stack costs some microseconds.
        count = self.runs["planned"]
        if not count & (count - 1) and "compiled" not in self.warned and under_dynamo():
            self.warn_compiled()

    def count_original(self, reason: str) -> None:
        """Record that the original runs, and why."""
        self.runs["original"] += 1
        if torch.is_grad_enabled():  # otherwise there is nothing to plan, as a user expects
            self._warn_once("original", f"the original module runs without a plan: {reason}")

    def original_context(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the original can run."""
        return contextlib.nullcontext() if self.backend is None else self.backend.original_context()

    def run_original(
        self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
    ) -> Any:
        """Run the original instead of a plan, and record why."""
        self.count_original(reason)
        with self.original_context(), self.binding.running():
            return self.binding.resolved(target)(*args, **kwargs)

    def run_uncapturable(
        self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
    ) -> Any:
        """Run an assigned forward that cannot be captured; the forwards that it calls are planned."""
        before = self.runs["planned"], self.runs["original"]
        result = self.binding.resolved(target)(*args, **kwargs)
        if before == (self.runs["planned"], self.runs["original"]):
            self.count_original(f"what was assigned to its forward cannot be captured ({reason})")
        else:
            self._warn_once(
                "uncapturable",
                f"what was assigned to its forward lies outside of the plan and the budget ({reason})",
            )
        return result

    # -- warnings

    def _warn_external_state(self, before: Snapshot) -> None:
        """Warn of external state that the forward reads or changes."""
        for kind, message in notices.external_state(before, self.current_snapshot(before.target)):
            self._warn_once(kind, message)

    def _warn_replanned(self, found: list[Difference], took_s: float, advice: str) -> None:
        """Report what made a call new, once for each kind, with the cost and what to do."""
        self._warn_once(
            f"replanned for {', '.join(each.kind for each in found)}",
            notices.replanned(found, took_s, advice),
        )
        if self.unneeded_captures == self.MOST_UNNEEDED_CAPTURES:
            self._warn_once("unneeded captures", notices.unneeded_captures(found))

    def warn_uncalled(self, parts: list[str]) -> None:
        """Warn that training did not call the planned module."""
        kind = type(self.original).__name__
        self._warn_once("uncalled", f"a planned {kind} {notices.uncalled(parts, original=True)}")

    def warn_compiled(self) -> None:
        """Warn that compiling the planned module has no effect."""
        self._warn_once("compiled", notices.COMPILED)

    def _warn_dropped(self) -> None:
        if self.steps.dropped > self.runs["dropped"]:
            self.runs["dropped"] = self.steps.dropped
            self._warn_once("dropped", notices.dropped_plans(self.steps.most))

    def _warn_once(self, kind: str, message: str | None) -> None:
        if message is not None and kind not in self.warned:
            self.warned.add(kind)
            warn(message)
