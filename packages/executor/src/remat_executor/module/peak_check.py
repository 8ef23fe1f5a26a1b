"""One step run for its bytes: what a runtime that compiles really takes, before anyone trains with it.

A compiler allocates as it sees fit, so the peak that the referee predicts is only a start. The step is run on
stand-ins for the caller's tensors and read by the allocator; where it takes more than the budget, it is
planned again in so much less, until it fits or nothing does.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from remat_executor.autograd.chain import apply
from remat_executor.errors import OverCompiled
from remat_executor.inspection.tensors import Tensors
from remat_executor.memory.allocator import allocator_peak
from remat_executor.module.planned_step import PlannedStep
from remat_executor.rng import preserved_generators
from remat_graph import Graph, RematError
from remat_graph.plan import Plan
from remat_graph.units import format_nbytes

_MOST_ATTEMPTS = 5
_WARM_UPS = 1
"""Runs before the one that is read: they compile and set up what is set up once."""


@runtime_checkable
class MarginPlanner(Protocol):
    """A planner that says its budget, and can plan with a margin."""

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of this graph may take; a saved plan may have been made for others."""
        ...

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """The same planner with a margin of n bytes."""
        ...

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""
        ...


def measure_peak(step: PlannedStep, tensors: Tensors) -> int:
    """Run a step's forward and backward on stand-ins: no tensor of the caller's changes, nor a generator.

    Returns:
        Peak bytes by the allocator, gradients and outputs held to the end.
    """
    captured, translation = step.captured, step.translation
    # `.data` has versions of its own, and the address that a recorded step must find again.
    inputs = [tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors.flat]
    written = {node for node, _ in captured.mutations}
    pairs = zip(captured.externals, inputs, strict=True)
    before = [(tensor, tensor.clone()) for node, tensor in pairs if node in written]
    owners = [inputs[place] for place, _, _ in translation.gradients]

    def once() -> Any:
        call = step.call(inputs)
        outputs = apply(call, owners)
        visible = [o for o, like in zip(outputs, call.wiring.tangents, strict=True) if like is not None]
        tangents = [torch.zeros_like(output) for output in visible]
        return outputs, call, torch.autograd.grad(visible, owners, tangents, allow_unused=True)

    device = translation.device
    try:
        with (
            preserved_generators([device]),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            for _ in range(_WARM_UPS):
                once()
            return allocator_peak(once, device).peak_nbytes
    finally:
        for tensor, content in before:
            tensor.copy_(content)


def replan_until_it_fits(
    step: PlannedStep,
    tensors: Tensors,
    planner: Callable[[Graph], Plan] | MarginPlanner,
    rebuild: Callable[[Plan], PlannedStep],
    runtime: str,
) -> PlannedStep:
    """A step that keeps to the planner's budget when it is run.

    Args:
        step: the step as it was planned first.
        tensors: what it is called with.
        planner: asked again if the step takes too much.
        rebuild: lowers another plan.
        runtime: its name, for messages.

    Returns:
        The step, with the peak bytes that it took.

    Raises:
        OverCompiled: no plan was found that keeps to it.
    """
    graph, budget_nbytes = step.graph, step.plan.budget_nbytes
    if isinstance(planner, MarginPlanner):
        budget_nbytes = planner.budget_for(graph)
    margin_nbytes = 0
    for _ in range(_MOST_ATTEMPTS):
        peak_nbytes = measure_peak(step, tensors)
        if peak_nbytes <= budget_nbytes:
            return attrs.evolve(step, rehearsed_nbytes=peak_nbytes)
        # What the runtime takes beyond a plan varies from plan to plan: leave somewhat more, then half as
        # much again. More room than it needs would cost recomputation.
        beyond_nbytes = peak_nbytes - step.plan.peak_nbytes
        margin_nbytes = max(beyond_nbytes + beyond_nbytes // 8, margin_nbytes + margin_nbytes // 2)
        over = OverCompiled(
            runtime=runtime,
            peak=format_nbytes(peak_nbytes),
            budget=format_nbytes(budget_nbytes),
            advised=format_nbytes(budget_nbytes + margin_nbytes),
        )
        if not isinstance(planner, MarginPlanner):
            raise over
        try:
            step = rebuild(planner.with_margin(margin_nbytes)(graph))
        except RematError as error:
            raise over from error
    raise over
