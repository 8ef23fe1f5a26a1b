"""Read a joint graph: classify its placeholders and outputs by torch's descriptors."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured, Output
from remat_executor.capture.collectives import refuse_collective
from remat_executor.capture.cuda_kernels import selects_cudnn
from remat_executor.capture.cudnn_batch_norms import use_cudnn_batch_norms
from remat_executor.capture.dropout_rounding import use_eager_rounding
from remat_executor.capture.explain import foreign_generator
from remat_executor.capture.layers import name_layers
from remat_executor.capture.recurrent import (
    flatten_gradients,
    keep_workspaces,
    order_flat_weights,
    separate_flat_weights,
)
from remat_executor.capture.rewrites import rewrite
from remat_executor.capture.smoothed_loss import use_eager_sums
from remat_executor.capture.traced_step import TraceResult
from remat_executor.errors import CaptureError
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.capture import (
    Joint,
    JointInput,
    JointOutput,
    OutputKind,
    joint_inputs,
    joint_outputs,
)


def read_joint(
    joint: Joint, result: TraceResult, tensors: Tensors, absent: torch.device | None = None
) -> Captured:
    """Classify placeholders and outputs of the joint graph; replace ops whose eager kernels differ.

    Raises:
        CaptureError: the step has an effect that a lowered graph would not reproduce.
    """
    graph = joint.graph_module.graph
    name_layers(graph)
    use_eager_rounding(graph)
    use_eager_sums(graph)
    if absent is None:
        use_cudnn_batch_norms(graph)
    else:
        use_cudnn_batch_norms(graph, selects_cudnn)
    keep_workspaces(graph)
    order_flat_weights(graph)
    separate_flat_weights(graph)
    flatten_gradients(graph)
    inputs = joint_inputs(graph)
    given = [i for i in inputs if i.tangent_of is None]
    tangents = {i.tangent_of: i.node for i in inputs if i.tangent_of is not None}
    rewrite(graph, tangents.values())
    placeholders = {i.name: i.node for i in given}
    placed = externals(given, tensors)
    for tangent in inputs:
        if tangent.written_input is not None:
            name = tensors.names[placed.index(placeholders[tangent.written_input])]
            raise CaptureError(
                problem=f"the forward writes into {name!r}, which requires a gradient",
                advice="write into it outside of the forward, for example after the optimizer's step",
            )
    if joint.reshaped:
        raise CaptureError(
            problem="the forward changes the shape of an input in place, as unsqueeze_ does",
            advice="make a view instead: x = x.unsqueeze(0)",
        )
    _check_effects(joint.graph_module, placed, result.replaced, tensors)
    by_kind = _outputs_by_kind(graph)
    own = _own_outputs(by_kind[OutputKind.OWN], tangents, joint, result)
    bases = [
        Output(node=base.node, tangent=tangents.get(base.name), requires_grad=True, replayed=False)
        for base in by_kind[OutputKind.BASE]
    ]
    counter = iter(range(len(own)))
    return Captured(
        graph_module=joint.graph_module,
        externals=placed,
        outputs=(*own, *bases),
        output_leaves=tuple(next(counter) if is_tensor else None for is_tensor in result.is_tensor),
        output_constants=result.constants,
        out_spec=result.spec,
        mutations=tuple((placeholders[o.of_input], o.node) for o in by_kind[OutputKind.MUTATION]),
        gradients=tuple((placeholders[o.of_input], o.node) for o in by_kind[OutputKind.GRADIENT]),
        changes=result.changes,
        as_if_compiling=joint.as_if_compiling,
    )


def _outputs_by_kind(graph: torch.fx.Graph) -> dict[OutputKind, list[JointOutput]]:
    """The outputs of each kind, in the graph's order.

    Raises:
        CaptureError: an output of another kind, which means an effect.
    """
    by_kind: dict[OutputKind, list[JointOutput]] = {kind: [] for kind in OutputKind}
    for output in joint_outputs(graph):
        if output.kind is None:
            effects = {
                str(n.args[1]) for n in graph.nodes if getattr(n.target, "_name", "") == "with_effects"
            }
            what = ", ".join(effects) or output.type_name
            raise CaptureError(
                problem=f"the step has an effect that is not handled yet ({what})",
                advice="wrap a submodule without it",
            )
        by_kind[output.kind].append(output)
    return by_kind


def _own_outputs(
    found: Sequence[JointOutput], tangents: Mapping[str, Node], joint: Joint, result: TraceResult
) -> list[Output]:
    """The tensors that the module returns, in its order."""
    by_index = {output.index: output for output in found}
    outputs = []
    for i, needs in enumerate(result.requires_grad):
        output = by_index[i]
        tangent = tangents.get(output.name)
        replayed = tangent is None and (joint.of_input[i] or (needs and i in result.differentiated))
        outputs.append(Output(node=output.node, tangent=tangent, requires_grad=needs, replayed=replayed))
    return outputs


def _check_effects(
    graph_module: torch.fx.GraphModule, externals: Sequence[Node], replaced: Collection[int], tensors: Tensors
) -> None:
    """Refuse effects that the trace accepts and a lowered graph would not reproduce.

    Raises:
        CaptureError: a tensor is read and then replaced, a generator is passed, a gradient is sparse, or an
            op communicates with other ranks.
    """
    for index in sorted(replaced):
        if externals[index].users:
            name = tensors.names[index]
            raise CaptureError(
                problem=f"the forward reads {name!r} and replaces it by a new tensor, which a captured graph "
                "would not repeat",
                advice="keep such state in a buffer and write it in place: buffer.copy_(...)",
            )
    for node in graph_module.graph.nodes:
        refuse_collective(node.target)
        constant = getattr(graph_module, node.target) if node.op == "get_attr" else None
        given = (*node.args, *node.kwargs.values(), constant)
        if any(isinstance(argument, torch.Generator) for argument in given):
            raise foreign_generator()
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                problem=f"{node.target} makes a tensor of layout {value.layout}, which is not handled yet",
                advice="use dense tensors (sparse=False)",
            )


def externals(inputs: Sequence[JointInput], tensors: Tensors) -> tuple[Node, ...]:
    """The placeholders of these inputs in the order of `Tensors.flat`.

    Raises:
        CaptureError: an input is none of those tensors.
    """
    by_place: dict[tuple[str, int], Node] = {}
    for given in inputs:
        if given.target is not None:
            kind, _, number = given.target.rpartition(".")
            by_place[kind, int(number)] = given.node
        elif given.index is not None:
            by_place["input", given.index] = given.node
        else:
            raise CaptureError(
                problem=f"an input is not handled yet ({given.name})",
                advice="pass clones instead of tensors that share a storage",
            )
    wanted = [("parameters_", i) for i in range(len(tensors.parameters))]
    wanted += [("buffers_", i) for i in range(len(tensors.buffers))]
    wanted += [("input", i) for i in range(len(tensors.inputs))]
    return tuple(by_place[key] for key in wanted)
