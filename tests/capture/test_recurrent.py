"""The flat weights and the gradients of cuDNN's recurrent layers, in graphs as torch traces them."""

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from remat_executor.capture.recurrent import (
    cudnn_rnn_backward,
    flatten_gradients,
    reads_opaque_bytes,
    separate_flat_weights,
)
from remat_executor.fx_nodes import args_of
from remat_executor.stride_rules import KernelLayouts
from remat_executor.translation.varying_kernels import may_vary

aten = torch.ops.aten
LAYER: tuple[Any, ...] = (
    1,
    6,
    0,
    1,
    True,
    0.0,
    True,
    False,
    [],
    None,
)  # sizes, layers, batch first, ...


def tensor(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def item(graph: Graph, node: Node, place: int) -> Node:
    found = graph.call_function(getitem, (node, place))
    found.meta["val"] = node.meta["val"][place]
    return found


def traced(*, given: bool) -> tuple[Graph, Node, Node, list[Node]]:
    """A layer with its backward, whose gradients of weights are read; and the node of its flat weights."""
    graph = Graph()
    x, weight, hx, flat = (graph.placeholder(name) for name in ("x", "weight", "hx", "flat"))
    weights = flat if given else None
    layer = graph.call_function(aten._cudnn_rnn.default, (x, [weight], 4, weights, hx, None, *LAYER))
    flat_tensor = tensor(100) if given else None
    layer.meta["val"] = (tensor(2, 3, 6), tensor(1, 2, 6), tensor(0), tensor(0), flat_tensor)
    output, reserve = item(graph, layer, 0), item(graph, layer, 3)
    read = item(graph, layer, 4) if given else None
    gradients = (output, output, None, None)
    backward = graph.call_function(
        aten._cudnn_rnn_backward.default,
        (x, [weight], 4, read, hx, None, *gradients, *LAYER, reserve, [True] * 4),
    )
    made: Any = (tensor(2, 3, 5), tensor(1, 2, 6), None, [tensor(24, 5), tensor(24, 6)])
    backward.meta["val"] = made
    several = item(graph, backward, 3)
    results = [item(graph, backward, 0), item(graph, several, 0), item(graph, several, 1)]
    graph.output(tuple(results))
    return graph, layer, flat, results


@pytest.mark.parametrize("given", [True, False])
def test_the_backward_reads_the_weights_that_the_forward_used(given: bool) -> None:
    """Those that were given, or those that the forward made: no result shares a storage with an argument."""
    graph, layer, flat, results = traced(given=given)
    separate_flat_weights(graph)
    flatten_gradients(graph)
    graph.lint()
    backward = args_of(results[0])[0]
    read = backward.args[3]
    if given:
        assert read is flat
        assert not [user for user in layer.users if args_of(user)[1] == 4]
    else:
        assert (read.target, read.args) == (getitem, (layer, 4))
    assert layer.meta["val"][4].numel() == 0
    assert backward.target is cudnn_rnn_backward
    assert reads_opaque_bytes(backward.target)
    assert may_vary(backward, torch.device("cuda"))
    assert not may_vary(backward, torch.device("cpu"))
    assert [result.args for result in results] == [(backward, 0), (backward, 3), (backward, 4)]
    assert [made.shape for made in backward.meta["val"] if made is not None][-2:] == [(24, 5), (24, 6)]


@pytest.mark.parametrize(("batch_first", "expected"), [(True, (6, 12, 1)), (False, (18, 6, 1))])
def test_steps_are_outside_in_memory(batch_first: bool, expected: tuple[int, ...]) -> None:
    """Also where the batch comes first."""
    layer = (*LAYER[:4], batch_first, *LAYER[5:])
    args: tuple[Any, ...] = (tensor(2, 3, 5), [], 4, None, tensor(1, 2, 6), None, *layer)
    results = (tensor(2, 3, 6), tensor(1, 2, 6))
    output, _ = KernelLayouts(None).corrected(aten._cudnn_rnn.default, args, {}, results)
    assert output.stride() == expected
