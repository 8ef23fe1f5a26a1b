"""The eager runtime drops what shows nothing new and calls operators in the quickest way, no others."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from remat_executor.lowering.runtime_protocol import GraphInterface
from remat_executor.runtime.eager import Eager, fold_views
from remat_executor.torch_private.pytrees import flatten

aten = torch.ops.aten


class Builder:
    """A lowered graph by hand: takes a list of tensors, whose values are noted as capture notes them."""

    def __init__(self, *inputs: Tensor) -> None:
        self.graph = Graph()
        self.tensors = self.graph.placeholder("tensors")
        self.inputs = [self.call(operator.getitem, self.tensors, i, value=t) for i, t in enumerate(inputs)]
        self.graph.call_method("clear", (self.tensors,))

    def call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Node:
        """Add a call."""
        node = self.graph.call_function(target, args, kwargs)
        if value is None:
            given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            value = target(*given[0], **given[1])
        node.meta["val"] = value
        return node

    def module(self, *results: Node) -> GraphModule:
        """The finished graph."""
        self.graph.output(list(results))
        return GraphModule({}, self.graph)


def calls(graph: Graph) -> list[str]:
    """What a graph computes, without the unpacking of its list."""
    nodes = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    return [str(n.target) for n in nodes if n.target not in (operator.getitem, "clear")]


def test_views_that_show_nothing_new_are_dropped() -> None:
    """Second names, same shapes, what is undone, the same view twice, and what nobody reads."""
    x = torch.randn(2, 3)
    build = Builder(x)
    (given,) = build.inputs
    named = build.call(aten.view.default, build.call(aten.detach.default, given), [2, 3])
    back = build.call(aten.t.default, build.call(aten.t.default, named))
    first, second = (build.call(aten.view.default, given, [6]) for _ in range(2))
    build.call(aten.unsqueeze.default, given, 0)
    added = build.call(aten.add.Tensor, first, second)
    module = build.module(build.call(aten.mul.Tensor, back, 2.0), added)
    fold_views(module.graph)
    assert calls(module.graph) == ["aten.view.default", "aten.add.Tensor", "aten.mul.Tensor"]
    module.recompile()
    doubled, sums = module([x])
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(sums, 2 * x.flatten())


def test_what_is_returned_stays_a_tensor_of_its_own() -> None:
    """A result is neither the caller's tensor nor another result, whatever it shows."""
    x = torch.randn(2, 3)
    build = Builder(x)
    (given,) = build.inputs
    made = build.call(aten.mul.Tensor, given, 2.0)
    run = Eager()(
        build.module(
            build.call(aten.detach.default, given),
            made,
            build.call(aten.detach.default, made),
            build.call(aten.view.default, made, [2, 3]),
        ),
        GraphInterface(stable_inputs=0, results=4),
    )
    results = run([x])
    assert len({id(t) for t in (x, *results)}) == 5
    assert results[2].data_ptr() == results[3].data_ptr() == results[1].data_ptr()


def test_each_call_reaches_the_same_operator() -> None:
    """Also where Python's function of that name means another overload, or takes numbers otherwise."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    build = Builder(x, y)
    a, b = build.inputs
    made = [
        build.call(aten.add.Tensor, a, b, alpha=2),
        build.call(aten.mul.Tensor, a, 0.5),
        build.call(aten.mul.Scalar, a, 3),
        build.call(aten.pow.Tensor_Scalar, a, 2),
        build.call(aten.sum.dim_IntList, a, [0], True),
        build.call(aten.mm.default, a, b),
        build.call(aten.threshold_backward.default, a, b, 0),
        build.call(aten.gelu.default, a, approximate="tanh"),
        build.call(aten._softmax.default, a, -1, False),
        build.call(aten.native_layer_norm.default, a, [4], None, None, 1e-5),
        build.call(aten.split.Tensor, a, 2),
        build.call(aten.view.default, a, [16]),
        build.call(aten.clone.default, a, memory_format=torch.contiguous_format),
        build.call(aten.scalar_tensor.default, 1.0, dtype=torch.float32, device=torch.device("cpu")),
    ]
    seen: dict[str, list[str]] = {}
    interface = GraphInterface(stable_inputs=0, results=14)
    module = build.module(*made)
    for name, run in (
        ("plain", module.forward),
        ("quick", Eager()(module, interface)),
    ):
        seen[name] = []
        with Listen(seen[name]):
            flat = flatten(run([x, y]))[0]
        seen[f"{name} results"] = [repr(t) for t in flat]
    assert seen["plain"] == seen["quick"]
    assert len(seen["plain"]) == len(made)
    assert seen["plain results"] == seen["quick results"]


class Listen(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notes.append(str(func))
        return func(*args, **(kwargs or {}))
