"""Annotate the ops of a graph with costs: measured seconds and workspaces; FLOPs and bytes for platforms."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from remat_executor.capture.captured import Captured
from remat_executor.capture.recurrent import reads_opaque_bytes
from remat_executor.capture.repeatable_batch_norms import batch_norm_call, drops_statistics
from remat_executor.costs.cache import CostCache
from remat_executor.costs.measure import measure
from remat_executor.fx_nodes import (
    args_of,
    is_item,
    is_second_name,
    meta_tensors,
    replayed,
    source_of,
    target_of,
)
from remat_executor.generator_state import default_generator, preserved_generators, read_state, replay
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.precision import float32_precisions
from remat_executor.translation.keys import anywhere
from remat_executor.translation.recipes import (
    CallOperator,
    Draw,
    OwnGradient,
    ReadGenerator,
    Recipe,
    TrainBatchNorm,
    WriteBack,
    own_copy,
)
from remat_executor.translation.translation import Translation
from remat_graph import Graph, Measured, OpCost, Platform
from remat_graph.platforms.measured import Measurement

aten = torch.ops.aten
_DRAWN = 1 << 20
Request = Callable[[], Callable[[], object]]


def with_costs(
    captured: Captured,
    translation: Translation,
    tensors: Tensors,
    *,
    cache: CostCache | None,
    platform: Platform | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Graph:
    """The graph with measured workspaces and times, or those of a platform.

    Each distinct key is measured once, with tensors of that key alone, so the model need not fit the device.
    Operators of a `Measured` platform are not measured here.

    Args:
        captured: the joint graph.
        translation: its IR.
        tensors: the caller's tensors; read, never written.
        cache: costs of earlier measurements.
        platform: gives the times instead of the clock, and the workspaces of operators measured there.
        on_progress: called with (keys done, keys in all).
    """
    arguments = _Arguments(captured, translation, tensors)
    graph = translation.graph
    requests: dict[str, Request] = {}
    keys: dict[tuple[int, int], str] = {}
    queries: dict[tuple[int, int], OpCost] = {}  # to the platform
    known: dict[tuple[int, int], Measurement] = {}
    for i, (op, recipe) in enumerate(zip(graph.ops, translation.recipes, strict=True)):
        for k in range(len(op.implementations)):
            if platform is not None:
                queries[i, k] = op_cost(recipe, graph, i, k)
            if isinstance(platform, Measured) and queries[i, k].key in platform.measurements:
                known[i, k] = platform.measurements[queries[i, k].key]
                continue
            key = op.key if k == 0 else f"again: {op.key}"
            keys[i, k] = key
            if key not in requests:
                requests[key] = arguments.request(recipe, repeat=k > 0)
    costs = measure(requests, translation.device, cache, on_progress)

    graph = _with_real_sizes(translation, requests, {key: cost.output_nbytes for key, cost in costs.items()})
    ops = []
    for i, op in enumerate(graph.ops):
        implementations = []
        for k, implementation in enumerate(op.implementations):
            there = known.get((i, k))
            if there is not None:
                time_s, workspace_nbytes = there.time_s, there.workspace_nbytes
            else:
                here = costs[keys[i, k]]
                time_s = here.time_s if platform is None else platform.time_s(queries[i, k])
                predicted = sum(graph.allocated_nbytes(v) for v in implementation.outputs)
                # Output bytes beyond the fake tensors' sizes are counted as workspace.
                surplus = max(0, here.output_nbytes - predicted) if implementation.outputs else 0
                workspace_nbytes = here.workspace_nbytes + surplus
            implementations.append(
                attrs.evolve(implementation, time_s=time_s, workspace_nbytes=workspace_nbytes)
            )
        ops.append(attrs.evolve(op, implementations=tuple(implementations)))
    return attrs.evolve(graph, ops=tuple(ops))


def _with_real_sizes(
    translation: Translation, requests: Mapping[str, Request], output_nbytes: Mapping[str, int]
) -> Graph:
    """The graph with the real output sizes of kernels whose fake outputs are smaller.

    An example is batch norm on CPU: with bfloat16 inputs and float32 parameters its statistics are float32.
    """
    graph = translation.graph
    values = list(graph.values)
    real: dict[str, list[int]] = {}
    for op, recipe in zip(graph.ops, translation.recipes, strict=True):
        outputs = [v for v in op.first.outputs if not values[v].external]
        if not isinstance(recipe, CallOperator | Draw | TrainBatchNorm):
            continue
        if output_nbytes.get(op.key, 0) <= sum(graph.allocated_nbytes(v) for v in outputs):
            continue
        if op.key not in real:
            with preserved_generators([translation.device]), torch.no_grad():
                real[op.key] = _storage_sizes(requests[op.key]()())
        inferred = _storage_sizes(recipe.node.meta["val"])
        for value, nbytes, fake in zip(outputs, real[op.key], inferred, strict=False):
            more = max(0, nbytes - fake)
            values[value] = attrs.evolve(values[value], nbytes=values[value].nbytes + more)
    return attrs.evolve(graph, values=tuple(values))


def _storage_sizes(results: object) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in meta_tensors(results)]


def op_cost(recipe: Recipe, graph: Graph, op: int, implementation: int) -> OpCost:
    """FLOPs by torch's counting rules, the bytes of the storages read and written, and the key."""
    run = graph.ops[op].implementations[implementation]
    read = sum(graph.values[v].nbytes for v in run.inputs)
    written = sum(graph.values[v].nbytes for v in run.outputs)
    flops, arithmetic = 0, ""
    if isinstance(recipe, CallOperator | Draw):
        node = recipe.node
        packet = getattr(node.target, "overloadpacket", None)
        count = flop_registry.get(_COUNTED_AS.get(packet, packet))
        if count is not None:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            flops = int(count(*args, **kwargs, out_val=node.meta["val"]))
            arithmetic = _arithmetic(packet, args)
    again = "again: " if implementation else ""
    key = f"{again}{anywhere(graph.ops[op].key)}" if graph.ops[op].key else ""
    return OpCost(flops=flops, read_nbytes=read, written_nbytes=written, key=key, arithmetic=arithmetic)


def _arithmetic(packet: Any, args: tuple[Any, ...]) -> str:
    """The precision of an operator's products on a GPU: their dtype, or TF32 where torch's flags allow it."""
    dtypes = [arg.dtype for arg in args if isinstance(arg, Tensor)]
    name = str(dtypes[0]).removeprefix("torch.") if dtypes else ""
    library = "cuda.conv" if "conv" in str(packet) else "cuda.matmul"
    tf32 = name == "float32" and float32_precisions()[library] == "tf32"
    return "tf32" if tf32 else name


# Torch counts attention on GPUs; the CPU kernel has another name and the same first arguments.
_COUNTED_AS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


class _Arguments:
    """Makes real arguments: the caller's tensors where an op reads them, random ones elsewhere.

    `deep` asks for the results of producing ops instead of random tensors.
    """

    def __init__(self, captured: Captured, translation: Translation, tensors: Tensors) -> None:
        self.captured, self.translation = captured, translation
        given = zip(captured.externals, tensors.flat, strict=True)
        self.real: dict[Node, Tensor] = {
            node: tensor for node, tensor in given if tensor.device == node.meta["val"].device
        }
        self.deep = False

    def request(self, recipe: Recipe, *, repeat: bool) -> Request:
        match recipe:
            case CallOperator(node):
                return lambda: self.call_or_deep_call(node)
            case Draw(node, device, _):
                return lambda: self.draw(node, device, repeat)
            case ReadGenerator(device):
                return lambda: lambda: read_state(device)
            case TrainBatchNorm(node):
                return lambda: self.batch_norm(node, repeat)
            case WriteBack(target, source):
                return lambda: partial(_copy, *(_random_like(n.meta["val"]) for n in (target, source)))
            case OwnGradient(source, size, stride):
                return lambda: partial(own_copy, _random_like(source.meta["val"]), size, stride)

    def call_or_deep_call(self, node: Node) -> Callable[[], object]:
        """The call on random arguments; if the kernel refuses those, on the results of their producers."""
        if reads_opaque_bytes(node.target):
            return self.deep_call(node)
        thunk: Callable[[], object] | None = self.call(node)
        accepted = False

        def run() -> object:
            # The first measured run is also the trial: another one could cost seconds.
            nonlocal thunk, accepted
            assert thunk is not None
            if accepted:
                return thunk()
            try:
                result = thunk()
            except (RuntimeError, ValueError, IndexError):
                thunk = None  # frees its arguments
                thunk = self.deep_call(node)
                result = thunk()
            accepted = True
            return result

        return run

    def deep_call(self, node: Node) -> Callable[[], object]:
        """The call on the results of its arguments' producers."""
        self.deep = True
        try:
            return self.call(node)
        finally:
            self.deep = False

    def call(self, node: Node) -> Callable[[], object]:
        args, kwargs = self.arguments(node)
        if drops_statistics(node):
            args = (*args[:3], None, None, *args[5:])
        target = target_of(node)
        return lambda: target(*args, **kwargs)

    def draw(self, node: Node, device: str, repeat: bool) -> Callable[[], object]:
        args, kwargs = self.arguments(node)
        if not repeat:
            return lambda: target_of(node)(*args, **kwargs)
        state = default_generator(torch.device(device)).get_state()
        return lambda: replay(state, device, target_of(node), *args, **kwargs)

    def batch_norm(self, node: Node, repeat: bool) -> Callable[[], object]:
        tensors = self.arguments_of(node.args[:3])
        mean, variance = (_random_like(a.meta["val"]) for a in args_of(node)[3:5])
        target, args = batch_norm_call(node, tensors, None if repeat else (mean, variance))
        return lambda: target(*args)

    def arguments(self, node: Node) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return self.arguments_of(node.args), self.arguments_of(dict(node.kwargs))

    def arguments_of(self, arguments: Any) -> Any:
        return torch.fx.node.map_arg(arguments, self.tensor)

    def tensor(self, node: Node) -> Any:
        base = self.translation.base_of.get(node, node)
        if base.op == "get_attr":
            return self.view(node, base, getattr(self.captured.graph_module, str(base.target)))
        if base in self.real:
            return self.view(node, base, self.real[base].detach())
        if self.deep and base.op == "call_function":
            self.deep = False
            made = self.produced(base)
            self.deep = True
            return self.view(node, base, made)
        value = node.meta["val"]
        return (
            _random_like(value)
            if isinstance(value, Tensor)
            else [_random_like(v) for v in meta_tensors(value)]
        )

    def produced(self, base: Node) -> Any:
        """Run the op that makes a storage on random arguments."""
        if is_item(base):
            return self.produced(source_of(base))[args_of(base)[1]]
        self.deep = reads_opaque_bytes(base.target)
        args, kwargs = self.arguments(base)
        self.deep = False
        return target_of(base)(*args, **kwargs)

    def view(self, node: Node, base: Node, tensor: Any) -> Any:
        """A view of the storage of `base`, given as `tensor`."""
        twins = source_of(base).users if is_item(base) else ()
        names = (n for n in twins if is_second_name(n, base) and self.translation.base_of.get(n) is base)
        return replayed(node, {base: tensor} | dict.fromkeys(names, tensor))


def _copy(written: Tensor, read: Tensor) -> None:
    written.copy_(read)


def _random_like(like: Tensor) -> Tensor:
    """A real tensor with the layout and storage of a fake one: numbers between 0 and 1, or zeros.

    Such numbers are valid probabilities, and their logarithms and roots are finite.
    """
    elements = like.untyped_storage().nbytes() // like.element_size()
    storage = torch.zeros(elements, dtype=like.dtype, device=like.device)
    if storage.is_complex() or storage.is_floating_point():
        # Drawing all numbers of a large tensor would take longer than most kernels, so they repeat.
        drawn = storage[:_DRAWN]
        drawn = drawn.normal_() if storage.is_complex() else drawn.uniform_()
        for remainder in storage[_DRAWN:].split(_DRAWN):
            remainder.copy_(drawn[: len(remainder)])
    tensor = storage.as_strided(like.shape, like.stride(), like.storage_offset())
    return tensor.conj() if like.is_conj() else tensor
