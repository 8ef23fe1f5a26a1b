"""Annotate the ops of a graph with costs: measured seconds and workspaces; FLOPs and bytes for platforms."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.costs.arguments import Arguments
from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.costs.device_timer import Seconds
from remat_executor.costs.kernel_sources import source_hash
from remat_executor.costs.measure import measure
from remat_executor.costs.stopwatch import Request
from remat_executor.costs.times_by_size import OperatorKind, TimesBySize
from remat_executor.costs.unmeasured import Rates
from remat_executor.current_device import as_current
from remat_executor.fx_nodes import meta_tensors
from remat_executor.generator_state import preserved_generators
from remat_executor.inspection.tensors import Tensors
from remat_executor.torch_private.dispatch import argument_names
from remat_executor.torch_private.flop_rules import flop_rule
from remat_executor.torch_private.precision import float32_precisions
from remat_executor.translation.keys import anywhere, kernel_key
from remat_executor.translation.recipes import CallOperator, Draw, Recipe, RunKernel, TrainBatchNorm
from remat_executor.translation.translation import Translation
from remat_executor.ways.substitution import Change
from remat_graph import Graph, Implementation, Measured, Op, OpCost, Platform
from remat_graph.platforms.base import issue_s_of, time_s_of
from remat_graph.platforms.measured import Measurement

aten = torch.ops.aten


def with_costs(
    captured: Captured,
    translation: Translation,
    tensors: Tensors,
    *,
    cache: CostCache | None,
    platform: Platform | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    sizes: TimesBySize | None = None,
) -> Graph:
    """The graph with measured workspaces and times, or those of a platform.

    Each distinct key is measured once, with tensors of that key alone, so the model need not fit the device.
    Operators of a `Measured` platform are not measured here. An operator that does not fit by itself, but
    that plans may run in another way, is estimated.

    Args:
        captured: the joint graph.
        translation: its IR.
        tensors: the caller's tensors; read, never written.
        cache: costs of earlier measurements.
        platform: gives the times instead of the clock, and the workspaces of operators measured there.
        on_progress: called with (keys done, keys in all).
        sizes: what operators took at other sizes of the step; what is measured here is added.
    """
    given = dict(zip(captured.externals, tensors.flat, strict=True))
    arguments = Arguments(captured.graph_module, given, translation)
    graph = translation.graph
    requests: dict[str, Request] = {}
    keys: dict[_Place, str] = {}
    known: dict[_Place, Measurement] = {}
    for i, k in _running(translation):
        if isinstance(platform, Measured):
            there = platform.measurements.get(op_cost(translation, graph, i, k).key)
            if there is not None:
                known[i, k] = there
                continue
        op, recipe = graph.ops[i], translation.recipe(i, k)
        key = keys[i, k] = _key(translation, op, k, recipe)
        if key not in requests:
            requests[key] = arguments.request(recipe, repeat=k > 0)
    replaceable = {key for (i, _), key in keys.items() if graph.ops[i].alternatives}
    sizes = sizes or TimesBySize.on(translation.device.type)
    kinds = {} if platform is not None else _kinds(translation, keys, sizes)  # it gives the times
    estimates = {
        key: seconds for key, kind in kinds.items() if (seconds := sizes.estimate(*kind)) is not None
    }
    costs = measure(
        requests,
        translation.device,
        cache,
        on_progress,
        replaceable=replaceable,
        estimates=estimates,
    )
    for key in (kinds.keys() & costs.keys()) - estimates.keys():
        if not costs[key].doubtful:
            sizes.add(*kinds[key], Seconds(costs[key].time_s, costs[key].issue_s))

    graph = _with_real_sizes(translation, requests, {key: cost.output_nbytes for key, cost in costs.items()})
    found = {place: _Cost(m.time_s, m.issue_s, m.workspace_nbytes) for place, m in known.items()}
    for (i, k), key in keys.items():
        if key in costs:
            found[i, k] = _measured(translation, graph, (i, k), costs[key], platform)
    if missing := keys.keys() - found.keys():
        for i in {i for i, _ in missing}:
            if all((i, k) in missing for k in range(len(graph.ops[i].implementations))):
                measure({keys[i, 0]: requests[keys[i, 0]]}, translation.device)  # raises: no way fits
        rates = Rates.of((op_cost(translation, graph, *place), cost.time_s) for place, cost in found.items())
        found |= {place: _unmeasured(translation, graph, place, rates, platform) for place in missing}
    found |= _no_faster_than_the_call(translation, found)
    return attrs.evolve(graph, ops=tuple(_op_with(op, i, found) for i, op in enumerate(graph.ops)))


def costs_on(device: torch.device, cache_dir: str | Path | None, platform: Platform | None) -> partial[Graph]:
    """`with_costs` for the calls of one module: with a cache, and what its operators take at other sizes."""
    sizes = TimesBySize.on(device.type)
    return partial(with_costs, cache=CostCache(device, cache_dir), platform=platform, sizes=sizes)


_Place = tuple[int, int]  # op, implementation


class _Cost(NamedTuple):
    time_s: float
    issue_s: float
    workspace_nbytes: int


def _running(translation: Translation) -> Iterator[_Place]:
    """The implementations that run something."""
    for i, op in enumerate(translation.graph.ops):
        for k in range(len(op.implementations)):
            recipe = translation.recipe(i, k)
            if not isinstance(recipe, RunKernel) or recipe.change.kernel is not None:
                yield i, k


def _kinds(
    translation: Translation, keys: Mapping[_Place, str], sizes: TimesBySize
) -> dict[str, tuple[OperatorKind, OpCost]]:
    """For each key what it has in common with other sizes, and its work."""
    found: dict[str, tuple[OperatorKind, OpCost]] = {}
    seen: Counter[OperatorKind] = Counter()
    for (i, k), key in keys.items():
        kind = sizes.kind(translation.graph.ops[i].layer, key)
        seen[kind] += 1
        if key not in found:
            found[key] = kind._replace(place=seen[kind]), op_cost(translation, translation.graph, i, k)
    return found


def _no_faster_than_the_call(translation: Translation, found: Mapping[_Place, _Cost]) -> dict[_Place, _Cost]:
    """The parts of calls whose times add up to less than the call's, each with a share of what is missing."""
    parts: dict[Node, list[_Place]] = {}
    for place in found:
        recipe = translation.recipe(*place)
        if isinstance(recipe, RunKernel) and recipe.change.part:
            parts.setdefault(recipe.change.node, []).append(place)
    slowed: dict[_Place, _Cost] = {}
    for node, places in parts.items():
        each_s: dict[int, float] = {}  # an op may have one implementation for its first run, one for repeats
        for i, k in places:
            each_s[i] = min(each_s.get(i, float("inf")), found[i, k].time_s)
        missing_s = found[translation.op_of[node], 0].time_s - sum(each_s.values())
        if missing_s > 0:
            more_s = missing_s / len(each_s)
            slowed |= {place: found[place]._replace(time_s=found[place].time_s + more_s) for place in places}
    return slowed


def _measured(
    translation: Translation, graph: Graph, place: _Place, here: MeasuredCost, platform: Platform | None
) -> _Cost:
    """The cost of an implementation that was measured here; by a platform, its times."""
    outputs = graph.ops[place[0]].implementations[place[1]].outputs
    predicted = sum(graph.allocated_nbytes(v) for v in outputs)
    # Output bytes beyond the fake tensors' sizes are counted as workspace.
    surplus = max(0, here.output_nbytes - predicted) if outputs else 0
    time_s, issue_s = here.time_s, here.issue_s
    if platform is not None:
        query = op_cost(translation, graph, *place)
        time_s, issue_s = time_s_of(platform, query), issue_s_of(platform, query)
    return _Cost(time_s, issue_s, here.workspace_nbytes + surplus)


def _unmeasured(
    translation: Translation, graph: Graph, place: _Place, rates: Rates, platform: Platform | None
) -> _Cost:
    """The cost of an implementation that did not fit, as far as it is known without running it."""
    recipe, query = translation.recipe(*place), op_cost(translation, graph, *place)
    workspace_nbytes = recipe.change.workspace_nbytes if isinstance(recipe, RunKernel) else 0
    if platform is not None:
        return _Cost(time_s_of(platform, query), issue_s_of(platform, query), workspace_nbytes)
    return _Cost(rates.time_s(query), 0.0, workspace_nbytes)


def _op_with(op: Op, i: int, costs: Mapping[_Place, _Cost]) -> Op:
    """An op whose implementations have these costs, where there are any."""
    implementations = [
        attrs.evolve(one, **costs[i, k]._asdict()) if (i, k) in costs else one
        for k, one in enumerate(op.implementations)
    ]
    return attrs.evolve(op, implementations=tuple(implementations))


def issued_at_once(graph: Graph) -> Graph:
    """The graph of a step whose runtime issues all ops together, as a recorded CUDA graph does."""

    def at_once(op: Op) -> Op:
        return attrs.evolve(op, implementations=[attrs.evolve(r, issue_s=0.0) for r in op.implementations])

    return attrs.evolve(graph, ops=map(at_once, graph.ops))


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
            with (
                as_current(translation.device),
                preserved_generators([translation.device]),
                torch.no_grad(),
            ):
                real[op.key] = _storage_sizes(requests[op.key]()())
        inferred = _storage_sizes(recipe.node.meta["val"])
        for value, nbytes, fake in zip(outputs, real[op.key], inferred, strict=False):
            more = max(0, nbytes - fake)
            values[value] = attrs.evolve(values[value], nbytes=values[value].nbytes + more)
    return attrs.evolve(graph, values=tuple(values))


def _storage_sizes(results: object) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in meta_tensors(results)]


def _key(translation: Translation, op: Op, implementation: int, recipe: Recipe) -> str:
    """What a measurement is saved under."""
    if isinstance(recipe, RunKernel):
        assert recipe.change.kernel is not None, op.name
        return f"{kernel_key(recipe.change, translation.device)} {source_hash(recipe.change.kernel)}"
    # A plain call is repeated as it first runs.
    return f"again: {op.key}" if implementation and not isinstance(recipe, CallOperator) else op.key


def op_cost(translation: Translation, graph: Graph, op: int, implementation: int) -> OpCost:
    """FLOPs by torch's counting rules and causal masks, bytes of the storages read and written, and key.

    The kernel of another way takes those of the calls that it counts as.
    """
    recipe = translation.recipe(op, implementation)
    run = graph.ops[op].implementations[implementation]
    if isinstance(recipe, RunKernel):
        return _kernel_cost(translation, graph, run, recipe.change)
    read = sum(graph.values[v].nbytes for v in run.inputs)
    written = sum(graph.values[v].nbytes for v in run.outputs)
    flops, arithmetic = 0, ""
    if isinstance(recipe, CallOperator | Draw):
        node = recipe.node
        packet = getattr(node.target, "overloadpacket", None)
        count = flop_rule(_COUNTED_AS.get(packet, packet))
        if count is not None:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            counted = count(*args, **kwargs, out_val=node.meta["val"])
            flops = int(counted * _unmasked(node.target, args, kwargs))
            arithmetic = _arithmetic(packet, args)
    again = "again: " if implementation and not isinstance(recipe, CallOperator) else ""
    key = f"{again}{anywhere(graph.ops[op].key)}" if graph.ops[op].key else ""
    return OpCost(flops=flops, read_nbytes=read, written_nbytes=written, key=key, arithmetic=arithmetic)


def _kernel_cost(translation: Translation, graph: Graph, run: Implementation, change: Change) -> OpCost:
    if change.kernel is None:
        return OpCost(key="")
    key, ops = anywhere(kernel_key(change, translation.device)), translation.op_of
    if change.counts_as is None:
        called = ops.get(change.node) if change.flops else None
        return OpCost(
            flops=change.flops,
            read_nbytes=sum(graph.values[v].nbytes for v in run.inputs) + change.more_nbytes,
            written_nbytes=sum(graph.values[v].nbytes for v in run.outputs),
            key=key,
            arithmetic="" if called is None else op_cost(translation, graph, called, 0).arithmetic,
        )
    parts = [op_cost(translation, graph, ops[node], 0) for node in change.counts_as if node in ops]
    if change.more_nbytes:
        parts.append(OpCost(read_nbytes=change.more_nbytes))
    return OpCost(
        flops=sum(part.flops for part in parts),
        read_nbytes=sum(part.read_nbytes for part in parts),
        written_nbytes=sum(part.written_nbytes for part in parts),
        key=key,
        arithmetic=next((part.arithmetic for part in parts if part.arithmetic), ""),
        parts=tuple(parts),
    )


def _unmasked(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The share of an attention's products that a causal mask leaves; torch counts all of them."""
    given = {**dict(zip(argument_names(operator), args, strict=False)), **kwargs}
    if not given.get("is_causal", False):
        return 1.0
    rows, columns = given["query"].shape[-2], given["key"].shape[-2]
    square = min(rows, columns)
    left = square * (square + 1) / 2 + (rows - square) * columns
    return float(left / (rows * columns))


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
