"""What translation gives: the graph of a step, and the way back to torch."""

import attrs
import torch
from torch.fx import Node

from remat_executor.translation.inplace import InPlace
from remat_executor.translation.recipes import Recipe
from remat_graph import Graph


@attrs.frozen(kw_only=True, eq=False)
class Translation:
    """A graph with the way back to torch.

    Attributes:
        graph: the IR; times and workspaces are zero until measured.
        recipes: per op how to carry it out.
        value_of: fx node -> index of the value that it is (not of views).
        made_by: per op the (fx node, value index) pairs that it defines.
        base_of: fx node -> node whose storage it looks at (itself unless it is a view).
        in_place: per op {value written over -> (argument position, form)}.
        gradients: (external index, node to hand over, value index) in order of `Captured.gradients`.
        device: where the work is done.
    """

    graph: Graph
    recipes: tuple[Recipe, ...]
    value_of: dict[Node, int]
    made_by: tuple[tuple[tuple[Node, int], ...], ...]
    base_of: dict[Node, Node]
    in_place: tuple[dict[int, tuple[int, InPlace]], ...]
    gradients: tuple[tuple[int, Node, int], ...]
    device: torch.device
