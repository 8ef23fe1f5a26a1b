"""The default runtime: fx's generated code with less Python overhead.

A step of a small model spends its time in Python, not in kernels, so each graph is optimized in two ways.
Views that equal another tensor of the graph are dropped. Operators are called by torch's own Python functions
where these make the same call, since they parse their arguments in C++; the others without the frame of
`OpOverload.__call__`. Neither changes the kernels, their order, or when a storage is freed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from remat_executor.fx_nodes import args_of, is_item, source_of, target_of
from remat_executor.lowering.runtime_protocol import GraphFunction, GraphInterface
from remat_executor.torch_private.dispatch import bare, dispatched, public_forms

aten = torch.ops.aten

_NAMES = (aten.detach.default, aten.alias.default)
_SHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_UNDONE = (aten.t.default, aten.transpose.int)
_VIEWS = frozenset((*_NAMES, *_SHAPES, *_UNDONE, aten.permute.default, aten.unsqueeze.default))

_Form = tuple[str, Any]  # the kind of an fx node and its target


class Eager:
    """Runs graphs by fx's generated code; one object serves all graphs of a step and caches call forms."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        """Prepare a copy of one graph."""
        graph = Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        fold_views(graph)
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                self._bind(node)
        run: GraphFunction = GraphModule(module, graph).forward
        return run

    def _bind(self, node: Node) -> None:
        """Let a node call its operator in the fastest way."""
        key = (node.target, *map(_kind, node.args), *((k, _kind(v)) for k, v in node.kwargs.items()))
        if key not in self._forms:
            self._forms[key] = _fastest(node)
        node.op, node.target = self._forms[key]


def fold_views(graph: Graph) -> None:
    """Drop views that equal another tensor of the graph, and unread ones, in place.

    A view that is returned stays if it would otherwise be the same object as another output or an input.
    """
    known: dict[tuple[Any, ...], Node] = {}
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        same = _equal_to(node) or known.setdefault(
            (node.target, *(tuple(a) if isinstance(a, list) else a for a in node.args)), node
        )
        if same is node or (node in returned and (same in returned or is_item(same))):
            continue
        if node in returned:
            returned.add(same)
        node.replace_all_uses_with(same)
    for node in reversed(list(graph.nodes)):
        if node.target in _VIEWS and not node.users:
            graph.erase_node(node)


def _equal_to(node: Node) -> Node | None:
    """An earlier node with the same elements, shape and strides."""
    source = source_of(node)
    if node.target in _NAMES:
        return source
    if node.target in _SHAPES and _shape(node) is not None and _shape(node) == _shape(source):
        return source
    if node.target in _UNDONE and source.target is node.target and args_of(source)[1:] == args_of(node)[1:]:
        return source_of(source)
    return None


def _shape(node: Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else None


def _kind(argument: Any) -> Any:
    """The types of an argument, which decide the overload of an operator."""
    if isinstance(argument, list | tuple):
        return tuple(map(_kind, argument))
    return type(argument)


def _fastest(node: Node) -> _Form:
    """The fastest form that makes exactly the call of a node."""
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    wanted = dispatched(target_of(node), args, kwargs)
    if wanted is not None:
        for kind, target in public_forms(node.target):
            call = getattr(Tensor, target) if kind == "call_method" else target
            if dispatched(call, args, kwargs) == wanted:
                return kind, target
    return "call_function", bare(node.target)
