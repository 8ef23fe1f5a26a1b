"""What capture found: the joint graph of a step, and what its inputs and outputs are."""

from typing import Any

import attrs
import torch


@attrs.frozen(kw_only=True)
class Output:
    """One tensor among the module's flat outputs.

    Attributes:
        node: the fx node that makes it.
        tangent: the placeholder of its tangent, if it is differentiated.
        requires_grad: whether the original's output does.
        replayed: it is a view of an input or of another output, made outside the planned region by replaying
            it.
    """

    node: torch.fx.Node
    tangent: torch.fx.Node | None
    requires_grad: bool
    replayed: bool


@attrs.frozen(kw_only=True)
class Captured:
    """What capture found.

    Attributes:
        graph_module: the joint graph; owns the constants that the trace lifted.
        externals: placeholders of `Tensors.flat`, in its order.
        outputs: the tensors among the flat outputs, then bases that only their views return.
        output_leaves: per flat output the index into `outputs`, or None for a constant.
        output_constants: flat outputs that are no tensors, None where they are.
        out_spec: structure of the output.
        mutations: (placeholder, node of its new content).
        gradients: (placeholder, node of its gradient); placeholders without a gradient do not appear.
    """

    graph_module: torch.fx.GraphModule
    externals: tuple[torch.fx.Node, ...]
    outputs: tuple[Output, ...]
    output_leaves: tuple[int | None, ...]
    output_constants: tuple[Any, ...]
    out_spec: Any
    mutations: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
    gradients: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
