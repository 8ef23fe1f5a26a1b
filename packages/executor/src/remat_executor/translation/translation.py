"""The result of translation: the graph of a step, and the way back to torch."""

from collections.abc import Mapping
from functools import cached_property

import attrs
import torch
from torch.fx import Node

from remat_executor.translation.inplace import InPlace
from remat_executor.translation.recipes import CallOperator, Recipe, RunKernel
from remat_graph import Graph


@attrs.frozen(kw_only=True, eq=False)
class Translation:
    """A graph with the way back to torch.

    Attributes:
        graph: the IR; times and workspaces are zero until measured.
        recipes: per op how to carry out its first implementation and the repeat of that.
        kernels: (op, implementation) -> recipe of an implementation that an alternative uses.
        value_of: fx node -> index of its value; views have none.
        made_by: per op the (fx node, value index) pairs that it defines.
        base_of: fx node -> node whose storage it shows (itself unless it is a view).
        in_place: per op {overwritten value -> (argument position, form)} of its first implementation.
        gradients: (external index, node to deliver, value index) in order of `Captured.gradients`.
        device: where the step runs.
    """

    graph: Graph
    recipes: tuple[Recipe, ...]
    value_of: dict[Node, int]
    made_by: tuple[tuple[tuple[Node, int], ...], ...]
    base_of: dict[Node, Node]
    in_place: tuple[dict[int, tuple[int, InPlace]], ...]
    gradients: tuple[tuple[int, Node, int], ...]
    device: torch.device
    kernels: Mapping[tuple[int, int], RunKernel] = attrs.field(factory=dict)

    @cached_property
    def op_of(self) -> dict[Node, int]:
        """Per fx node the index of the op that calls it."""
        return {recipe.node: i for i, recipe in enumerate(self.recipes) if isinstance(recipe, CallOperator)}

    def defined(self, op: int, implementation: int) -> tuple[tuple[Node, int], ...]:
        """The (fx node, value index) pairs that an implementation defines, in the order of its results."""
        kernel = self.kernels.get((op, implementation))
        if kernel is None or kernel.change.makes is None:
            return self.made_by[op]
        return tuple((node, self.value_of[node]) for node in kernel.change.makes)

    def recipe(self, op: int, implementation: int) -> Recipe:
        """How to carry out an implementation of an op."""
        return self.kernels.get((op, implementation), self.recipes[op])
