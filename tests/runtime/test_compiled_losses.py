"""The backward of a loss as compilers get it: no tensor of the logits' size in addition to the logits."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat_executor.runtime.opaque_ops import Opaque
from remat_executor.torch_private.inductor import inductor_decompositions

aten = torch.ops.aten
CLASSES, IGNORED = 5, 3
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def compiled(target: Any, tensors: list[Tensor], *rest: Any) -> GraphModule:
    """What a compiler gets of one call, whose last tensor is its last argument."""
    graph = Graph()
    argument = graph.placeholder("tensors")
    *given, last = (graph.call_function(operator.getitem, (argument, i)) for i in range(len(tensors)))
    weight = [] if len(tensors) == 5 else [None]
    graph.output([graph.call_function(target, (*given, *weight, *rest, last))])
    opaque = Opaque(GraphModule({}, graph))
    found: GraphModule = make_fx(torch.func.functionalize(opaque.flat), inductor_decompositions())(*tensors)
    return found


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "shape", [(7, CLASSES), (CLASSES,), (2, CLASSES, 3, 4)], ids=["rows", "one", "pixels"]
)
@pytest.mark.parametrize("counted", [True, False])
def test_the_gradient_of_a_loss(
    reduction: str, weighted: bool, shape: tuple[int, ...], counted: bool
) -> None:
    """As torch's own within rounding, also where targets are ignored, or all are and none is counted."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    where = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = torch.randint(CLASSES, where, generator=generator)
    target = target if counted else torch.full_like(target, IGNORED)
    weight = torch.rand(CLASSES, generator=generator) if weighted else None
    pixels = len(shape) == 4
    forward = aten.nll_loss2d_forward.default if pixels else aten.nll_loss_forward.default
    backward = aten.nll_loss2d_backward.default if pixels else aten.nll_loss_backward.default
    options = (REDUCTIONS[reduction], IGNORED)
    loss, total_weight = forward(x, target, weight, *options)
    gradient = torch.rand(loss.shape, generator=generator)
    expected = backward(gradient, x, target, weight, *options, total_weight)
    tensors = [gradient, x, target, *([weight] if weight is not None else []), total_weight]
    traced = compiled(backward, tensors, *options)
    (found,) = traced(*tensors)
    torch.testing.assert_close(found, expected)
    called = {str(node.target) for node in traced.graph.nodes}
    assert not any("scatter" in name or "nll_loss" in name for name in called)
