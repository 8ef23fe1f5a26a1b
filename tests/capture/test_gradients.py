"""The backward of a planned module: chosen outputs, repeated backwards, writes in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, CaptureError, MemoryMeter, RematWarning, UnplannedUse
from tests.helpers.small import Heads
from tests.helpers.steps import assert_same_step, pair


@pytest.mark.parametrize("used", ["left", "right"])
def test_an_unused_output_leaves_its_head_without_gradients(used: str, cache: Path) -> None:
    """Gradients that depend on an unused output alone stay None, as in eager."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    assert_same_step(original, planned, x, loss=lambda output: output[used].square().sum())


def test_autograd_grad_of_one_parameter(cache: Path) -> None:
    """A pruned backward gives the same gradient."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    expected, actual = (
        torch.autograd.grad(m(x)["left"].square().sum(), m.trunk.weight)[0] for m in (original, planned)
    )
    assert torch.equal(expected, actual)


def test_double_backward_is_refused(cache: Path) -> None:
    """create_graph=True: a clear error."""
    x = torch.randn(5, 4)
    _, planned = pair(Heads(), cache, x)
    loss = planned(x)["left"].square().sum()
    with pytest.raises(UnplannedUse, match="create_graph"):
        torch.autograd.grad(loss, planned.trunk.weight, create_graph=True)


def test_retain_graph_allows_a_second_backward(cache: Path) -> None:
    """Twice with retain_graph gives twice the gradient; a third backward after release is refused."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    for module in (original, planned):
        loss = module(x)["left"].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(original.trunk.weight.grad, planned.trunk.weight.grad)
    with pytest.raises((UnplannedUse, RuntimeError), match=r"backward|second time"):
        loss.backward()


def test_replaced_data_does_not_reach_the_backward(cache: Path) -> None:
    """A weight swapped through `.data` after the forward: the backward uses what the forward read."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    for module in (original, planned):
        output = module(x)["left"]
        module.left.weight.data = torch.ones(3, 4)
        output.square().sum().backward()
    assert torch.equal(original.trunk.weight.grad, planned.trunk.weight.grad)


@pytest.mark.parametrize("differentiate", [[7], [-1], []])
def test_outputs_that_cannot_be_differentiated(differentiate: list[int], cache: Path) -> None:
    """The error names those that can."""
    with pytest.raises(CaptureError, match=r"differentiate"):
        pair(Losing(), cache, torch.randn(4, 3), differentiate=differentiate)


@pytest.mark.parametrize("differentiate", [0, "0", ["x"], [0.0]])
def test_differentiate_that_names_nothing(differentiate: Any, cache: Path) -> None:
    """Said before any work."""
    with pytest.raises(BadInput, match=r"not a list of output indices.*differentiate=\[0\]"):
        pair(Losing(), cache, torch.randn(4, 3), differentiate=differentiate)


def test_sparse_gradients_are_refused(cache: Path) -> None:
    """One clear error, not a traceback of somebody else's."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens).tanh()

    with pytest.raises(CaptureError):
        pair(Sparse(), cache, torch.randint(0, 9, (3, 6)))


class Losing(nn.Module):
    """Returns its loss, and its predictions beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last(self.linear(x).tanh()).tanh()
        return y.square().mean(), y


def test_differentiating_more_than_was_planned_is_refused(cache: Path) -> None:
    """A model that returns its loss is planned for that alone; the error says how to change it."""
    x = torch.randn(4, 3)
    _, planned = pair(Losing(), cache, x)
    loss, prediction = planned(x)
    assert prediction.requires_grad
    with pytest.raises(UnplannedUse, match="differentiate="):
        (loss + prediction.sum()).backward()


def test_differentiate_names_the_outputs(cache: Path) -> None:
    """With both named, both may be used."""
    x = torch.randn(4, 3)
    original, planned = pair(Losing(), cache, x, differentiate=[0, 1])
    assert_same_step(original, planned, x, loss=lambda output: output[0] + output[1].sum())


@pytest.mark.parametrize("victim", ["parameter", "input", "output"])
def test_writing_in_place_before_the_backward_is_refused(victim: str, cache: Path) -> None:
    """What the backward needs is checked for changes, as eager does."""
    x = torch.randn(4, 3)
    _, planned = pair(Losing(), cache, x)
    loss, prediction = planned(x)
    with torch.no_grad():
        {"parameter": planned.last.weight, "input": x, "output": prediction}[victim].add_(1)
    with pytest.raises(UnplannedUse, match="modified in place"):
        loss.backward()


def test_a_dropped_output_frees_what_was_saved(cache: Path) -> None:
    """A forward without a backward leaves nothing behind."""
    x = torch.randn(4, 3)
    _, planned = pair(Losing(), cache, x)
    with MemoryMeter(planned, [x]) as meter:
        output = planned(x)
        assert meter.live_nbytes > 0
        del output
        assert meter.live_nbytes == 0


@pytest.mark.filterwarnings("ignore:called again before:remat_executor.RematWarning")
def test_two_forwards_before_two_backwards(cache: Path) -> None:
    """Calls do not share state."""
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    for module in (original, planned):
        one, two = module(x)["left"].sum(), module(y)["right"].square().sum()
        one.backward()
        two.backward()
    for expected, actual in zip(original.parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad)


class Predicts(nn.Module):
    """Returns a loss, or classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, predict: bool = False) -> Tensor:
        hidden: Tensor = self.linear(x)
        return hidden.argmax(-1) if predict else hidden.square().mean()


def test_a_call_that_returns_nothing_to_differentiate(cache: Path) -> None:
    """It runs the original, which is said once, and no call of its kind is captured again."""
    x = torch.randn(5, 6)
    original, planned = pair(Predicts(), cache, x)
    with pytest.warns(RematWarning, match="nothing that it returns requires a gradient"):
        assert torch.equal(original(x, predict=True), planned(x, predict=True))
    assert torch.equal(original(x, predict=True), planned(x, predict=True))
    assert_same_step(original, planned, x)
    assert planned.runs == {"original": 2, "planned": 1}
