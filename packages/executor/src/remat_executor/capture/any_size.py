"""Capture a step once for all sizes of its inputs, and read from that the step of each size.

The sizes that differ between calls are symbols of the trace (`SymbolicSizes`), which records what it assumes
of them where Python compares them. For a size of which all that holds, the traced operators run on fake
tensors of that size, in the order of the trace. The user's code, autograd and torch's tracer do not run. What
that gives is read as any other capture.

That is sound for a forward which does arithmetic with sizes and compares them. Written as text a size counts
as compared, and comparisons of fractions are refused: torch decides some of them without a record. A forward
that asks for the type or identity of a size, or keeps it outside of its module, would go unnoticed, so a
module shares captures only where its user asks for that.

A trace with symbols takes parts that another one leaves out: slices that show a whole tensor, for which eager
has no operator. They are left out here.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.joint_graph import kernels_of, trace_inputs
from remat_executor.capture.random_draws import with_torch_randomness_only
from remat_executor.capture.read_joint import externals, read_joint
from remat_executor.capture.traced_step import IsStandard, TracedStep, TraceResult
from remat_executor.fx_nodes import args_of, is_item, target_of
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.capture import Joint, as_eager_composes, export_joint, joint_inputs
from remat_executor.torch_private.fake_tensors import with_careful_fake_cache
from remat_executor.torch_private.fx_modules import read_later
from remat_executor.torch_private.symbolic_sizes import (
    Place,
    SizeNotCovered,
    SymbolicSizes,
    fixed_fakes,
    is_symbolic,
    watched_symbols,
)

aten = torch.ops.aten

_OF_ONE_SIZE = ("val", "tensor_meta")
"""What the metadata of a node say of one size."""


@attrs.frozen(kw_only=True, eq=False)
class AnySize:
    """A step whose inputs have symbolic sizes.

    Attributes:
        joint: its graph.
        result: what the trace recorded of the module's forward.
        sizes: the symbols.
        names: other names for nodes, by their names in the trace.
    """

    joint: Joint
    result: TraceResult
    sizes: SymbolicSizes
    names: Mapping[str, str] = attrs.field(factory=dict)

    def captured(self, tensors: Tensors) -> Captured:
        """The step of a call.

        Args:
            tensors: the module's and the call's; inputs whose sizes vary are contiguous.

        Raises:
            SizeNotCovered: the forward may compute something else at these sizes.
            Exception: what an operator raises.
        """
        sizes = {(i, d): tensors.inputs[i].shape[d] for i, d in self.sizes.symbols}
        self.sizes.check(sizes)
        with with_careful_fake_cache(), kernels_of(tensors.device.type, None), as_eager_composes():
            graph_module = _Concrete(self, tensors, sizes).run()
        joint = attrs.evolve(self.joint, graph_module=graph_module)
        return read_joint(joint, self.result, tensors)


def capture_any_size(
    module: nn.Module,
    tensors: Tensors,
    free: Collection[Place],
    *,
    differentiate: Collection[int] | None,
    call: Callable[..., Any],
    is_standard: IsStandard,
    as_if_compiling: bool,
) -> AnySize:
    """Trace a step whose inputs have symbols for these sizes.

    Args:
        module: the user's module, in the mode to capture.
        tensors: the module's and those of a call.
        free: the sizes.
        differentiate: see `capture`.
        call: the function to trace.
        is_standard: see `capture`.
        as_if_compiling: whether the branches for compilers are traced.

    Raises:
        SizeNotCovered: the step has what is not shared between sizes.
        Exception: what the forward raises on fake tensors.
    """
    step = TracedStep(module, tensors, differentiate, call, is_standard)
    step.train(module.training)
    with with_careful_fake_cache(), kernels_of(tensors.device.type, None), watched_symbols():
        sizes, inputs = SymbolicSizes.of(trace_inputs(tensors), free)
        joint = with_torch_randomness_only(
            lambda: export_joint(step, inputs, as_if_compiling=as_if_compiling), tensors
        )
    result = step.result
    assert result is not None  # the traced function has run
    changes = result.changes
    if changes.state or changes.kept or changes.defaults or result.replaced:
        raise SizeNotCovered("the forward changes its module")
    if any(map(is_symbolic, result.constants)):
        raise SizeNotCovered("the forward returns a size")
    return AnySize(joint=joint, result=result, sizes=sizes)


class _Concrete:
    """Runs a symbolic graph on fake tensors of one size, and records what runs."""

    def __init__(self, step: AnySize, tensors: Tensors, sizes: Mapping[Place, int]) -> None:
        self.step, self.tensors, self.sizes = step, tensors, sizes
        self.symbolic = step.joint.graph_module
        self.mode = fixed_fakes()
        self.graph = torch.fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.made: dict[Node, Any] = {}  # the node of the new graph; a number for a size
        self.value: dict[Node, Any] = {}  # the fake tensors

    def run(self) -> torch.fx.GraphModule:
        given = self.given()
        with torch.no_grad():
            for node in self.symbolic.graph.nodes:
                match node.op:
                    case "placeholder":
                        self.keep(node, given[node])
                    case "get_attr":
                        self.keep(node, self.constant(node))
                    case "call_function":
                        self.call(node)
                    case "output":
                        self.keep(node, None)
                    case other:
                        raise SizeNotCovered(f"a node of kind {other}")
        return read_later(self.graph, self.constants)

    def given(self) -> dict[Node, Tensor]:
        """The fake tensor of each placeholder."""
        inputs, tensors = joint_inputs(self.symbolic.graph), self.tensors
        nodes = externals([each for each in inputs if each.tangent_of is None], tensors)
        resized = {id(tensors.inputs[i]) for i, _ in self.step.sizes.symbols}
        found = {
            node: self.like(tensor) if id(tensor) in resized else self.mode.from_tensor(tensor)
            for node, tensor in zip(nodes, tensors.flat, strict=True)
        }
        tangents = [each.node for each in inputs if each.tangent_of is not None]
        return found | {node: self.like(node.meta["val"]) for node in tangents}

    def like(self, tensor: Any) -> Tensor:
        """A fake tensor with a layout that may have symbols."""
        if not isinstance(tensor, Tensor):
            raise SizeNotCovered("an input that is no tensor")
        value = partial(self.step.sizes.value, sizes=self.sizes)
        shape, strides = list(map(value, tensor.shape)), list(map(value, tensor.stride()))
        with self.mode:
            made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def constant(self, node: Node) -> Tensor:
        """A constant of the trace."""
        name = str(node.target)
        value = getattr(self.symbolic, name)
        if not isinstance(value, Tensor):
            raise SizeNotCovered("a graph within the graph")
        self.constants[name] = value
        fake: Tensor = self.mode.from_tensor(value)
        return fake

    def call(self, node: Node) -> None:
        """Run a call; sizes are numbers of the new graph."""
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.value.__getitem__)
        if is_symbolic(node.meta.get("val")):
            self.made[node] = self.value[node] = target_of(node)(*args, **kwargs)
            return
        if _shows_all(node.target, args):
            source = args_of(node)[0]
            self.made[node], self.value[node] = self.made[source], self.value[source]
            return
        if not (is_item(node) or hasattr(node.target, "overloadpacket")):
            raise SizeNotCovered(f"a call of {node.target}")
        with self.mode:
            value = target_of(node)(*args, **kwargs)
        self.keep(node, value)

    def name(self, node: Node) -> str:
        """A name that no other node has."""
        names = self.step.names
        return names.get(node.name, f"{node.name}_of_any_size" if names else node.name)

    def keep(self, node: Node, value: Any) -> None:
        """Add a node to the new graph."""
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.made.__getitem__)
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=self.name(node))
        made.meta = {name: each for name, each in node.meta.items() if name not in _OF_ONE_SIZE}
        if notes := made.meta.get("custom"):
            made.meta["custom"] = dict(notes)  # which are taken out later
        if "val" in node.meta:
            made.meta["val"] = value
        self.made[node], self.value[node] = made, value


def _shows_all(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call slices a whole tensor, or is the backward of that."""
    if target is aten.slice.Tensor:
        tensor, *rest = args
        given = dict(zip(("dimension", "start", "end", "step"), rest, strict=False))
        dimension, start = given.get("dimension", 0), given.get("start")
        end, step = given.get("end"), given.get("step", 1)
        size = tensor.shape[dimension]
    elif target is aten.slice_backward.default:
        shape, dimension, start, end, step = args[1:]
        size = shape[dimension]
    else:
        return False
    return step == 1 and not start and (end is None or end >= size)
