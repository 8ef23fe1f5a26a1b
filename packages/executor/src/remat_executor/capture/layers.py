"""Find the layer of each node of a trace: the name of the submodule whose call made it.

While a `LayerRecorder` is active, each call of a torch function finds the innermost module that is running on
Python's stack, and the nodes that it traces carry the name of this module. The module gets no hooks, and its
class stays unchanged. Torch copies the names to the nodes of the backward by autograd's sequence numbers.

* A submodule that is used twice, or that has two names, has its first name.
* An op outside of every submodule, such as a function that the model's own forward calls, has the name "".
* Where a graph of Dynamo is traced node by node, its nodes know the module that they were traced in.
* A sum of gradients of several modules has the name of the module around the one whose gradient comes last.
* A node of which nothing is known has the name of the module that encloses the nodes before and after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from remat_executor.fx_nodes import LAYER
from remat_executor.torch_private.module_hooks import running_modules
from remat_executor.torch_private.trace_metadata import module_path, sums_gradients
from remat_graph.layers.names import enclosing

_NOTE = "remat_layer"


class LayerRecorder(TorchFunctionMode):
    """While active, traced nodes are annotated with the module that is running."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._name_of = {id(module): name for name, module in modules}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call."""
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        name = self._running()
        if name is None:
            return func(*args, **(kwargs or {}))
        with annotate({_NOTE: name}):
            return func(*args, **(kwargs or {}))

    def _running(self) -> str | None:
        """The name of the innermost module that is running; "" if it has none, None if no module runs."""
        name = None
        for module in running_modules():
            name = self._name_of.get(id(module))
            if name is not None:
                return name
            name = ""
        return name


def name_layers(graph: torch.fx.Graph) -> None:
    """Give every node its layer (`fx_nodes.layer_of`); remove the annotations."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: i for i, node in enumerate(nodes)}
    named = {node: _recorded(node) for node in nodes}
    for node in nodes:
        if named[node] is None and sums_gradients(node):
            parts = sorted((each for each in node.all_input_nodes if each in place), key=place.__getitem__)
            named[node] = _of_sum([name for each in parts if (name := named[each]) is not None])
    after: list[str | None] = []
    following = None
    for node in reversed(nodes):
        following = following if named[node] is None else named[node]
        after.append(following)
    before = None
    for node, following in zip(nodes, reversed(after), strict=True):
        before = before if named[node] is None else named[node]
        around = [name for name in (before, following) if name is not None]
        node.meta[LAYER] = enclosing(around) if named[node] is None else named[node]


def _of_sum(names: Sequence[str]) -> str | None:
    """The layer of a sum of gradients that these layers made, the latest last; of tangents none is known."""
    if len(set(names)) <= 1:
        return names[-1] if names else None
    return names[-1].rpartition(".")[0]


def _recorded(node: Node) -> str | None:
    """The name that the trace recorded."""
    notes = node.meta.get("custom") or {}
    name: str | None = notes.pop(_NOTE, None)
    return module_path(node) or name
