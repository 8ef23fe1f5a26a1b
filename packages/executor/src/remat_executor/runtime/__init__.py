"""Ways to run the lowered graphs of a plan: one `Runtime` a file."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.fx import GraphModule

Run = Callable[[list[Tensor]], list[Tensor]]
"""Takes a list of tensors, empties it, and returns a list."""


class Runtime(Protocol):
    """Makes lowered graphs runnable."""

    def __call__(self, module: GraphModule) -> Run:
        """Prepare one graph.

        Args:
            module: one placeholder, a list of tensors; ATen operators and functions of this package in the
                order of the schedule; returns a list.
        """
        ...
