"""Private names that trace a joint forward and backward graph, and that classify errors of a trace."""

import contextlib
import threading
from collections.abc import Generator
from enum import Enum
from typing import Any

import attrs
import torch

from remat_executor.errors import UnsupportedTorch
from remat_executor.fx_nodes import args_of
from remat_executor.torch_private.fake_tensors import with_careful_fake_cache
from remat_executor.torch_private.fx_modules import without_code
from remat_executor.torch_private.lookup import private_name
from remat_executor.torch_private.tested_versions import warn_if_untested
from remat_graph.contexts import context


@attrs.frozen(kw_only=True)
class Joint:
    """A joint forward and backward graph as torch exports it.

    Attributes:
        graph_module: the fx module; placeholders and the output node carry descriptors in ``meta["desc"]``.
        of_input: per flat output whether it is an input or a view of one.
        reshaped: whether an input's shape or strides change in place.
        as_if_compiling: whether the branches for compilers were traced.
    """

    graph_module: torch.fx.GraphModule
    of_input: tuple[bool, ...]
    reshaped: bool
    as_if_compiling: bool = False


@attrs.frozen(kw_only=True)
class JointInput:
    """A placeholder of a joint graph with torch's description."""

    node: torch.fx.Node  # the placeholder
    name: str  # torch's name for it, unique in the graph
    tangent_of: str | None  # name of the output whose tangent it is; None for an input of the forward
    written_input: str | None  # for a tangent of an input's new content, the name of that input
    target: str | None  # for a parameter or buffer, its path in the module
    index: int | None  # its place among the inputs, if it is one of them


class OutputKind(Enum):
    """Kinds of outputs of a joint graph, by the name of torch's descriptor class."""

    OWN = "PlainAOTOutput"  # the traced function returns it
    MUTATION = "InputMutationAOTOutput"  # new content of an input
    GRADIENT = "GradAOTOutput"  # of an input
    BASE = "IntermediateBaseAOTOutput"  # returned by views of it alone


@attrs.frozen(kw_only=True)
class JointOutput:
    """An output of a joint graph with torch's description."""

    node: torch.fx.Node  # makes it
    kind: OutputKind | None  # None for an unknown kind
    type_name: str  # name of torch's descriptor class
    name: str  # torch's name for it, unique in the graph; empty without a description
    index: int | None  # its place among the outputs of the traced function, if it is one of them
    of_input: str  # for a gradient or new content, the name of its input; else empty


def joint_inputs(graph: torch.fx.Graph) -> list[JointInput]:
    """The placeholders of a joint graph, in its order."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        described = node.meta["desc"]
        output = described.output if described.is_tangent() else None
        written = getattr(output, "mutated_input", None)
        held = described.is_param() or described.is_buffer()
        found.append(
            JointInput(
                node=node,
                name=described.expr(),
                tangent_of=None if output is None else output.expr(),
                written_input=None if written is None else written.expr(),
                target=described.target if held else None,
                index=getattr(described, "idx", None),
            )
        )
    return found


def joint_outputs(graph: torch.fx.Graph) -> list[JointOutput]:
    """The outputs of a joint graph that are nodes, in its order."""
    kinds = {kind.value: kind for kind in OutputKind}
    output_node = graph.output_node()
    found = []
    for value, described in zip(args_of(output_node)[0], output_node.meta["desc"], strict=True):
        if not isinstance(value, torch.fx.Node):
            continue
        type_name = type(described).__name__ if described is not None else ""
        of_input = getattr(described, "mutated_input", None) or getattr(described, "grad_of", None)
        found.append(
            JointOutput(
                node=value,
                kind=kinds.get(type_name),
                type_name=type_name,
                name="" if described is None else described.expr(),
                index=getattr(described, "idx", None),
                of_input="" if of_input is None else of_input.expr(),
            )
        )
    return found


@context
def _as_if_compiling() -> Generator[None, None, None]:
    """Pretend to compile: model code then avoids branches on data."""
    compiler = torch.compiler
    if not hasattr(compiler, "_is_compiling_flag"):
        raise UnsupportedTorch(name="torch.compiler._is_compiling_flag", version=torch.__version__)
    before, ask, me = compiler._is_compiling_flag, compiler.is_compiling, threading.get_ident()

    def is_compiling() -> bool:
        """True in this thread only: an optimizer in another thread would round differently."""
        return ask() if threading.get_ident() == me else before

    try:
        compiler._is_compiling_flag = True
        compiler.is_compiling = is_compiling
        yield
    finally:
        compiler._is_compiling_flag, compiler.is_compiling = before, ask


@context
def as_eager_composes() -> Generator[None, None, None]:
    """Trace composite operators with their C++ implementation, as eager runs them.

    Torch's Python decompositions of these differ: other kernels, other rounding, an LSTM without its dropout
    between layers, a multilabel margin loss with other numbers (torch 2.13).
    """
    implicit, autograd = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    packets = [getattr(torch.ops.aten, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    sizes = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
    names = [f"upsample_{size}" for size in sizes]
    names += [f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)]
    names += [f"_upsample_{how}2d_aa" for how in ("bilinear", "bicubic", "lanczos")]
    names += ["multilabel_margin_loss_forward", "multi_margin_loss", "hardshrink", "softshrink", "matmul"]
    packets += [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    kernels = [
        (one, key, one.py_kernels[key])
        for one in operators
        for key in (implicit, autograd)
        if key in one.py_kernels
    ]
    try:
        for operator, key, _ in kernels:
            operator.py_kernels.pop(key, None)
        for operator in operators:
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, key, kernel in kernels:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


@context
def _without_flattening() -> Generator[None, None, None]:
    """Let recurrent layers leave the weights of a trace alone: flattening asks for their addresses."""
    layers: Any = torch.nn.RNNBase
    flatten, me = layers.flatten_parameters, threading.get_ident()

    def flatten_parameters(layer: torch.nn.RNNBase) -> None:
        """As torch's own, in other threads only."""
        if threading.get_ident() != me:
            flatten(layer)

    try:
        layers.flatten_parameters = flatten_parameters
        yield
    finally:
        layers.flatten_parameters = flatten


@context
def _with_linalg_checks() -> Generator[None, None, None]:
    """Keep the checks by which `torch.linalg` raises, as of a singular matrix.

    They have no result. Torch 2.11 drops them from a trace, which later versions do not.
    """
    effects, check = "torch._higher_order_ops.effects", "aten::_linalg_check_errors"
    handle = None
    try:
        if private_name(effects, "_get_effect")(check) is None:
            ordered = private_name(effects, "_EffectType").ORDERED
            handle = private_name(effects, "_register_effectful_op")(check, ordered)
        yield
    finally:
        if handle is not None:
            handle.destroy()


def export_joint(
    module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], *, as_if_compiling: bool = False
) -> Joint:
    """Trace the forward and backward of `module(*tensors)` on fake tensors.

    Args:
        module: what is traced.
        tensors: its inputs.
        as_if_compiling: whether `torch.compiler.is_compiling()` holds meanwhile.
    """
    warn_if_untested(str(torch.__version__))
    export = private_name("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")
    with (
        contextlib.ExitStack() as stack,
        _as_if_compiling() if as_if_compiling else contextlib.nullcontext(),
        as_eager_composes(),
        _without_flattening(),
        _with_linalg_checks(),
        with_careful_fake_cache(),
        without_code(),
        private_name("torch._functorch.config", "patch")(
            {
                "backward_pass_autocast": "off",  # eager runs the backward outside of the forward's autocast
                "decompose_custom_triton_ops": False,  # eager runs them as one kernel
            }
        ),
    ):
        # Else Dynamo, when it compiles a function within the trace, guards by that mode's counts of calls,
        # which its own work changes: torch 2.11 then refuses the function.
        joint = export(stack, module, tensors, _disable_torch_fn_metadata_mode=as_if_compiling)
        found = joint._aot_state.fw_metadata
        return Joint(
            graph_module=joint.graph_module,
            of_input=tuple(o.output_type.name in ("is_input", "alias_of_input") for o in found.output_info),
            reshaped=any(i.mutates_metadata for i in found.input_info),
            as_if_compiling=as_if_compiling,
        )


def is_data_dependent(error: Exception) -> bool:
    """Whether capture stopped because a Python branch depends on a tensor's values."""
    names = {"DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException"}
    return not names.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def has_dynamic_shape(error: Exception) -> bool:
    """Whether capture stopped because the size of a result depends on a tensor's values."""
    return any(kind.__name__ == "DynamicOutputShapeException" for kind in type(error).__mro__)
