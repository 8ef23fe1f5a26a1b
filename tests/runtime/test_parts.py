"""The backward hands its gradients over in parts, as many as are asked for."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor import BadInput, PlannedModule, step_graph
from remat_executor.lowering.gradient_segments import split_backward
from remat_graph import Deliver, Schedule
from remat_graph.platforms.base import Flops
from tests.helpers.planners import save_all

ROWS, WIDTH, LAYERS = 512, 64, 6
WEIGHT_NBYTES = 4 * WIDTH * WIDTH


class Deep(nn.Module):
    """A perceptron whose activations outweigh its weights: gradients that wait raise no peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Lists the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_device_gets_work_before_the_parts_are_prepared(tmp_path: Path) -> None:
    """A call begins with the forward's first product; what autograd needs for each part follows."""
    model, x = Deep(), torch.randn(ROWS, WIDTH)
    planned = PlannedModule(model, (x,), {}, save_all, part_nbytes=0, cache_dir=tmp_path)
    with Calls() as calls:
        planned(x).backward()
    assert planned.parts == LAYERS
    tokens = [place for place, name in enumerate(calls.names) if name.startswith("aten.empty.memory_format")]
    products = [place for place, name in enumerate(calls.names) if name == "aten.mm.default"]
    assert len(tokens) >= LAYERS - 1
    assert products[LAYERS - 1] < tokens[0]


@pytest.mark.parametrize(
    ("part_nbytes", "parts", "before_first"), [(0, 6, 2), (2 * WEIGHT_NBYTES, 3, 4), (1 << 40, 1, 11)]
)
def test_gradients_wait_together_for_so_many_bytes(
    part_nbytes: int, parts: int, before_first: int, tmp_path: Path
) -> None:
    """The first gradient comes after the products of its own part: two a layer, one for the lowest."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(ROWS, WIDTH)
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    module = PlannedModule(model, (x,), {}, save_all, cache_dir=tmp_path, part_nbytes=part_nbytes)
    products, done = Products(), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: done.append(products.count))
    loss = module(x)
    with products:
        loss.backward()
    assert module.parts == parts
    assert module.runs == {"planned": 1}
    assert len(set(done)) == parts
    assert done[0] == before_first
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("part_nbytes", [-1, 1.5, "1MiB", True])
def test_what_is_no_number_of_bytes_is_refused(part_nbytes: Any, tmp_path: Path) -> None:
    """One line."""
    sample = (torch.randn(2, WIDTH),)
    with pytest.raises(BadInput, match=r"part_nbytes is .*; give a whole number from 0 on"):
        PlannedModule(Deep(), sample, {}, save_all, cache_dir=tmp_path, part_nbytes=part_nbytes)


@pytest.mark.parametrize(("step_s", "parts"), [(1.0, 8), (5e-3, 2), (1e-3, 1)])
def test_as_many_parts_as_cost_a_hundredth_of_the_step(step_s: float, parts: int) -> None:
    """25 us each: a long step hands over each gradient by itself, a short one all at once."""
    model = nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(128, 128, bias=False), nn.Tanh()))
    )
    graph = step_graph(model, (torch.randn(2048, 128),), platform=Flops())
    factor = step_s / graph.time_s
    ops = [
        attrs.evolve(
            op,
            implementations=tuple(attrs.evolve(i, time_s=i.time_s * factor) for i in op.implementations),
        )
        for op in graph.ops
    ]
    graph = attrs.evolve(graph, ops=tuple(ops))
    found = split_backward(graph, Schedule.from_order(graph, range(len(ops))))
    assert len([part for part in found if any(isinstance(step, Deliver) for step in part)]) == parts
