"""The interface for steps other than computing: copies to and from the host, and optimizer steps.

The executor runs the computing steps. Between two graphs it passes the other steps, in order, to a
`StepHandler` of another package.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from remat_executor.inspection.tensors import Tensors
from remat_graph import Deliver, Free, FreeHost, Graph, OptimizerStep, Start, Wait

Action = Start | Wait | Free | FreeHost | OptimizerStep | Deliver
"""A step that a handler carries out; `Free` of a value it moves, `Deliver` of a gradient on the host."""


class StepHandler(Protocol):
    """Carries out the steps of one call, from its forward to the end of its backward."""

    def carry_out(self, step: Action, live: dict[int, Tensor]) -> Sequence[Tensor | None]:
        """Carry out one step.

        Args:
            step: the step.
            live: tensors on the device by value index, each showing its whole storage; updated in place.

        Returns:
            the gradient of a `Deliver`; one None for an update within the backward, whose gradient autograd
            does not get; else nothing.
        """

    def begin_backward(self) -> None:
        """Check that the backward can begin."""

    def read_gradients(self) -> None:
        """Deliver gradients on the host in this backward only when their bytes have arrived."""

    def begin_segment(self) -> None:
        """Note that autograd has got the gradients so far, and that a further segment begins."""


class OffloadBackend(Protocol):
    """Moves values between device and host for one module, and makes the handler of each call."""

    def extend_graph(self, graph: Graph, tensors: Tensors) -> Graph:
        """Add all values that training holds, such as optimizer states, and their placement if it is fixed.

        Args:
            graph: as captured and measured.
            tensors: the module's and the call's, in the order of the graph's values.
        """

    def apply_placement(self, graph: Graph, on_host: frozenset[int], tensors: Tensors) -> Graph:
        """Move persistent values to their placement, and return the graph with that placement.

        Args:
            graph: the result of `extend_graph`.
            on_host: indices of the values that the plan places on the host.
            tensors: as for `extend_graph`.
        """

    def call_context(self) -> AbstractContextManager[None]:
        """A context for a call, in which the module's tensors can be read."""

    def wait(self) -> None:
        """Wait until no other thread works, before the module is captured."""

    def original_context(self) -> AbstractContextManager[object]:
        """A context in which the original can run on the device, wherever its tensors are placed."""

    def begin(self, step: Any, flat: Sequence[Tensor]) -> StepHandler:
        """Make the handler of one call of a `PlannedStep` on `Tensors.flat`."""
