"""Measure the real peak of a compiled step once, before it is used, and replan with a margin if needed.

A compiler allocates as it sees fit, so the simulated peak is only a first estimate. The step runs on aliases
of the caller's tensors while the allocator is read. If the peak exceeds the budget, the step is planned again
with a margin, until it fits or no plan does.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from remat_executor.autograd.gradient_delivery import run_under_autograd
from remat_executor.current_device import as_current
from remat_executor.errors import OverCompiled
from remat_executor.generator_state import preserved_generators
from remat_executor.inspection.tensors import Tensors
from remat_executor.lowering.runtime_protocol import HoldingRuntime
from remat_executor.memory.allocator import allocator_peak
from remat_executor.module.planned_step import PlannedStep
from remat_graph import Graph, Plan, RematError, format_nbytes

_MOST_ATTEMPTS = 5
_WARM_UPS = 1
"""Runs before the measured ones: they compile, and initialize what is initialized once."""
_MEASURED = 2
"""Measured runs, of which the last counts: in the one before, a runtime may record its graphs."""


@runtime_checkable
class MarginPlanner(Protocol):
    """A planner that states its budget and can plan with a margin."""

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of this graph may need; a saved plan may be for another budget."""

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """The same planner with a margin of n bytes."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""


def measure_peak(step: PlannedStep, tensors: Tensors) -> int:
    """Run a step's forward and backward and return the allocator's peak bytes.

    What the runtime holds between steps is added: memory pools of recorded graphs.
    Gradients and outputs are held to the end. The caller's tensors and generators are unchanged afterwards.
    """
    captured, translation = step.captured, step.translation
    # `.data` has its own version counter, and the address that a recorded step expects.
    inputs = [tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors.flat]
    written = {node for node, _ in captured.mutations}
    pairs = zip(captured.externals, inputs, strict=True)
    before = [(tensor, tensor.clone()) for node, tensor in pairs if node in written]
    owners = [inputs[place] for place, _, _ in translation.gradients]

    def once() -> Any:
        call = step.call(inputs)
        outputs = run_under_autograd(call, owners)
        visible = [o for o, like in zip(outputs, call.wiring.tangents, strict=True) if like is not None]
        tangents = [torch.zeros_like(output) for output in visible]
        return outputs, call, torch.autograd.grad(visible, owners, tangents, allow_unused=True)

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
            peaks = [allocator_peak(once, device).peak_nbytes for _ in range(_MEASURED)]
            held_nbytes = step.runtime.held_nbytes if isinstance(step.runtime, HoldingRuntime) else 0
            return peaks[-1] + held_nbytes
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
    """A step whose measured peak fits the planner's budget; `rebuild` lowers another plan of the planner.

    Raises:
        OverCompiled: no plan was found that fits.
    """
    graph, budget_nbytes = step.graph, step.plan.budget_nbytes
    if isinstance(planner, MarginPlanner):
        budget_nbytes = planner.budget_for(graph)
    margin_nbytes = 0
    for _ in range(_MOST_ATTEMPTS):
        peak_nbytes = measure_peak(step, tensors)
        if peak_nbytes <= budget_nbytes:
            return attrs.evolve(step, rehearsed_nbytes=peak_nbytes)
        # What the runtime needs beyond a plan varies from plan to plan: leave an eighth more, then half as
        # much again. A larger margin than necessary would cost recomputation.
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
