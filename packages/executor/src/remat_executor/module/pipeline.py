"""The pipeline from a call to a planned step: capture, translate, annotate, plan, place, lower.

`planned_step` is the whole of it in one function; `PipelineStages` carries the stages out.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from remat_executor.capture.any_size import AnySize, capture_any_size
from remat_executor.capture.captured import Captured
from remat_executor.capture.filled_defaults import check_filled_defaults
from remat_executor.capture.joint_graph import capture, raise_as_original
from remat_executor.capture.number_inputs import numbers_refused
from remat_executor.capture.traced_step import IsStandard, always_standard
from remat_executor.costs.annotate import issued_at_once
from remat_executor.costs.failures import MeasureError
from remat_executor.errors import CaptureError, WrongPrediction, note_on
from remat_executor.inspection.fake_module import with_fake_tensors
from remat_executor.inspection.read_recorder import ReadRecorder
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.step_handler import OffloadBackend
from remat_executor.memory.library_workspaces import warm_up_libraries, warn_of_trials
from remat_executor.module.peak_check import (
    MarginPlanner,
    block_headroom,
    replan_for_slack,
    replan_until_it_fits,
    surely_within,
)
from remat_executor.module.planned_step import PlannedStep
from remat_executor.module.shared_captures import Example, KindCaptures, SharedCaptures
from remat_executor.runtime.eager import Eager
from remat_executor.runtime.registry import RuntimeFactory
from remat_executor.torch_private.precision import without_any_autocast
from remat_executor.torch_private.pytrees import unflatten
from remat_executor.torch_private.symbolic_sizes import Place
from remat_executor.translation.dropped_outputs import OutputsState, check_outputs
from remat_executor.translation.translate import translate
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Family
from remat_graph import Graph, OverBudget, Plan, simulate
from remat_graph.contexts import context
from remat_graph.errors import text_of

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""

ENDED = "ended"
"""What is reported last."""


class PlanFunction(Protocol):
    """Any function from a graph to a plan."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""


class CostSource(Protocol):
    """Gives a graph its times and workspaces: measured ones, or those of a platform."""

    def __call__(
        self,
        captured: Captured,
        translation: Translation,
        tensors: Tensors,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Graph:
        """The translation's graph with its costs."""


@attrs.frozen(kw_only=True, eq=False)
class CallToPlan:
    """A call of a module that needs a plan.

    Attributes:
        model: the module, in the mode to capture.
        tensors: its tensors and the call's.
        conditions: what a plan depends on in addition to the ops.
        forward: what is captured: the module's forward, or what is called instead.
        is_standard: whether an output, given with its structure, is of the kind that the module returns.
        on_captured: called with the captured step.
        on_measured: called with it once its costs are known.
        recorder: records which attributes capture reads.
        sharing: captures of calls that differ in sizes alone.
    """

    model: nn.Module
    tensors: Tensors
    conditions: tuple[tuple[str, str], ...]
    forward: Callable[..., Any]
    is_standard: IsStandard = always_standard
    on_captured: Callable[[Captured], None] = lambda captured: None
    on_measured: Callable[[Captured], None] = lambda captured: None
    recorder: ReadRecorder = attrs.field(factory=ReadRecorder)
    sharing: KindCaptures | None = None


@attrs.frozen(kw_only=True, eq=False)
class Traced:
    """The joint graph of a call's step.

    Attributes:
        captured: the joint graph.
        tensors: of the trace: the call's, or fake ones.
        shared: whether it comes from a capture for any size.
    """

    captured: Captured
    tensors: Tensors
    shared: bool = False


def planned_step(stages: "PipelineStages", call: CallToPlan, planner: PlanFunction) -> PlannedStep:
    """Turn a call into a planned step; the planner is asked once.

    Raises:
        CaptureError: the step is not one graph.
        MeasureError: one of its operators does not run.
        StepOverBudget: the runtime needs more than the budget with every plan that was tried.
        Exception: the error that the original raises for this call, with a note.
    """
    try:
        traced = stages.capture(call)
        translation = stages.translate(call, traced)
        graph = stages.annotate(call, traced, translation)
        plan = planner(graph)
        placed = stages.place(call, graph, plan)
        return stages.lower(traced.captured, call.tensors, translation, placed, plan)
    finally:
        stages.report_end()


@context
def _unknown_cases_refused() -> Generator[None, None, None]:
    """Report a case that capture or translation does not know as a `CaptureError`."""
    try:
        yield
    except (KeyError, IndexError, AttributeError, NotImplementedError) as error:
        if note_on(error) is not None:
            raise  # the user's own
        raise CaptureError(
            problem=f"it has something that is not handled yet ({type(error).__name__}: {text_of(error)})",
            advice="wrap a submodule without it, and please report it",
        ) from error


@attrs.frozen(kw_only=True, eq=False)
class PipelineStages:
    """The stages of the pipeline and what they need.

    Attributes:
        costs: gives the graph its times and workspaces.
        differentiate: indices among the output tensors that get gradients.
        on_progress: called with (what, done, total), and at the end with `ENDED`, after an error too.
        device: where the step runs; None: where the model is.
        new_runtime: makes the runtime of one step.
        runtime: the runtime's name; the peak of all but ``"eager"`` is measured, and on CUDA also of that.
            With ``"cudagraph"`` the time of issuing ops is not counted.
        replanner: plans again with a margin if a runtime needs more than its plan predicts.
        part_nbytes: gradient bytes that may wait together in the backward.
        backend: carries out what plans do in addition to computing.
        families: of other ways to run ops, of which plans may choose.
        outputs: whether the caller holds the outputs that are not differentiated during the backward.
        captures: what calls of different sizes share; None: nothing.
    """

    costs: CostSource
    differentiate: tuple[int, ...] | None
    on_progress: Progress | None
    device: torch.device | None = None
    new_runtime: RuntimeFactory = Eager
    runtime: str = "eager"
    replanner: PlanFunction | None = None
    part_nbytes: int | None = None
    backend: OffloadBackend | None = None
    families: tuple[Family, ...] = ()
    outputs: OutputsState = "kept"
    captures: SharedCaptures | None = None

    def __attrs_post_init__(self) -> None:
        check_outputs(self.outputs)

    @_unknown_cases_refused()
    def capture(self, call: CallToPlan) -> Traced:
        """Trace the joint graph of the step, or take it from a capture for any size."""
        self._report("capture", 0, 1)
        shared = self._shared(call)
        if shared is not None:
            self._report("capture", 1, 1)
            return Traced(captured=shared, tensors=call.tensors, shared=True)
        with self._on_device(call) as tensors, call.recorder.recording(call.model):
            trace = functools.partial(
                capture,
                call.model,
                tensors,
                differentiate=self.differentiate,
                call=call.forward,
                is_standard=call.is_standard,
            )
            with numbers_refused(tensors):
                captured = trace()
                check_filled_defaults(captured, trace)
            call.on_captured(captured)
        self._report("capture", 1, 1)
        return Traced(captured=captured, tensors=tensors)

    def _shared(self, call: CallToPlan) -> Captured | None:
        """The step of a call from a capture for any size; None if there is none."""
        sharing = call.sharing
        if sharing is None or self.backend is not None:
            return None
        free = sharing.free(call.tensors)
        if free is not None:
            self._capture_any_size(call, sharing, free)
        shared = sharing.captured(call.tensors)
        if shared is None:
            return None
        captured, call.recorder.reads = shared
        call.on_captured(captured)
        return captured

    def _capture_any_size(self, call: CallToPlan, sharing: KindCaptures, free: frozenset[Place]) -> None:
        def trace(as_if_compiling: bool) -> AnySize:
            with call.recorder.recording(call.model):
                return capture_any_size(
                    call.model,
                    call.tensors,
                    free,
                    differentiate=self.differentiate,
                    call=call.forward,
                    is_standard=call.is_standard,
                    as_if_compiling=as_if_compiling,
                )

        def translated(tensors: Tensors, captured: Captured) -> Translation:
            return self.translate(call, Traced(captured=captured, tensors=tensors, shared=True))

        sharing.learn(trace, free, call.tensors, translated, lambda: call.recorder.reads)

    @_unknown_cases_refused()
    def translate(self, call: CallToPlan, traced: Traced) -> Translation:
        """Turn the joint graph into ops and values."""
        translation = translate(
            traced.captured,
            traced.tensors,
            name=type(call.model).__name__,
            conditions=call.conditions,
            families=self.families,
            outputs=self.outputs,
        )
        if call.sharing is not None and not traced.shared:
            call.sharing.add(Example.of(traced.tensors, traced.captured, translation))
        return translation

    def annotate(self, call: CallToPlan, traced: Traced, translation: Translation) -> Graph:
        """Return the graph with its costs and with all values that training holds."""
        failed: MeasureError | None = None
        if translation.device.type != "cpu":  # on the CPU, libraries do not use torch's allocator
            warm_up_libraries(translation.device, {tensor.dtype for tensor in call.tensors.flat})
            warn_of_trials(translation.device, (op.target for op in translation.graph.ops))
        try:
            graph = self.costs(
                traced.captured,
                translation,
                call.tensors,
                on_progress=lambda done, total: self._report("measure", done, total),
            )
        except MeasureError as error:
            failed = error
        if failed is not None:
            try:
                # Fake tensors let some calls pass that no kernel takes, such as a product of two dtypes.
                raise_as_original(call.model, traced.tensors, call.forward)
                raise failed
            finally:
                del failed
        call.on_measured(traced.captured)
        if self.runtime == "cudagraph":
            graph = issued_at_once(graph)
        return graph if self.backend is None else self.backend.extend_graph(graph, call.tensors)

    def with_slack(self, graph: Graph, plan: Plan) -> Plan:
        """The plan, or another one if values move and CUDA's blocks could exceed the budget."""
        planner = self._slack_planner
        if self.backend is None or planner is None:
            return plan
        return replan_for_slack(graph, plan, planner)

    def place(self, call: CallToPlan, graph: Graph, plan: Plan) -> Graph:
        """Move every persistent value to the plan's placement; return the graph with that placement."""
        if self.backend is None:
            return graph
        return self.backend.apply_placement(graph, frozenset(plan.on_host), call.tensors)

    def lower(
        self, captured: Captured, tensors: Tensors, translation: Translation, graph: Graph, plan: Plan
    ) -> PlannedStep:
        """Return the step, ready to run; it is replanned if its runtime needs more than the budget."""

        def build(plan: Plan) -> PlannedStep:
            _verify(graph, plan)
            runtime = self.new_runtime()
            with without_any_autocast():  # as the step will run
                return PlannedStep.build(
                    captured, translation, graph, plan, runtime, self.part_nbytes, self.backend
                )

        step = build(plan)
        if self.runtime != "eager":
            assert self.replanner is not None
            return replan_until_it_fits(step, tensors, self.replanner, build, self.runtime)
        planner = self._slack_planner
        if self.backend is not None or planner is None:
            return step
        if surely_within(planner.budget_for(graph), graph, plan.schedule, plan.grads):
            return step
        return replan_until_it_fits(step, tensors, planner, build, "eager", block_headroom)

    @property
    def _slack_planner(self) -> MarginPlanner | None:
        """The replanner, if blocks may exceed the budget and it can leave a margin for them."""
        planner = self.replanner
        return planner if self._blocks_may_be_larger and isinstance(planner, MarginPlanner) else None

    @property
    def _blocks_may_be_larger(self) -> bool:
        """Whether the allocator's blocks may be larger than asked for, beyond the rounding of the graph."""
        return self.device is not None and self.device.type == "cuda"

    def report_end(self) -> None:
        """Report that the step is planned, or that planning failed."""
        self._report(ENDED, 1, 1)

    def _report(self, what: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(what, done, total)

    def _on_device(self, call: CallToPlan) -> contextlib.AbstractContextManager[Tensors]:
        """The call's tensors, or fake ones if the model is not on the device that the step runs on."""
        tensors, device = call.tensors, self.device
        if device is None or all(t.device == device for t in tensors.owned.tensors):
            return contextlib.nullcontext(tensors)
        args, kwargs = unflatten(tensors.filled_leaves(tensors.arguments), tensors.spec)
        return with_fake_tensors(call.model, args, kwargs, device, tensors.numbers)


def _verify(graph: Graph, plan: Plan) -> None:
    """Simulate the schedule again; the planner's predicted peak is never trusted.

    Raises:
        InvalidSchedule: the schedule cannot be carried out.
        OverBudget: it peaks above the plan's budget.
        WrongPrediction: its peak differs from the plan's. Where an optimizer steps, a plan may predict more:
            existing gradients cost bytes that this simulation does not see.
    """
    peak_nbytes = simulate(graph, plan.schedule, grads=plan.grads).peak_nbytes
    if peak_nbytes > plan.budget_nbytes:
        raise OverBudget(solver=plan.solver, peak_nbytes=peak_nbytes, budget_nbytes=plan.budget_nbytes)
    if peak_nbytes > plan.peak_nbytes or (peak_nbytes < plan.peak_nbytes and not graph.updates):
        raise WrongPrediction(solver=plan.solver, predicted_nbytes=plan.peak_nbytes, peak_nbytes=peak_nbytes)
