"""What runs a lowered graph: the protocol of runtimes."""

from collections.abc import Callable
from typing import Protocol

import attrs
from torch import Tensor
from torch.fx import GraphModule

GraphFunction = Callable[[list[Tensor]], list[Tensor]]
"""Takes a list of tensors, empties it, and returns a list."""


@attrs.frozen(kw_only=True)
class GraphInterface:
    """What comes into a lowered graph and what goes out, as far as a runtime must know.

    Attributes:
        stable_inputs: how many inputs come first that keep their address from call to call, as parameters do.
        results: how many tensors go out first that are the caller's: outputs, gradients.
    """

    stable_inputs: int
    results: int


class Runtime(Protocol):
    """Makes the lowered graphs of one program runnable; called in the order in which they run."""

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """Prepare one graph.

        Args:
            module: one placeholder, a list of tensors; ATen operators and functions of this package in the
                order of the schedule; returns a list.
            interface: what its list begins with, and what it returns first.
        """
        ...
