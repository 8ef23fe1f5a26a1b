"""Measure the real peak of a step before it is used, and replan with a margin if needed.

A compiler allocates as it sees fit, so the simulated peak is only a first estimate. CUDA's allocator may hand
out blocks that are larger than asked for, so there the peak of the eager runtime is an estimate too, unless
the bound in `block_slack` is within the budget. The step runs on aliases of the caller's tensors while the
allocator is read. If the peak exceeds the budget, the step is planned again with a margin, until it fits or
no plan does. Where no plan leaves enough headroom for a compiler, a part of the step runs uncompiled
(`partly_compiled`).

A step with an `OffloadBackend` moves values and updates parameters, so it cannot run on trial. It is
replanned until the bound is within the budget, before any value is moved.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import attrs
import torch
from torch import Tensor

from remat_executor.autograd.gradient_delivery import run_under_autograd
from remat_executor.current_device import as_current
from remat_executor.errors import StepOverBudget
from remat_executor.generator_state import preserved_generators
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.runtime_protocol import HoldingRuntime
from remat_executor.memory.allocator import allocator_peak, fragments_nbytes
from remat_executor.memory.block_slack import (
    largest_slack_nbytes,
    slack_variation_nbytes,
    worst_case_nbytes,
)
from remat_executor.module.partly_compiled import partly_compiled
from remat_executor.module.planned_step import PlannedStep
from remat_executor.torch_private.autograd import apply_plainly
from remat_graph import Grads, Graph, Plan, RematError, Schedule
from remat_graph.training import with_placement

T = TypeVar("T")
_MOST_ATTEMPTS = 5
_WARM_UPS = 1
"""Runs before the measured ones: they compile, and initialize what is initialized once."""
_MEASURED = 2
"""Measured runs where the allocator caches blocks: the first finds none, the second those of the first, which
decide how large the blocks of a step are. A runtime that records graphs does so in the first."""


@runtime_checkable
class MarginPlanner(Protocol):
    """A planner that states its budget and can plan with a margin."""

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of this graph may need; a saved plan may be for another budget."""

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes: all that it may not need is added."""

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """The same planner with a margin of n bytes."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""


@runtime_checkable
class BoundsBlocks(Protocol):
    """A planner whose steps are in states that only it knows."""

    def blocks_nbytes(self, graph: Graph, plan: Plan) -> int:
        """The most bytes that a plan takes in any state, with the slack of the allocator's blocks.

        Of the first state that exceeds the budget, if one does.
        """


@runtime_checkable
class _NamesSmallest(Protocol):
    """An error about a budget that names the smallest one with a schedule."""

    smallest_nbytes: int


class _TakesOutputs(torch.autograd.Function):
    """Gives autograd a tangent for each output, as a loss that is computed outside of the module does.

    Only autograd holds these tangents, so the step may free them. The result has no elements.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.outputs = [output.detach() for output in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(map(torch.zeros_like, ctx.outputs))


def measure_peak(step: PlannedStep, tensors: Tensors) -> int:
    """Run a step's forward and backward and return the allocator's peak bytes.

    What the runtime holds between steps is added: memory pools of recorded graphs.
    Gradients and outputs are held to the end. The caller's tensors and generators are unchanged afterwards,
    and nothing else stays allocated.
    """
    captured, translation = step.captured, step.translation
    # `.data` has its own version counter, and the address that a recorded step expects.
    inputs = [tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors.flat]
    written = {node for node, _ in captured.mutations}
    pairs = zip(captured.externals, inputs, strict=True)
    before = [(tensor, tensor.clone()) for node, tensor in pairs if node in written]
    owners = [inputs[place] for place, _, _ in translation.gradients]
    if step.plan.grads is Grads.PRESENT:  # each is freed as if it had been added to another one
        for parameter in filter(_gets_gradient, inputs[: len(tensors.parameters)]):
            parameter.register_post_accumulate_grad_hook(_free_gradient)

    def once() -> Any:
        call = step.call(inputs)
        outputs = run_under_autograd(call, owners)
        visible = [o for o, like in zip(outputs, call.wiring.tangents, strict=True) if like is not None]
        dropped = {place for _, place in call.wiring.dropped}
        places = call.wiring.differentiable
        held = [o for o, place in zip(outputs, places, strict=True) if place not in dropped]
        call.others = {place: o for place, o in call.others.items() if place not in dropped}
        del outputs
        return held, call, _backward(visible, owners)

    device = translation.device
    try:
        with (
            as_current(device),
            preserved_generators([device]),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            for _ in range(_WARM_UPS):
                once()
            gc.collect()  # garbage that is freed while a run is measured would lower its peak
            _release_blocks(device)
            holder = step.runtime if isinstance(step.runtime, HoldingRuntime) else None
            runs = 1 if device.type == "cpu" and holder is None else _MEASURED
            peaks = [allocator_peak(once, device).peak_nbytes for _ in range(runs)]
            return max(peaks) if holder is None else peaks[-1] + holder.held_nbytes
    finally:
        for tensor, content in before:
            tensor.copy_(content)
        _release_blocks(device)


def _backward(outputs: list[Tensor], owners: Sequence[Tensor]) -> list[Tensor | None]:
    """Run a backward and return the gradients; a scalar's tangent is held meanwhile, as by `loss.backward()`.

    `torch.autograd.grad` is not used: autograd's thread may keep its results for a moment.
    """
    roots = [output for output in outputs if output.ndim == 0]
    tangents = [torch.zeros_like(root) for root in roots]
    others = [output for output in outputs if output.ndim > 0]
    if others:
        roots.append(apply_plainly(_TakesOutputs, *others))
        tangents.append(torch.empty_like(roots[-1]))
    torch.autograd.backward(roots, tangents, inputs=owners)
    gradients = [owner.grad for owner in owners]
    for owner in owners:
        owner.grad = None
    return gradients


def _gets_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _release_blocks(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def surely_within(budget_nbytes: int, graph: Graph, schedule: Schedule, grads: Grads) -> bool:
    """Whether a schedule keeps to a budget on CUDA whatever blocks the allocator hands out."""
    slack_nbytes = largest_slack_nbytes()
    return (
        slack_nbytes is not None and worst_case_nbytes(graph, schedule, slack_nbytes, grads) <= budget_nbytes
    )


def replan_until_it_fits(
    step: PlannedStep,
    tensors: Tensors,
    planner: Callable[[Graph], Plan] | MarginPlanner,
    rebuild: Callable[[Plan], PlannedStep],
    runtime: str,
    headroom: Callable[[PlannedStep, int], int] = lambda step, measured_nbytes: 0,
) -> PlannedStep:
    """A step whose measured peak fits the planner's budget.

    Args:
        step: the first plan, lowered.
        tensors: the caller's.
        planner: plans again with a margin.
        rebuild: lowers another plan of the planner.
        runtime: its name, for the error.
        headroom: bytes by which later peaks of a step may exceed this measured one.

    Raises:
        StepOverBudget: no plan was found that fits.
    """

    def judge(step: PlannedStep) -> tuple[PlannedStep, int]:
        measured_nbytes = measure_peak(step, tensors)
        _release_blocks(step.translation.device)
        beyond_nbytes = fragments_nbytes(step.translation.device)
        measured = attrs.evolve(step, rehearsed_nbytes=measured_nbytes, fragments_nbytes=beyond_nbytes)
        return measured, measured_nbytes + headroom(step, measured_nbytes)

    try:
        return _until_within_budget(
            step, lambda step: step.plan, step.graph, planner, judge, rebuild, runtime
        )
    except StepOverBudget:
        budget_nbytes = step.plan.budget_nbytes
        if isinstance(planner, MarginPlanner):  # a loaded plan may be for another budget
            budget_nbytes = planner.budget_for(step.graph)
        found = partly_compiled(step, budget_nbytes, judge)
        if found is None:
            raise
        return found


def block_headroom(step: PlannedStep, measured_nbytes: int) -> int:
    """By how much the blocks of CUDA's allocator may vary: a `headroom` of `replan_until_it_fits`."""
    return slack_variation_nbytes(step.graph, step.plan.schedule, step.plan.grads, measured_nbytes)


def replan_for_slack(graph: Graph, plan: Plan, planner: MarginPlanner) -> Plan:
    """A plan that keeps to the planner's budget whatever blocks the allocator hands out.

    Raises:
        StepOverBudget: no such plan was found.
    """
    if largest_slack_nbytes() == 0:
        return plan

    def judge(plan: Plan) -> tuple[Plan, int]:
        if isinstance(planner, BoundsBlocks):
            return plan, planner.blocks_nbytes(graph, plan)
        return plan, worst_case_nbytes(with_placement(graph, plan.on_host), plan.schedule)

    return _until_within_budget(plan, lambda plan: plan, graph, planner, judge, lambda plan: plan, "eager")


def _until_within_budget(
    candidate: T,
    plan_of: Callable[[T], Plan],
    graph: Graph,
    planner: Callable[[Graph], Plan] | MarginPlanner,
    judge: Callable[[T], tuple[T, int]],
    rebuild: Callable[[Plan], T],
    runtime: str,
) -> T:
    """The first candidate that its judge finds within the budget; each has a larger margin than the last.

    `judge` returns a candidate with what it noted on it, and its peak in bytes. Where a margin leaves no
    plan, the smallest budget with a schedule is tried before the search is given up.
    """
    budget_nbytes = plan_of(candidate).budget_nbytes
    taken_nbytes = 0  # of the budget that was asked for, by what plans do not count
    if isinstance(planner, MarginPlanner):
        budget_nbytes = planner.budget_for(graph)
        taken_nbytes = planner.asked_for(0)
    margin_nbytes, attempt, smallest = 0, 1, False
    while True:
        candidate, peak_nbytes = judge(candidate)
        if peak_nbytes <= budget_nbytes:
            return candidate
        beyond_nbytes = peak_nbytes - plan_of(candidate).peak_nbytes
        larger_nbytes = _larger_margin(margin_nbytes, beyond_nbytes, peak_nbytes - budget_nbytes)
        # A plan at that budget gets a margin of its own: an eighth more than this one. If the last plan was
        # the smallest, it fits there; what it needs beyond its peak may vary.
        advised_nbytes = budget_nbytes + larger_nbytes + larger_nbytes // 8
        if smallest:
            advised_nbytes = peak_nbytes + beyond_nbytes // 8
        over = StepOverBudget(
            runtime=runtime,
            peak_nbytes=taken_nbytes + peak_nbytes,
            budget_nbytes=taken_nbytes + budget_nbytes,
            advised_nbytes=taken_nbytes + advised_nbytes,
        )
        tried_nbytes, margin_nbytes = margin_nbytes, min(larger_nbytes, budget_nbytes - 1)
        given_up = smallest or attempt == _MOST_ATTEMPTS or margin_nbytes <= tried_nbytes
        if given_up or not isinstance(planner, MarginPlanner):
            raise over
        attempt += 1
        try:
            plan, smallest = _plan_with_margin(planner, graph, tried_nbytes, margin_nbytes)
            candidate = rebuild(plan)
        except RematError as error:
            raise over from error


def _plan_with_margin(
    planner: MarginPlanner, graph: Graph, tried_nbytes: int, margin_nbytes: int
) -> tuple[Plan, bool]:
    """A plan with a margin, and whether it is the smallest: the largest margin that leaves a plan, instead.

    A margin is an estimate with an eighth in reserve, so a smaller one may do.

    Raises:
        RematError: none is left by any margin above the last one.
    """
    try:
        return planner.with_margin(margin_nbytes)(graph), False
    except RematError as error:
        if not isinstance(error, _NamesSmallest):
            raise
        largest_nbytes = planner.budget_for(graph) - error.smallest_nbytes
        if not tried_nbytes < largest_nbytes < margin_nbytes:
            raise
    return planner.with_margin(largest_nbytes)(graph), True


def _larger_margin(margin_nbytes: int, beyond_nbytes: int, surplus_nbytes: int) -> int:
    """The next margin: from the last one, the bytes beyond the plan's peak and those beyond the budget.

    What a step needs beyond its plan varies from plan to plan: leave an eighth more. A larger margin than
    necessary would cost recomputation.
    """
    return max(beyond_nbytes + beyond_nbytes // 8, margin_nbytes + margin_nbytes // 8 + surplus_nbytes)
