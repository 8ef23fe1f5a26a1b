"""What a schedule does beside computing: copies to and from the host, and steps of the optimizer.

The executor runs what computes; between two runs it hands these steps, in their order, to a `StepHandler`,
which another package brings.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from remat_executor.inspection.tensors import Tensors
from remat_graph import Compute, Deliver, Free, FreeHost, Graph, OptimizerStep, Schedule, Start, Step, Wait

Action = Start | Wait | Free | FreeHost | OptimizerStep | Deliver
"""A step that a handler carries out: a `Free` of what it moves, a `Deliver` of a gradient on the host."""


class StepHandler(Protocol):
    """Carries out the steps of one call, from its forward to the end of its backward."""

    def carry_out(self, step: Action, live: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """Do one step.

        Args:
            step: the step.
            live: tensors on the device by value index, each with the whole of its storage; to be changed.

        Returns:
            the gradient that a `Deliver` hands over; for an update within the backward a None, since autograd
            gets nothing there; else nothing.
        """
        ...

    def begin_backward(self) -> None:
        """The backward begins: see that it can."""
        ...


class OffloadBackend(Protocol):
    """What moves between device and host for one module: it makes the handler of each call."""

    def extend_graph(self, graph: Graph, tensors: Tensors) -> Graph:
        """The captured graph with all that training holds, and what is known already of who is at home where.

        Args:
            graph: as captured and measured.
            tensors: the module's and the call's, in the order of the graph's values.
        """
        ...

    def apply_placement(self, graph: Graph, on_host: frozenset[int], tensors: Tensors) -> Graph:
        """Bring everything to its home, with its values; the graph with everything there.

        Args:
            graph: what `extend_graph` gave.
            on_host: indices of the values that its plan has placed on the host.
            tensors: as for `extend_graph`.
        """
        ...

    def call_context(self) -> AbstractContextManager[None]:
        """Within it a call runs: the module's tensors are looked at."""
        ...

    def wait(self) -> None:
        """Wait until nothing runs in other threads: the module is about to be captured."""
        ...

    def original_context(self) -> AbstractContextManager[object]:
        """In it the original module can run on the device, whatever of it is at home elsewhere."""
        ...

    def begin(self, step: Any, flat: Sequence[Tensor]) -> StepHandler:
        """Make the handler of one call of a `PlannedStep` on `Tensors.flat`."""
        ...


def handled_steps(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """Positions of the steps that a handler carries out."""
    moved = {step.transfer.value for step in schedule.steps if isinstance(step, Start)}
    gone: set[int] = set()
    taken_over: set[int] = set()
    found = set()
    for position, step in enumerate(schedule.steps):
        match step:
            case Compute(op, implementation):
                way = graph.ops[op].implementations[implementation]
                gone.difference_update(way.outputs)
                taken_over = {source for _, source in way.reuses}
            case Free(value) if value in moved:
                # What an output takes over is lowered with the op that does it.
                if value not in taken_over:
                    found.add(position)
                gone.add(value)
            case Deliver(value) if value in gone:
                found.add(position)
            case Start(transfer):
                gone.discard(transfer.value)
                found.add(position)
            case Wait() | FreeHost() | OptimizerStep():
                found.add(position)
            case _:
                pass
        if not isinstance(step, Compute | Free):
            taken_over = set()
    return frozenset(found)


def reads(graph: Graph, step: Step) -> set[int]:
    """Values that a step needs on the device, or may."""
    match step:
        case Compute(op, implementation):
            return set(graph.ops[op].implementations[implementation].inputs)
        case Deliver(value) | Free(value):
            return {value}
        case Start(transfer) | Wait(transfer):
            return {transfer.value}
        case OptimizerStep(value):
            return {update.grad for update in graph.updates if update.param == value}
        case _:
            return set()
