"""`limit_memory(model, budget, loss=fn)`: the caller's loss is computed within the plan."""

from __future__ import annotations

import copy
import gc
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import BadInput, CaptureError, MemoryMeter
from remat_facade import limit_memory, planned, release
from remat_graph import get_platform

CLASSES = 6000


def both(output: Tensor, target: Tensor) -> Any:
    return output, target


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 8, generator=generator), torch.randint(0, CLASSES, (256,), generator=generator)


def options(cache: Path) -> dict[str, Any]:
    return {"cache_dir": cache, "platform": get_platform("flops"), "zoo": False}


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), smoothed])
def test_loss_and_gradients_are_eagers_and_outputs_stay(loss: Any, tmp_path: Path) -> None:
    """The class, the keys of the state dict and a call without a target are the original's."""
    model, eager = network(), network()
    assert limit_memory(model, "100%", loss=loss, **options(tmp_path)) is model
    x, y = batch()
    for each, called in ((model, lambda: model(x, target=y)), (eager, lambda: loss(eager(x), y))):
        torch.manual_seed(2)
        found = called()
        found.backward()
        each.found = found.detach()
    assert torch.equal(model.found, eager.found)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert isinstance(model, nn.Sequential)
    assert list(model.state_dict()) == list(eager.state_dict())
    with torch.no_grad():
        torch.manual_seed(3)
        mine = model(x)
        torch.manual_seed(3)
        assert torch.equal(mine, eager(x))
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 1
    again = copy.deepcopy(model)
    with torch.no_grad():
        again[0].weight.zero_()
        assert not torch.equal(again.eval()(x), model.eval()(x))


def test_the_budget_holds_the_loss_and_its_ways(tmp_path: Path) -> None:
    """Outside of the model, the loss adds its tensors to the budget; inside, a way makes them smaller."""
    x, y = batch()
    logits_nbytes = 256 * CLASSES * 4
    model = limit_memory(network(), 3 * logits_nbytes, loss=F.cross_entropy, **options(tmp_path))
    with MemoryMeter(model, x, y) as meter:
        model(x, target=y).backward()
    found = planned(model)
    assert found is not None
    assert meter.peak_nbytes <= 3 * logits_nbytes
    assert found.graph.switches
    outside = limit_memory(network(), 3 * logits_nbytes, **options(tmp_path))
    gc.collect()
    with MemoryMeter(outside, x, y) as meter:
        F.cross_entropy(outside(x), y).backward()
    assert meter.peak_nbytes > 3 * logits_nbytes


def test_release_and_a_new_limit(tmp_path: Path) -> None:
    """Afterwards the model takes no target; another limit may have another loss."""
    x, y = batch()
    model = limit_memory(network(), "100%", loss=F.cross_entropy, **options(tmp_path))
    assert list(inspect.signature(model.forward).parameters) == ["input", "target"]
    limit_memory(model, "100%", loss=smoothed, **options(tmp_path))
    torch.manual_seed(2)
    found = model(x, target=y)
    release(model)
    assert type(model) is nn.Sequential
    assert "forward" not in vars(model)
    torch.manual_seed(2)
    assert torch.equal(found, smoothed(model(x), y))
    with pytest.raises(TypeError):
        model(x, target=y)


def test_a_sample_plans_at_once(tmp_path: Path) -> None:
    """Its keyword inputs have the target."""
    x, y = batch()
    given = {"sample": x, "sample_kwargs": {"target": y}}
    model = limit_memory(network(), "100%", loss=F.cross_entropy, **given, **options(tmp_path))
    found = planned(model)
    assert found is not None
    assert "nll_loss_forward" in " ".join(op.target for op in found.graph.ops)
    model(x, target=y).backward()
    assert found.runs["replanned"] == 0


class Named(nn.Module):
    """Has an input of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), target)


def branching(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() if output.max() > 0 else output.mean()


def test_what_cannot_work_is_an_error(tmp_path: Path) -> None:
    """In one line, before anything is changed, or at the first call."""
    for loss, problem in (
        ("mse", "loss is 'mse', not a function of an output and a target"),
        (nn.CrossEntropyLoss, "not a function of an output and a target"),
        (nn.CrossEntropyLoss(weight=torch.rand(CLASSES)), "has tensors of its own .weight."),
    ):
        model = network()
        with pytest.raises(BadInput, match=problem):
            limit_memory(model, "1GiB", loss=loss)
        assert type(model) is nn.Sequential
    with pytest.raises(BadInput, match="has an input named target, which loss= adds"):
        limit_memory(Named(), "1GiB", loss=F.cross_entropy)
    x, y = batch()
    model = limit_memory(network(), "1GiB", loss=branching, **options(tmp_path))
    with pytest.raises(CaptureError):
        model(x, target=y)
    model = limit_memory(network(), "1GiB", loss=both, **options(tmp_path))
    with pytest.raises(BadInput, match="the loss function returned a tuple, not a tensor"):
        model(x, target=y)


def test_an_input_of_a_model_may_be_named_target(tmp_path: Path) -> None:
    """Without a loss, it is an input like others."""
    x, y = batch()
    model = limit_memory(Named(), "100%", **options(tmp_path))
    model(x, target=y).backward()
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 1


def test_a_target_without_its_name(tmp_path: Path) -> None:
    """The error is the model's own, and a note gives the name."""
    model = network()
    limit_memory(model, "100%", loss=F.cross_entropy, **options(tmp_path))
    x, y = batch()
    with pytest.raises(TypeError, match="3 were given") as caught:
        model(x, y)
    assert "the target of the loss has a name: model(x, target=y)" in caught.value.__notes__
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'") as caught:
        model(x, labels=y)
    assert "the target of the loss has a name: model(x, target=y)" in caught.value.__notes__
