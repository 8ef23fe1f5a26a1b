"""The result of capture: the joint graph of a step, and what its inputs and outputs are."""

from typing import Any

import attrs
import torch

from remat_executor.inspection.attribute_changes import Changes


@attrs.frozen(kw_only=True)
class Output:
    """One tensor among the module's flat outputs.

    Attributes:
        node: the fx node that makes it.
        tangent: the placeholder of its tangent, if it is differentiated.
        requires_grad: whether the original's output requires a gradient.
        replayed: whether it is a view of an input or of another output, replayed outside the planned region.
    """

    node: torch.fx.Node
    tangent: torch.fx.Node | None
    requires_grad: bool
    replayed: bool


@attrs.frozen(kw_only=True)
class Captured:
    """A captured step.

    Attributes:
        graph_module: the joint graph; owns the constants that the trace lifted.
        externals: placeholders of `Tensors.flat`, in its order.
        outputs: the tensors among the flat outputs, then bases of which only views are returned.
        output_leaves: per flat output the index into `outputs`, or None for a constant.
        output_constants: per flat output its value if it is not a tensor, else None.
        out_spec: structure of the output.
        mutations: (placeholder, node of its new content).
        gradients: (placeholder, node of its gradient) of placeholders that have one.
        changes: what the forward assigned on its modules, which capture undid.
        as_if_compiling: whether it has the branches that a forward takes for compilers.
    """

    graph_module: torch.fx.GraphModule
    externals: tuple[torch.fx.Node, ...]
    outputs: tuple[Output, ...]
    output_leaves: tuple[int | None, ...]
    output_constants: tuple[Any, ...]
    out_spec: Any
    mutations: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
    gradients: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
    changes: Changes = attrs.field(factory=Changes)
    as_if_compiling: bool = False
