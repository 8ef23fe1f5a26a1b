"""Batch norms that eager runs by cuDNN are planned with that kernel; on a CPU with a stand-in for it."""

import copy
import operator
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat_executor.capture import read_joint
from remat_executor.capture.cudnn_batch_norms import cudnn_batch_norm, use_cudnn_batch_norms
from remat_executor.runtime.opaque_ops import Opaque
from remat_facade import Hiremate

aten = torch.ops.aten


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, variance: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """The kernel's contract: it writes the statistics, and keeps bytes that its backward needs."""
    if mean is None or variance is None:
        made = aten._native_batch_norm_legit.no_stats(x, weight, bias, *rest)
    else:
        made = aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, *rest)
    return (*made, torch.full((100,), 7, dtype=torch.uint8))


def _backward(x: Tensor, gradient: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *statistics, eps, reserve = rest
    assert statistics[:2] == [None, None]
    assert reserve.shape == (100,)
    assert (reserve == 7).all()
    backward: Any = aten.native_batch_norm_backward.default
    made: tuple[Tensor, ...] = backward(gradient, x, weight, *statistics, True, eps, [True] * 3)
    return made


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for cuDNN's kernels on the CPU, which every batch norm shall take."""
    everywhere = partial(use_cudnn_batch_norms, selects=lambda *tensors: True)
    monkeypatch.setattr(read_joint, "use_cudnn_batch_norms", everywhere)  # no such kernel on a CPU
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_batch_norm", _norm, "CPU")
        library.impl("cudnn_batch_norm_backward", _backward, "CPU")
        yield


class Twice(nn.Module):
    """Convolutions with batch norms; one norm is used twice, one has no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.free = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        norms = [*self.norms, self.norms[0], self.free]
        for conv, norm in zip(self.convs, norms, strict=True):
            x = norm(conv(x)).relu() + x
        loss: Tensor = x.square().mean()
        return loss


def assert_trains_alike(eager: nn.Module, original: nn.Module, planned: nn.Module, x: Tensor) -> None:
    """Three steps of eager and of the plan of `original` have bit-identical gradients and statistics."""
    for _ in range(3):
        for module in (eager, planned):
            module.zero_grad()
            module(x).backward()
        for (name, ours), theirs in zip(original.named_parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), name
        for (name, ours), theirs in zip(original.named_buffers(), eager.buffers(), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("budget", ["45%", "100%"])
def test_the_kernel_of_eager_is_planned(cudnn: None, budget: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = Twice()
    original = copy.deepcopy(eager)
    x = torch.randn(8, 8, 24, 24)
    planned = Hiremate(original, x, budget, cache_dir=tmp_path, zoo=False)
    targets = [op.target for op in planned.graph.ops]
    assert targets.count("cudnn_batch_norm") == 5
    assert targets.count("aten.cudnn_batch_norm.default") == 1
    assert targets.count("aten.cudnn_batch_norm_backward.default") == 6
    assert not any("native_batch_norm" in target for target in targets)
    assert not any("native_batch_norm" in op.name for op in planned.graph.ops)  # errors name ops
    assert planned.graph.ops[targets.index("cudnn_batch_norm")].rerun == 1
    kept = [value.nbytes for value in planned.graph.values if value.nbytes == 100]
    assert len(kept) == 6  # the reserves, whose size only the kernel knows
    assert_trains_alike(eager, original, planned, x)
    repeated = {op for op in planned.plan.schedule.order if planned.plan.schedule.order.count(op) > 1}
    assert bool(repeated & {i for i, t in enumerate(targets) if "cudnn_batch_norm" in t}) == (budget == "45%")


def test_other_layouts_stay_with_torchs_kernel(cudnn: None, tmp_path: Path) -> None:
    """Eager would copy a transposed input; the plan keeps torch's own kernel for it."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.norm(x.transpose(2, 3)).square().mean()
            return loss

    planned = Hiremate(Transposed(), torch.randn(4, 8, 6, 10), "100%", cache_dir=tmp_path, zoo=False)
    targets = [op.target for op in planned.graph.ops]
    assert "cudnn_batch_norm" not in targets
    assert "aten._native_batch_norm_legit_functional.default" in targets


@pytest.mark.cuda
def test_the_planned_batch_norm_has_the_bits_of_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eager's own bits vary from run to run with other convolutions.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    eager = Twice().cuda()
    original = copy.deepcopy(eager)
    x = torch.randn(8, 8, 24, 24, device="cuda")
    planned = Hiremate(original, x, "45%", cache_dir=tmp_path, zoo=False, time_limit_s=2.0)
    assert "cudnn_batch_norm" in {op.target for op in planned.graph.ops}
    assert_trains_alike(eager, original, planned, x)


@pytest.mark.full  # a compiler takes seconds for each part
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiler_gets_an_operator_that_it_fuses(cudnn: None, tmp_path: Path) -> None:
    """Compiled, batch norms are torch's own again; the running statistics are written all the same."""
    torch.manual_seed(0)
    eager = Twice()
    original = copy.deepcopy(eager)
    x = torch.randn(8, 8, 24, 24)
    planned = Hiremate(original, x, "60%", cache_dir=tmp_path, zoo=False, runtime="inductor")
    for module in (eager, planned):
        module(x).backward()
    for (name, ours), theirs in zip(original.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for (name, ours), theirs in zip(original.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
        assert name.endswith("tracked") or not torch.equal(ours, torch.zeros_like(ours)), name


def test_a_compiler_sees_new_statistics_that_are_read() -> None:
    """Also of a norm whose statistics the model reads, for which nothing is written in place."""
    graph = Graph()
    placed = graph.placeholder("tensors")
    given = [graph.call_function(operator.getitem, (placed, place)) for place in range(5)]
    norm = graph.call_function(cudnn_batch_norm, (*given, True, 0.1, 1e-5))
    graph.output([graph.call_function(operator.getitem, (norm, place)) for place in (0, 4, 5)])
    tensors = [torch.randn(4, 8, 6, 6), torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8)]
    traced = make_fx(lambda *flat: Opaque(GraphModule({}, graph)).flat(*flat))(*tensors)
    assert not any("cudnn" in str(node.target) for node in traced.graph.nodes)
    expected = aten._native_batch_norm_legit_functional.default(*tensors, True, 0.1, 1e-5)
    for found, wanted in zip(traced(*tensors), (expected[0], *expected[3:]), strict=True):
        assert torch.equal(found, wanted)
