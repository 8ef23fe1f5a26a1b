"""Ten models at three budgets on CUDA: bits of eager, within the budget; flags, the second device, DDP."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from remat_executor import StepOverBudget, allocator_peak
from remat_facade import Hiremate
from remat_solvers import InfeasibleBudget
from tests.helpers.acceptance import Trace, train, whole_step
from tests.helpers.models import ModelCase, get_case
from tests.helpers.on_device import dropout_distance, moved

pytestmark = pytest.mark.cuda
NAMES = (
    "gpt2",
    "llama",
    "t5",
    "vit",
    "resnet18",
    "mobilenet_v2",
    "unet_dropout",
    "tied_weights",
    "mixed_dtype",
    "stock_transformer",
)
QUICK_S = 2.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cost cache for the module: ops are measured once."""
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's own bits vary from run to run with other convolutions."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def on(device: str, case: ModelCase) -> tuple[nn.Module, Any, Any]:
    """A case's step and batches on a device, and how to get its loss."""
    model, loss = whole_step(case)
    return model.to(device), loss, lambda step: moved(case.sample(step), device)


def trained(module: nn.Module, sample: Any, loss: Any) -> tuple[Trace, Tensor]:
    """Two steps, and what the device draws after them."""
    trace = train(module, sample, loss, steps=2)
    return trace, torch.rand(8, device=next(module.parameters()).device)


def plan(model: nn.Module, sample: Any, budget: int | str, cache: Path, **options: Any) -> Hiremate:
    """A plan of a copy after a short search.

    The allocator may hand out blocks that are larger than asked for. Where that leaves no headroom, the error
    advises another budget, which is enough.
    """
    args, kwargs = sample(0)
    given = {"sample_kwargs": kwargs, "cache_dir": cache, "time_limit_s": QUICK_S, **options}
    try:
        return Hiremate(copy.deepcopy(model), args, budget, **given)
    except StepOverBudget as error:
        return Hiremate(copy.deepcopy(model), args, error.advised_nbytes, **given)


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_eager_within_each_budget(name: str, cache: Path) -> None:
    """The smallest budget, 70 % and 100 %, by the device's own count of bytes."""
    model, loss, sample = on("cuda", get_case(name))
    expected, drawn = trained(copy.deepcopy(model), sample, loss)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(model, sample, 1, cache)
    args, kwargs = sample(0)
    for budget in (int(1.02 * caught.value.smallest_nbytes), "70%", "100%"):
        planned = plan(model, sample, budget, cache)
        found, after = trained(planned, sample, loss)
        assert list(expected.differences(found)) == []
        assert torch.equal(drawn, after)
        planned.zero_grad()
        peak = allocator_peak(lambda planned=planned: loss(planned(*args, **kwargs)).backward(), "cuda")
        assert peak.peak_nbytes <= planned.plan.budget_nbytes
        assert planned.runs["planned"] == sum(planned.runs.values())


class Recurrent(nn.Module):
    """An LSTM between linear layers, whose output is viewed as eager's can be; returns its loss."""

    def __init__(self, *, batch_first: bool, bidirectional: bool) -> None:
        super().__init__()
        self.first, self.batch_first = nn.Linear(8, 12), batch_first
        self.layer = nn.LSTM(12, 16, 2, batch_first=batch_first, bidirectional=bidirectional)
        self.last = nn.Linear(32 if bidirectional else 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.first(x))[0]
        y = y.transpose(0, 1) if self.batch_first else y
        return self.last(y.flatten(0, 1).tanh()).square().mean()


@pytest.mark.parametrize(("batch_first", "bidirectional"), [(False, True), (True, False)])
def test_recurrent_layers_are_cudnns(batch_first: bool, bidirectional: bool, cache: Path) -> None:
    """With the workspaces that their backward needs, and the strides of their results."""
    model = Recurrent(batch_first=batch_first, bidirectional=bidirectional).cuda()
    x = torch.randn(5, 7, 8, device="cuda")

    def loss(output: Tensor) -> Tensor:
        return output

    copied = copy.deepcopy(model)
    copied.layer.flatten_parameters()  # copies are not, of which torch warns
    expected = train(copied, lambda step: ((x + step,), {}), loss, steps=2)
    planned = plan(model, lambda step: ((x + step,), {}), "100%", cache)
    found = train(planned, lambda step: ((x + step,), {}), loss, steps=2)
    assert list(expected.differences(found)) == []
    assert sum("cudnn_rnn" in op.target for op in planned.graph.ops) == 2
    assert planned.runs["planned"] == sum(planned.runs.values())
    planned.zero_grad()
    peak = allocator_peak(lambda: planned(x).backward(), "cuda")
    assert peak.peak_nbytes <= planned.plan.budget_nbytes


def test_another_precision_is_planned_again(cache: Path) -> None:
    """A flag of CUDA's products is part of what a plan depends on."""
    model, loss, sample = on("cuda", get_case("tied_weights"))
    args, kwargs = sample(0)
    planned = plan(model, sample, "100%", cache)
    loss(planned(*args, **kwargs)).backward()
    before = planned.graph
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.warns(match="planning again"):
            loss(planned(*args, **kwargs)).backward()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert planned.graph is not before


def test_the_second_device(tmp_path: Path) -> None:
    """While the first one is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    assert dropout_distance(tmp_path, "cuda:1") == 0.0


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of one rank, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_parts_of_a_step_under_ddp(one_rank: None, cache: Path) -> None:
    """Gradients arrive in parts, and DDP's buckets take them as they arrive."""
    model, loss, sample = on("cuda", get_case("tied_weights"))
    taken: list[int] = []

    def alone(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        taken.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def under_ddp(module: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=0.01)
        wrapped.register_comm_hook(None, alone)
        return wrapped

    expected, _ = trained(under_ddp(copy.deepcopy(model)), sample, loss)
    found, _ = trained(under_ddp(plan(model, sample, "80%", cache, part_nbytes=0)), sample, loss)
    assert list(expected.differences(found)) == []
    assert len(set(taken)) > 1
