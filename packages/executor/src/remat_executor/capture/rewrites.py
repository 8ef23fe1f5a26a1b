"""Rewrites of a captured graph that cost nothing and keep every bit.

* A copy with the layout of its source is dropped: nothing is written in a functional graph.
* Of equal calls, a later one gives way to an earlier one whose result lives until then anyway.
* A write into a slice reads what is written, and not a copy of it with the layout of the slice.
* The backward of hardtanh and leaky_relu reads the result, which what comes next usually keeps, and not the
  input.

What the caller owns or gets (inputs, outputs, gradients) keeps its storage and its readers.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.fx_nodes import is_foreign, is_item, may_draw, meta_tensors, target_of
from remat_executor.torch_private.fake_tensors import with_careful_fake_cache
from remat_executor.torch_private.tensors import storage_id

aten = torch.ops.aten
_WRITES = (aten.slice_scatter.default, aten.select_scatter.default)  # the second argument into the first


def rewrite(graph: torch.fx.Graph) -> None:
    """Apply all rewrites, in place."""
    drop_clones(graph)
    drop_laid_out_copies(graph)
    merge_equal_calls(graph)
    read_results(graph)


def read_results(graph: torch.fx.Graph) -> None:
    """Let a backward read a result from which the same comparisons follow as from the input."""
    for forward, backward, read in (
        (aten.hardtanh.default, aten.hardtanh_backward.default, _hardtanh_from_result),
        (aten.leaky_relu.default, aten.leaky_relu_backward.default, _leaky_relu_from_result),
    ):
        results = {
            _with_defaults(node): node for node in graph.find_nodes(op="call_function", target=forward)
        }
        for node in graph.find_nodes(op="call_function", target=backward):
            args = read(_with_defaults(node), results)
            if args is not None:
                node.args = args


def _hardtanh_from_result(
    args: tuple[Any, ...], results: Mapping[tuple[Any, ...], Node]
) -> tuple[Any, ...] | None:
    gradient, *call = args  # the result is at a bound exactly where the input is at or beyond it
    result = results.get(tuple(call))
    return None if result is None else (gradient, result, *call[1:])


def _leaky_relu_from_result(
    args: tuple[Any, ...], results: Mapping[tuple[Any, ...], Node]
) -> tuple[Any, ...] | None:
    gradient, x, slope, is_result = args
    result = results.get((x, slope))
    if result is None or is_result or slope < 0:  # a negative slope changes signs
        return None
    return (gradient, result, slope, True)


def _with_defaults(node: Node) -> tuple[Any, ...]:
    """The positional arguments of an operator's call, with the defaults of those that are left out."""
    names = [argument.name for argument in target_of(node)._schema.arguments]
    defaults = [argument.default_value for argument in target_of(node)._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(given.get(name, default) for name, default in zip(names, defaults, strict=True))


def drop_clones(graph: torch.fx.Graph) -> None:
    """Let the readers of a copy with the layout of its source read the source."""
    kept = _storages_of_caller(graph)
    clones = graph.find_nodes(op="call_function", target=aten.clone.default)
    copies = graph.find_nodes(op="call_function", target=aten.copy.default)
    for place, node in [*((0, node) for node in clones), *((1, node) for node in copies)]:
        source: Any = node.args[place]
        one, other = source.meta["val"], node.meta["val"]
        whole = one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        if whole and _layout(one) == _layout(other) and kept.isdisjoint((storage_id(one), storage_id(other))):
            _replace(node, source)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj())


def drop_laid_out_copies(graph: torch.fx.Graph) -> None:
    """Let a write into a slice read its source: a copy laid out as the slice is as large as the whole."""
    kept = _storages_of_caller(graph)
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        source: Any = node.args[1]
        one, other = source.meta["val"], node.meta["val"]
        same = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        same = same and not one.is_conj() and not other.is_conj()
        written = all(user.target in _WRITES and user.args[0] is not node for user in node.users)
        if node.users and same and written and storage_id(one) not in kept:
            _replace(node, source)


def merge_equal_calls(graph: torch.fx.Graph) -> None:
    """Let the readers of a call read an equal, earlier one, if its result is read later still.

    So nothing lives longer than the two results did. Calls are equal if their arguments are, or are results
    of equal calls.
    """
    kept = _storages_of_caller(graph)
    nodes = list(graph.nodes)
    last_read = _last_reads(nodes)
    number: dict[Node, Node] = {}  # of equal calls the same
    latest: dict[Hashable, Node] = {}
    for place, node in enumerate(nodes):
        number[node] = node
        key = _call(node, number)
        if key is None:
            continue
        earlier = latest.get(key)
        if earlier is None:
            latest[key] = node
            continue
        number[node] = number[earlier]
        storages = {storage_id(t) for each in (earlier, node) for t in meta_tensors(each.meta["val"])}
        lives = all(last_read.get(storage_id(t), -1) > place for t in _made(earlier))
        if not lives or not kept.isdisjoint(storages):
            latest[key] = node
            continue
        for one, other in zip(_made(earlier), _made(node), strict=True):
            read = max(last_read.get(storage_id(t), -1) for t in (one, other))
            last_read[storage_id(one)] = read
        _replace(node, earlier)


def _made(node: Node) -> list[Tensor]:
    return meta_tensors(node.meta["val"])


def _last_reads(nodes: Iterable[Node]) -> dict[int, int]:
    """For each storage the place of the last node that reads it."""
    found: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for source in node.all_input_nodes:
            for tensor in meta_tensors(source.meta.get("val")):
                found[storage_id(tensor)] = place
    return found


def _call(node: Node, number: Mapping[Node, Node]) -> Hashable | None:
    """A key that equal calls of pure operators share; None for other nodes."""
    if node.op != "call_function" or not meta_tensors(node.meta.get("val")):
        return None
    target = target_of(node)
    if not is_item(node):
        if not isinstance(target, torch._ops.OpOverload) or may_draw(target) or is_foreign(target):
            return None
        if target._schema.is_mutable:
            return None
    return (target, _key(node.args, number), _key(tuple(sorted(node.kwargs.items())), number))


def _key(argument: Any, number: Mapping[Node, Node]) -> Hashable:
    if isinstance(argument, Node):
        return number[argument]
    if isinstance(argument, list | tuple):
        return (type(argument), *(_key(item, number) for item in argument))
    if isinstance(argument, float):
        return (float, argument.hex())
    return (type(argument), argument if isinstance(argument, Hashable) else repr(argument))


def _storages_of_caller(graph: torch.fx.Graph) -> set[int]:
    """The storages of inputs, constants and tangents, and of what the graph returns."""
    owned = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    owned += graph.output_node().all_input_nodes
    return {storage_id(tensor) for node in owned for tensor in meta_tensors(node.meta.get("val"))}


def _replace(node: Node, other: Node) -> None:
    """Let the readers of a node read another one, and erase it with the calls that only it read."""
    views = [*_views(node)]
    node.replace_all_uses_with(other)
    with torch.no_grad(), with_careful_fake_cache():
        for view in views:  # their fake tensors show the storage of the node
            args, kwargs = torch.fx.node.map_arg((view.args, view.kwargs), lambda n: n.meta["val"])
            view.meta["val"] = target_of(view)(*args, **kwargs)
    unread = [node]
    while unread:
        last = unread.pop()
        if last.op == "call_function" and not last.users:
            sources = last.all_input_nodes
            last.graph.erase_node(last)
            unread += sources


def _views(node: Node) -> Iterator[Node]:
    """The views of a node's storages, in the graph's order."""
    storages = {storage_id(tensor) for tensor in meta_tensors(node.meta["val"])}
    shown = {node}
    following = node.next
    while following.op != "root":
        shares = shown.intersection(following.all_input_nodes)
        if shares and any(storage_id(t) in storages for t in meta_tensors(following.meta.get("val"))):
            shown.add(following)
            yield following
        following = following.next
