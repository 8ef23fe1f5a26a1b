"""Rewrites of a captured graph that cost nothing and keep every bit.

* A copy with the layout of its source is dropped: nothing is written in a functional graph.
* Of equal calls, a later one gives way to an earlier one whose result lives until then anyway.
* A write into a slice reads what is written, and not a copy of it with the layout of the slice.
* The backward of hardtanh and leaky_relu reads the result, which what comes next usually keeps, and not the
  input, where this costs no bytes.
* The backward of a relu whose result is only pooled masks the gradient of what was pooled, which is smaller.

What the caller owns or gets (inputs, outputs, gradients) keeps its storage and its readers: the caller may
write to it. Draws stay, since each advances a generator.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from remat_executor.fx_nodes import is_foreign, is_item, may_draw, meta_tensors, operator_of, target_of
from remat_executor.torch_private.fake_tensors import with_careful_fake_cache
from remat_executor.torch_private.tensors import storage_id

aten = torch.ops.aten
_WRITES = (aten.slice_scatter.default, aten.select_scatter.default)  # the second argument into the first


_POOLS: Mapping[Any, Any] = {  # the backward of max pooling: its forward
    aten.max_pool2d_with_indices_backward.default: aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default: aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool2d_backward.default: aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d_backward.default: aten.adaptive_max_pool3d.default,
}


def rewrite(graph: torch.fx.Graph, tangents: Iterable[Node]) -> None:
    """Apply all rewrites, in place."""
    drop_clones(graph)
    drop_laid_out_copies(graph)
    merge_equal_calls(graph)
    read_results(graph)
    mask_before_pooling(graph, tangents)


def mask_before_pooling(graph: torch.fx.Graph, tangents: Iterable[Node]) -> None:
    """Mask the gradient of a pooled relu before the backward of max pooling, and not its result.

    A window's maximum is the element that gets the gradient, so the backward of relu compares the same number
    in both. Elements that get none are zero in both. Only where the backward reads the maxima anyway.
    """
    kept = _storages_of_caller(graph)
    backward = set(tangents)
    for node in graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    masked = []
    for node in graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        gradient, result, threshold = node.args
        pooled_backward = _pooled_backward(node)
        maxima = None if pooled_backward is None else _maxima(pooled_backward, result)
        storages = {storage_id(each.meta["val"]) for each in (node, maxima) if each is not None}
        if pooled_backward is None or maxima is None or not kept.isdisjoint(storages):
            continue
        readers = {user for view in (maxima, *_views(maxima)) for user in view.users}
        if backward.isdisjoint(readers):
            continue
        given: Any = pooled_backward.args[0]
        with graph.inserting_before(pooled_backward):
            small = graph.call_function(node.target, (given, maxima, threshold))
        with torch.no_grad(), with_careful_fake_cache():
            small.meta["val"] = target_of(node)(given.meta["val"], maxima.meta["val"], threshold)
        pooled_backward.replace_input_with(given, small)
        _replace(node, gradient)
        masked.append(node)
    erase_unread(masked)


def _pooled_backward(node: Node) -> Node | None:
    """The backward of max pooling whose result, or a view of the same shape, only this node reads."""
    source: Any = node.args[0]
    seen = source.meta["val"]
    while len(source.users) == 1 and source.op == "call_function":
        if source.target in _POOLS:
            return source if _strides(source.meta["val"]) == _strides(seen) else None
        made = source.meta["val"]  # of a call with several results a tuple
        if not isinstance(made, Tensor) or storage_id(made) != storage_id(seen):
            return None
        source = source.args[0]
    return None


def _maxima(backward: Node, pooled: Any) -> Node | None:
    """What max pooling made of a tensor, given its backward."""
    indices: Any = backward.args[-1]
    forward = indices.args[0] if is_item(indices) else None
    if forward is None or forward.target is not _POOLS[backward.target]:
        return None
    one, other = forward.args[0].meta["val"], pooled.meta["val"]
    same = storage_id(one) == storage_id(other) and one.storage_offset() == other.storage_offset()
    items = [user for user in forward.users if user.args[1] == 0]
    return items[0] if same and _strides(one) == _strides(other) and items else None


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions with several elements."""
    return [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


def read_results(graph: torch.fx.Graph) -> None:
    """Let a backward read a result from which the same comparisons follow as from the input.

    Only where the bytes that live do not grow: the result lives longer then, and the input shorter.
    """
    kept = _storages_of_caller(graph)
    nodes = list(graph.nodes)
    reads = _reads(nodes)
    results: dict[Hashable, Node] = {}  # of the calls so far
    for place, node in enumerate(nodes):
        if node.target in (aten.hardtanh.default, aten.leaky_relu.default):
            results[(node.target, *_with_defaults(node))] = node
        result = results.get(_call_with_same_comparisons(node))
        if result is None:
            continue
        gradient, x, *rest = _with_defaults(node)
        storage, other = storage_id(x.meta["val"]), storage_id(result.meta["val"])
        reads[storage].remove(place)
        last, last_other = (max(reads.get(each, ()), default=-1) for each in (storage, other))
        free = last_other > place or (last_other >= last and last < place and storage not in kept)
        if free and other not in kept:
            if node.target is aten.leaky_relu_backward.default:
                rest[-1] = True  # `self_is_result`
            node.args, node.kwargs, storage = (gradient, result, *rest), {}, other
        reads[storage].append(place)


def _call_with_same_comparisons(node: Node) -> Hashable | None:
    """For a backward that compares its input with bounds: the call whose result may be compared instead."""
    if node.target is aten.hardtanh_backward.default:
        _, x, *bounds = _with_defaults(node)
        # A result is at a bound exactly where the input is at or beyond it. In half precision the result is
        # rounded, and the bound with which the backward compares is not.
        dtype = x.meta["val"].dtype
        exact = dtype.itemsize >= 4 or torch.tensor(bounds, dtype=dtype).tolist() == bounds
        return (aten.hardtanh.default, x, *bounds) if exact and bounds[0] <= bounds[1] else None
    if node.target is aten.leaky_relu_backward.default:
        _, x, slope, is_result = _with_defaults(node)
        # A negative slope changes signs.
        return (aten.leaky_relu.default, x, slope) if slope >= 0 and not is_result else None
    return None


def _with_defaults(node: Node) -> tuple[Any, ...]:
    """The positional arguments of an operator's call, with the defaults of those that are left out."""
    names = [argument.name for argument in target_of(node)._schema.arguments]
    defaults = [argument.default_value for argument in target_of(node)._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return tuple(given.get(name, default) for name, default in zip(names, defaults, strict=True))


def drop_clones(graph: torch.fx.Graph) -> None:
    """Let the readers of a copy with the layout of its source read the source."""
    kept = _storages_of_caller(graph)
    dropped = []
    clones = graph.find_nodes(op="call_function", target=aten.clone.default)
    copies = graph.find_nodes(op="call_function", target=aten.copy.default)
    for place, node in [*((0, node) for node in clones), *((1, node) for node in copies)]:
        source: Any = node.args[place]
        one, other = source.meta["val"], node.meta["val"]
        same = _content(one) == _content(other) and _place(one) == _place(other)
        if same and kept.isdisjoint((storage_id(one), storage_id(other))):
            _replace(node, source)
            dropped.append(node)
    erase_unread(dropped)


def _content(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())


def drop_laid_out_copies(graph: torch.fx.Graph) -> None:
    """Let a write into a slice read its source: a copy laid out as the slice is as large as the whole.

    Not where the source is a part of what is written into: then the write could not be in place.
    """
    kept = _storages_of_caller(graph)
    dropped = []
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        source: Any = node.args[1]
        one = source.meta["val"]
        written = [user.args[0] for user in node.users if user.target in _WRITES and user.args[0] is not node]
        storages = {storage_id(tensor) for each in written for tensor in _made(each)}
        only_written = written and len(written) == len(node.users)
        same = _content(one) == _content(node.meta["val"])
        if only_written and same and storage_id(one) not in kept | storages:
            _replace(node, source)
            dropped.append(node)
    erase_unread(dropped)


def merge_equal_calls(graph: torch.fx.Graph) -> None:
    """Let the readers of a call read an equal, earlier one, if its result is read later still.

    So nothing lives longer than the two results did. Calls are equal if their arguments are, or are results
    of equal calls.
    """
    kept = _storages_of_caller(graph)
    nodes = list(graph.nodes)
    last_read = {storage: places[-1] for storage, places in _reads(nodes).items()}
    number: dict[Node, Node] = {}  # of equal calls the same
    latest: dict[Hashable, Node] = {}
    merged = []
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
        storages = {storage_id(tensor) for each in (earlier, node) for tensor in _made(each)}
        lives = all(last_read.get(storage_id(t), -1) > place for t in _made(earlier))
        if not lives or not kept.isdisjoint(storages):
            latest[key] = node
            continue
        for one, other in zip(_made(earlier), _made(node), strict=True):
            read = max(last_read.get(storage_id(t), -1) for t in (one, other))
            last_read[storage_id(one)] = read
        _replace(node, earlier)
        merged.append(node)
    erase_unread(merged)  # not before: an equal call may follow one that nothing reads


def _made(node: Node) -> list[Tensor]:
    return meta_tensors(node.meta["val"])


def _reads(nodes: Iterable[Node]) -> dict[int, list[int]]:
    """For each storage the places of the nodes that read it."""
    found: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        sources = [meta_tensors(source.meta.get("val")) for source in node.all_input_nodes]
        for storage in {storage_id(tensor) for tensors in sources for tensor in tensors}:
            found.setdefault(storage, []).append(place)
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
    return (type(argument), repr(argument))  # 0.0 == -0.0


def _storages_of_caller(graph: torch.fx.Graph) -> set[int]:
    """The storages of inputs, constants and tangents, and of what the graph returns."""
    owned = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    owned += graph.output_node().all_input_nodes
    return {storage_id(tensor) for node in owned for tensor in meta_tensors(node.meta.get("val"))}


def _replace(node: Node, other: Node) -> None:
    """Let the readers of a node read another one."""
    views = _views(node)
    node.replace_all_uses_with(other)
    with torch.no_grad(), with_careful_fake_cache():
        for view in views:  # their fake tensors show the storage of the node
            args, kwargs = torch.fx.node.map_arg((view.args, view.kwargs), lambda n: n.meta["val"])
            view.meta["val"] = target_of(view)(*args, **kwargs)


def _views(node: Node) -> list[Node]:
    """The views of a node's storages, each after the one that it was taken from."""
    storages = {storage_id(tensor) for tensor in _made(node)}
    shown = [node]
    for each in shown:  # grows meanwhile
        for user in each.users:
            if any(storage_id(tensor) in storages for tensor in meta_tensors(user.meta.get("val"))):
                shown.append(user)
    return shown[1:]


def erase_unread(nodes: Iterable[Node]) -> None:
    """Erase calls that nothing reads, and then those that only they read."""
    unread = dict.fromkeys(nodes)
    while unread:
        node, _ = unread.popitem()
        if node.op == "call_function" and not node.users and not may_draw(operator_of(node)):
            unread.update(dict.fromkeys(node.all_input_nodes))
            node.graph.erase_node(node)
