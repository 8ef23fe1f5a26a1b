"""Operators whose kernels vary from run to run on CUDA are not repeated, unless torch is deterministic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat_executor import step_graph
from remat_executor.translation import translate
from remat_executor.translation.varying_kernels import may_vary
from remat_facade import Hiremate

CUDA = torch.device("cuda")
INDEX = torch.tensor([0, 1, 1])
X = torch.rand(3, 4)
IMAGE, KERNEL = torch.rand(1, 2, 5, 5), torch.rand(2, 2, 3, 3)


def varies(function: Callable[..., object], *tensors: Tensor, device: torch.device = CUDA) -> bool:
    """Whether an operator of a traced function varies; the trace is of the CPU, only names are read."""
    graph = make_fx(function)(*tensors).graph
    return any(may_vary(node, device) for node in graph.nodes if node.op == "call_function")


def gradient_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
    """The backward of a function."""
    return torch.func.grad(lambda x: function(x).sum())


VARYING: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "index_add": (lambda x: x.index_add(0, INDEX, X), (X,)),
    "scatter_add": (lambda x: x.scatter_add(0, INDEX[:, None].expand(3, 4), X), (X,)),
    "index_put": (lambda x: x.index_put((INDEX,), X, accumulate=True), (X,)),
    "embedding": (gradient_of(lambda x: F.embedding(INDEX, x)), (X,)),
    "cumsum": (lambda x: x.cumsum(0), (X,)),
    "interpolate": (gradient_of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")), (IMAGE,)),
}
CONVOLUTIONS = {
    "backward": (gradient_of(lambda x: F.conv2d(x, KERNEL)), (IMAGE,)),
    "transposed": (lambda x: F.conv_transpose2d(x, KERNEL), (IMAGE,)),
}
EXACT = {
    "mm": (lambda x: x @ x.T, (X,)),
    "convolution": (lambda x: F.conv2d(x, KERNEL), (IMAGE,)),
    "integers": (lambda x: x.index_add(0, INDEX, x), (INDEX,)),
    "index": (lambda x: x[INDEX], (X,)),
    "softmax": (gradient_of(lambda x: x.softmax(0)), (X,)),
}


@contextlib.contextmanager
def deterministic(mode: str | int) -> Iterator[None]:
    """Torch's debug mode, put back at the end."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize("name", VARYING)
def test_atomic_additions_vary(name: str) -> None:
    """On CUDA, also where torch would only warn; neither on the CPU nor by deterministic algorithms."""
    function, tensors = VARYING[name]
    assert varies(function, *tensors)
    assert not varies(function, *tensors, device=torch.device("cpu"))
    with deterministic("warn"):
        assert varies(function, *tensors)
    with deterministic("error"):
        assert not varies(function, *tensors)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_vary_unless_cudnn_is_deterministic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either flag of torch."""
    function, tensors = CONVOLUTIONS[name]
    assert varies(function, *tensors)
    with deterministic("error"):
        assert not varies(function, *tensors)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert not varies(function, *tensors)


@pytest.mark.parametrize("name", EXACT)
def test_others_do_not(name: str) -> None:
    """Sums of integers among them, which are exact in any order."""
    function, tensors = EXACT[name]
    assert not varies(function, *tensors)


class Gathers(nn.Module):
    """Sums rows by an index between layers whose results are worth recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("index", torch.arange(64) % 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + torch.zeros_like(x).index_add(0, self.index, x).sigmoid()
        return x.square().mean()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_they_run_once_in_a_plan(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here with the CPU's kernels under its rule. The plan recomputes others."""
    monkeypatch.setattr(translate, "may_vary", lambda node, _: may_vary(node, CUDA))
    model, x = Gathers().to(device), torch.rand(64, 16, device=device)
    module = Hiremate(model, x, "75%", cache_dir=tmp_path, solver="greedy")
    ops = module.graph.ops
    once = [i for i, op in enumerate(ops) if op.rerun is None]
    assert ["aten.index_add.default"] * 3 == [ops[i].target for i in once]
    runs = module.plan.schedule.order
    assert len(runs) > len(ops)
    assert all(runs.count(i) == 1 for i in once)
    if device == "cpu":  # on CUDA, cuBLAS refuses this mode without a setting of the environment
        with deterministic("error"):
            graph = step_graph(model, (x,), cache_dir=tmp_path)
        assert all(op.rerun == 0 for op in graph.ops)
