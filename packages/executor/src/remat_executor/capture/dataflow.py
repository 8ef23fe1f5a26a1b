"""Dataflow of a captured graph: storages, views, and the order of forward and backward.

Nodes whose fake tensors share a storage are views of one another. Views are not ops; they are replayed where
an op reads them. The backward keeps the order of the nodes that depend on a tangent. Any other node that only
the backward needs is placed right before its first reader; otherwise all recomputation would move to the
front.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.dropout_rounding import noise_dropout
from remat_executor.capture.repeatable_batch_norms import arguments_read, repeatable_batch_norms
from remat_executor.errors import CaptureError
from remat_executor.fx_nodes import (
    args_of,
    is_foreign,
    is_item,
    may_draw,
    meta_tensors,
    operator_of,
    source_of,
    switches_dropout_off,
)
from remat_executor.torch_private.tensors import storage_id


def is_random(node: Node) -> bool:
    """Whether a node draws from a generator, or may do so."""
    operator = operator_of(node)
    if is_foreign(operator):
        return bool(meta_tensors(node.meta["val"]))
    if operator is noise_dropout:
        return True
    # Attention kernels are tagged as random because of a dropout that most calls switch off.
    return may_draw(operator) and not switches_dropout_off(node)


class Dataflow:
    """The storages of a captured graph and their readers.

    Attributes:
        base_of: fx node -> node whose storage it shows (itself unless it is a view).
        norms: train-mode batch norm -> the buffers with its running mean and variance.
    """

    def __init__(self, captured: Captured) -> None:
        """Follow the storages of a captured graph.

        Raises:
            CaptureError: an op shares storage in a way that cannot be followed.
        """
        self.captured = captured
        self.base_of: dict[Node, Node] = {}
        self._find_bases()
        self.norms, statistics = repeatable_batch_norms(captured)
        self.base_of.update((new, self.base_of[old]) for new, old in statistics.items())

    def _find_bases(self) -> None:
        owner: dict[int, Node] = {}
        for node in self.captured.graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.base_of[node] = node
                value = node.meta.get("val")
                if isinstance(value, Tensor):
                    owner.setdefault(storage_id(value), node)
            elif node.op == "call_function":
                self._find_base(node, owner)

    def _find_base(self, node: Node, owner: dict[int, Node]) -> None:
        value = node.meta.get("val")
        if is_item(node) and source_of(node) in self.base_of and isinstance(value, Tensor):
            source, place = args_of(node)
            if self.is_view(source):
                self.base_of[node] = self.base_of[source]
                return
            made = source.meta["val"][place]
            base = self.base_of[node] = owner.setdefault(storage_id(made), node)
            same = (base.meta["val"].shape, base.meta["val"].stride()) == (made.shape, made.stride())
            if base is not node and not (is_item(base) and source_of(base) is source and same):
                raise CaptureError(
                    problem=f"output {place} of {source.target} shares a storage with {base}",
                    advice="wrap a submodule that does not use it",
                )
            return
        if isinstance(value, Tensor):
            # Inputs may share a storage: a view belongs to the input that it was taken from.
            storage = storage_id(value)
            source = next((a for a in node.all_input_nodes if _storage(a) == storage), None)
            self.base_of[node] = self.base_of[source] if source else owner.setdefault(storage, node)
        elif isinstance(value, list | tuple):
            known = [owner.get(storage_id(v)) for v in value if isinstance(v, Tensor)]
            shared = known[0] if known and known[0] is not None and len(set(known)) == 1 else None
            self.base_of[node] = shared if shared is not None else node

    def is_view(self, node: Node) -> bool:
        """Whether a node shows a storage that another node made."""
        return self.base_of.get(node, node) is not node

    def reads(self, node: Node) -> Iterator[Node]:
        """The calls that make the storages which a node reads."""
        return map(self.maker, self.arguments(node))

    def arguments(self, node: Node) -> list[Node]:
        """The tensor arguments that are read: not the running statistics of a train-mode norm."""
        args: tuple[Any, ...] = node.args
        read = args[:3] if node in self.norms else arguments_read(node, args)
        return [a for a in node.all_input_nodes if read is args or a in read]

    def maker(self, node: Node) -> Node:
        """The call that makes the storage of a node."""
        base = self.base_of.get(node, node)
        return source_of(base) if is_item(base) else base

    def order(self) -> tuple[list[Node], list[Node]]:
        """The compute nodes of the forward and of the backward, in the order the graph gets."""
        nodes = [
            n
            for n in self.captured.graph_module.graph.nodes
            if n.op == "call_function" and not is_item(n) and not self.is_view(n)
        ]
        depends = {o.tangent for o in self.captured.outputs if o.tangent is not None}
        for node in nodes:
            if any(source in depends for source in self.reads(node)):
                depends.add(node)
        results = [o.node for o in self.captured.outputs if not o.replayed]
        results += [new for _, new in self.captured.mutations]
        # A norm updates its statistics whether or not its result is read, and no later norm reads them.
        roots = [*(self.maker(n) for n in results), *self.norms]
        roots += [n for n in nodes if is_random(n) and n not in depends]
        # A node that reads a caller's tensor which the forward overwrites must run before the write.
        overwritten = {target for target, _ in self.captured.mutations}
        roots += [n for n in nodes if n not in depends and not overwritten.isdisjoint(self.reads(n))]
        in_forward = self._ancestors(roots)
        wanted = self._ancestors([self.maker(g) for _, g in self.captured.gradients])
        forward = [n for n in nodes if n in in_forward]
        backward: list[Node] = []
        placed = set(forward)

        def place(node: Node) -> None:
            # An explicit stack: chains of nodes can be deeper than Python's recursion limit.
            stack = [(node, self.reads(node))]
            while stack:
                current, sources = stack[-1]
                source = next(sources, None)
                if source is None:
                    stack.pop()
                    if current not in placed and current.op == "call_function":
                        placed.add(current)
                        backward.append(current)
                elif source not in placed and source.op == "call_function":
                    stack.append((source, self.reads(source)))

        for node in nodes:
            if node in wanted and node in depends:
                place(node)
        for _, gradient in self.captured.gradients:
            place(self.maker(gradient))
        return forward, backward

    def _ancestors(self, roots: Iterable[Node]) -> set[Node]:
        seen = set(roots)
        stack = list(seen)
        while stack:
            for source in self.reads(stack.pop()):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return seen


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return storage_id(value) if isinstance(value, Tensor) else None
