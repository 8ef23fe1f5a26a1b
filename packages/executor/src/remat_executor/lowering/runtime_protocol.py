"""The protocol of runtimes, which run lowered graphs."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
from torch import Tensor
from torch.fx import GraphModule

GraphFunction = Callable[[list[Tensor]], list[Tensor]]
"""Takes a list of tensors, empties it, and returns a list."""


@attrs.frozen(kw_only=True)
class GraphInterface:
    """What a runtime must know of the inputs and outputs of a lowered graph.

    Attributes:
        stable_inputs: how many inputs come first that keep their address from call to call, as parameters do.
        results: how many outputs come first that the caller gets: outputs, gradients.
    """

    stable_inputs: int
    results: int


class Runtime(Protocol):
    """Makes the lowered graphs of one step runnable; called in the order in which they run."""

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """Prepare one graph.

        Args:
            module: one placeholder, a list of tensors; ATen operators and functions of this package in the
                order of the schedule; returns a list.
            interface: describes its inputs and outputs.
        """


class CompiledPiece(Protocol):
    """A piece of a step that can run compiled or as it was lowered.

    Attributes:
        runs_compiled: which of them; may be set between steps.
    """

    runs_compiled: bool

    @property
    def size(self) -> int:
        """Its number of operators."""


@runtime_checkable
class ChunkedRuntime(Protocol):
    """A runtime that compiles a step in pieces."""

    @property
    def compiled_pieces(self) -> Sequence[CompiledPiece]:
        """Those that it has compiled, in the order of their first runs."""


@runtime_checkable
class HoldingRuntime(Protocol):
    """A runtime that holds device memory between steps which the allocator does not count in a step."""

    @property
    def held_nbytes(self) -> int:
        """The bytes that it holds since it recorded its graphs."""
