"""Who reads the tensors of a captured step, and where: what a family asks before it offers a way."""

from torch.fx import Node

from remat_executor.capture.captured import Captured
from remat_executor.capture.dataflow import Dataflow
from remat_executor.fx_nodes import is_item


class Uses:
    """The readers of the storages of a captured step."""

    def __init__(self, captured: Captured) -> None:
        self.flow = Dataflow(captured)
        self.nodes = [n for n in captured.graph_module.graph.nodes if n.op == "call_function"]
        self.returned = {self.base(n) for n in captured.graph_module.graph.output_node().all_input_nodes}
        self.gradients: set[Node] = {o.tangent for o in captured.outputs if o.tangent is not None}
        self._readers: dict[Node, list[Node]] = {}
        for node in self.nodes:
            if any(self.flow.maker(source) in self.gradients for source in node.all_input_nodes):
                self.gradients.add(node)
            if not is_item(node) and not self.flow.is_view(node):
                for base in dict.fromkeys(map(self.base, node.all_input_nodes)):
                    self._readers.setdefault(base, []).append(node)

    def base(self, node: Node) -> Node:
        """The node that makes the storage which a node shows."""
        return self.flow.base_of.get(node, node)

    def readers(self, node: Node) -> list[Node]:
        """The calls that read the storage of a node, through views too."""
        return self._readers.get(self.base(node), [])

    def backward_readers(self, node: Node) -> list[Node]:
        """Those of the readers that depend on a tangent."""
        return [reader for reader in self.readers(node) if reader in self.gradients]
