"""The way from a call to a planned step, in one function: `planned_step`.

Capture, translate, annotate with costs, plan, place and lower: `PipelineStages` carries these out.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from remat_executor.capture.captured import Captured
from remat_executor.capture.joint_graph import capture, raise_as_original
from remat_executor.costs.measure import MeasureError
from remat_executor.errors import CaptureError, WrongPrediction, note_on
from remat_executor.inspection.fake_module import with_fake_tensors
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.runtime_protocol import Runtime
from remat_executor.lowering.step_handler import OffloadBackend
from remat_executor.module.peak_check import replan_until_it_fits
from remat_executor.module.planned_step import PlannedStep
from remat_executor.runtime.eager import Eager
from remat_executor.torch_private.precision import without_any_autocast
from remat_executor.torch_private.pytrees import unflatten
from remat_executor.translation.translate import translate
from remat_executor.translation.translation import Translation
from remat_graph import Graph, OverBudget, simulate
from remat_graph.contexts import context
from remat_graph.errors import text_of
from remat_graph.plan import Plan

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


class PlanFunction(Protocol):
    """Any function from a graph to a plan on it."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""
        ...


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
        ...


@attrs.frozen(kw_only=True, eq=False)
class CallToPlan:
    """A call of a module that is to be planned.

    Attributes:
        model: the module, in the mode to capture.
        tensors: its tensors and the call's.
        conditions: what a plan depends on beside the ops.
        forward: what is captured: the module's forward, or what is called instead.
        reference_spec: structure of what the module's own forward returns, if that is not captured.
        on_measured: called with what was captured, once its costs are known.
    """

    model: nn.Module
    tensors: Tensors
    conditions: tuple[tuple[str, str], ...]
    forward: Callable[..., Any]
    reference_spec: Any = None
    on_measured: Callable[[Captured], None] = lambda captured: None


@attrs.frozen(kw_only=True, eq=False)
class Traced:
    """What capture found of a call.

    Attributes:
        captured: the joint graph of its step.
        tensors: those that it was traced with: the call's, or stand-ins for them.
    """

    captured: Captured
    tensors: Tensors


def planned_step(stages: "PipelineStages", call: CallToPlan, planner: PlanFunction) -> PlannedStep:
    """Capture, translate, measure, plan, place and lower the step of a call.

    Args:
        stages: what carries these out.
        call: the call.
        planner: asked once for a plan.

    Raises:
        CaptureError: the step is not one graph.
        MeasureError: one of its operators does not run.
        OverCompiled: the runtime takes more than the budget, however the step is planned.
        Exception: whatever the original raises when it is called in this way, with a note.
    """
    traced = stages.capture(call)
    translation = stages.translate(call, traced)
    graph = stages.annotate(call, traced, translation)
    plan = planner(graph)
    graph = stages.place(call, graph, plan)
    return stages.lower(call, traced, translation, graph, plan)


@context
def _unknown_names_refused() -> Generator[None, None, None]:
    """Say of what is not known to capture or translation that it is not handled yet."""
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
    """The stages on the way to a planned step, and what they need.

    Attributes:
        costs: gives the graph its times and workspaces.
        differentiate: indices among the output tensors that get gradients.
        on_progress: called with (what, done, total).
        device: where the step runs, if not where the model is.
        new_runtime: makes the runtime of one program.
        runtime: the name of what it makes; all but ``"eager"`` are rehearsed.
        tightening: the planner that is asked again where a runtime takes more than is planned.
        part_nbytes: bytes of gradients that wait together at most in the backward.
        backend: for what plans do beside computing.
    """

    costs: CostSource
    differentiate: tuple[int, ...] | None
    on_progress: Progress | None
    device: torch.device | None = None
    new_runtime: Callable[[], Runtime] = Eager
    runtime: str = "eager"
    tightening: PlanFunction | None = None
    part_nbytes: int | None = None
    backend: OffloadBackend | None = None

    @_unknown_names_refused()
    def capture(self, call: CallToPlan) -> Traced:
        """The joint graph of the step."""
        self._report("capture", 0, 1)
        with self._on_device(call) as tensors:
            captured = capture(
                call.model,
                tensors,
                differentiate=self.differentiate,
                call=call.forward,
                reference_spec=call.reference_spec,
            )
        self._report("capture", 1, 1)
        return Traced(captured=captured, tensors=tensors)

    @_unknown_names_refused()
    def translate(self, call: CallToPlan, traced: Traced) -> Translation:
        """The joint graph as ops and values."""
        name = type(call.model).__name__
        return translate(traced.captured, traced.tensors, name=name, conditions=call.conditions)

    def annotate(self, call: CallToPlan, traced: Traced, translation: Translation) -> Graph:
        """The graph with its costs, and with all that training holds."""
        failed: MeasureError | None = None
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
        return graph if self.backend is None else self.backend.extend_graph(graph, call.tensors)

    def place(self, call: CallToPlan, graph: Graph, plan: Plan) -> Graph:
        """Bring everything to the home that the plan gives it; the graph with everything there."""
        if self.backend is None:
            return graph
        return self.backend.apply_placement(graph, frozenset(plan.on_host), call.tensors)

    def lower(
        self, call: CallToPlan, traced: Traced, translation: Translation, graph: Graph, plan: Plan
    ) -> PlannedStep:
        """The step, ready to run; where its runtime takes more than is planned, by a tighter plan."""

        def build(plan: Plan) -> PlannedStep:
            _verify(graph, plan)
            runtime = self.new_runtime()
            with without_any_autocast():  # as it will run
                return PlannedStep.build(
                    traced.captured, translation, graph, plan, runtime, self.part_nbytes, self.backend
                )

        step = build(plan)
        if self.runtime == "eager":
            return step
        assert self.tightening is not None
        return replan_until_it_fits(step, call.tensors, self.tightening, build, self.runtime)

    def _report(self, what: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(what, done, total)

    def _on_device(self, call: CallToPlan) -> contextlib.AbstractContextManager[Tensors]:
        """The same call, with stand-ins where it is not on the device that the step runs on."""
        tensors, device = call.tensors, self.device
        if device is None or all(t.device == device for t in tensors.owned.tensors):
            return contextlib.nullcontext(tensors)
        leaves = [
            constant if place is None else tensors.arguments[place]
            for place, constant in zip(tensors.leaves, tensors.constants, strict=True)
        ]
        args, kwargs = unflatten(leaves, tensors.spec)
        return with_fake_tensors(call.model, args, kwargs, device)


def _verify(graph: Graph, plan: Plan) -> None:
    """Take no planner's word: the referee says what the schedule peaks at.

    Raises:
        InvalidSchedule: the schedule cannot be carried out.
        OverBudget: it peaks above the plan's budget, whatever the plan says.
        WrongPrediction: its peak differs from the plan's. Where an optimizer steps, a plan may predict more:
            existing gradients cost bytes that this simulation does not see.
    """
    peak_nbytes = simulate(graph, plan.schedule).peak_nbytes
    if peak_nbytes > plan.budget_nbytes:
        raise OverBudget(solver=plan.solver, peak_nbytes=peak_nbytes, budget_nbytes=plan.budget_nbytes)
    if peak_nbytes > plan.peak_nbytes or (peak_nbytes < plan.peak_nbytes and not graph.updates):
        raise WrongPrediction(solver=plan.solver, promised_nbytes=plan.peak_nbytes, peak_nbytes=peak_nbytes)
