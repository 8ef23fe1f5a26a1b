"""Split a lowered graph before each repeat, so that no piece contains a computation and its recomputation.

A compiler that sees both may fuse them, so that the first result lives until the second is needed. Only
tensors cross from piece to piece, and each piece takes over its inputs that no later piece reads.
"""

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from remat_executor.fx_nodes import args_of, is_item
from remat_executor.lowering.runtime_protocol import GraphFunction


@attrs.define(kw_only=True, eq=False)
class Piece:
    """Consecutive nodes of a lowered graph, as a lowered graph of their own."""

    module: GraphModule  # takes a list of tensors, empties it, and returns a list
    takes: tuple[Node, ...]  # the nodes whose values it takes
    last: frozenset[Node]  # those of them that nothing reads later
    gives: tuple[Node, ...]  # the nodes whose values it returns
    compiled: GraphFunction | None = None  # None until it is compiled
    runs_compiled: bool = True  # or else as it was lowered

    @property
    def size(self) -> int:
        """The number of its nodes."""
        return len(self.module.graph.nodes)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run it; it is compiled, or to run uncompiled."""
        if self.runs_compiled and self.compiled is not None:
            return self.compiled(tensors)
        found: list[Tensor] = self.module.forward(tensors)
        return found


@attrs.frozen(kw_only=True, eq=False)
class Pieces:
    """The pieces of a lowered graph in order."""

    entries: tuple[Node, ...]  # the nodes of the tensors in its list, in the list's order
    pieces: tuple[Piece, ...]
    results: tuple[Node, ...]  # the nodes that it returns

    def inputs(self, piece: Piece, live: dict[Node, Tensor]) -> list[Tensor]:
        """The inputs of a piece, removed from `live` after their last read."""
        return [live.pop(node) if node in piece.last else live[node] for node in piece.takes]


def split_at_repeats(module: GraphModule) -> Pieces:
    """Split a lowered graph before each op that its piece has already computed."""
    argument = module.graph.find_nodes(op="placeholder")[0]
    entries = sorted((n for n in argument.users if is_item(n)), key=lambda n: args_of(n)[1])
    known = {argument, *entries, module.graph.output_node()}
    nodes = [n for n in module.graph.nodes if n not in known and n.op != "call_method"]
    results = args_of(module.graph.output_node())[0]
    groups: list[list[Node]] = [[]]
    number: dict[Node, Hashable] = {entry: entry for entry in entries}
    seen: set[Hashable] = set()
    for node in nodes:
        number[node] = name = _computation(node, number)
        computes = not is_item(node) and not getattr(node.target, "is_view", False) and node.all_input_nodes
        if computes and name in seen and _tensors_cross(groups[-1], node):
            groups.append([])
            seen.clear()
        if computes:
            seen.add(name)
        groups[-1].append(node)
    found = []
    for i, group in enumerate(groups):
        later = {source for g in groups[i + 1 :] for node in g for source in node.all_input_nodes}
        found.append(_piece(group, later | set(results)))
    return Pieces(entries=tuple(entries), pieces=tuple(found), results=tuple(results))


def _computation(node: Node, number: dict[Node, Hashable]) -> Hashable:
    """A key of what a node computes: equal for an op, its repeat, and their in-place forms."""
    name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))
    args, kwargs = args_of(node), {k: v for k, v in node.kwargs.items() if k not in ("out", "grad_input")}
    if name in ("_native_batch_norm_legit", "cudnn_batch_norm"):
        args = args[:3]  # a repeat has no running statistics
    # A hash keeps the keys of a deep graph short.
    return hash((name.removesuffix("_"), _key((args, sorted(kwargs.items())), number)))


def _key(argument: Any, number: dict[Node, Hashable]) -> Hashable:
    if isinstance(argument, Node):
        return number[argument]
    if isinstance(argument, list | tuple):
        return tuple(_key(a, number) for a in argument)
    return (type(argument), repr(argument))


def _tensors_cross(group: Sequence[Node], node: Node) -> bool:
    """Whether a split before this node keeps every op with several results together with its getitems."""
    inside = {*group}
    return all(user in inside for made in group for user in made.users if is_item(user))


def _piece(group: Sequence[Node], later: set[Node]) -> Piece:
    inside = {*group}
    takes = tuple(dict.fromkeys(s for node in group for s in node.all_input_nodes if s not in inside))
    gives = tuple(node for node in group if node in later)
    graph = Graph()
    argument = graph.placeholder("tensors")
    copies = {n: graph.call_function(operator.getitem, (argument, i)) for i, n in enumerate(takes)}
    graph.call_method("clear", (argument,))
    for node in group:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in gives])
    return Piece(
        module=GraphModule({}, graph),
        takes=takes,
        last=frozenset(n for n in takes if n not in later),
        gives=gives,
    )
