"""A planned module called in another way than it was planned for is never silently wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, CaptureError, MemoryMeter, PlannedModule, RematWarning, UnplannedUse
from tests.planners import repeat_at_random


class Net(nn.Module):
    """Norms, dropout and a residual: what behaves differently in other modes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(hidden) + x


class Heads(nn.Module):
    """Two outputs from two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).tanh()
        return {"left": self.left(hidden), "right": self.right(hidden)}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cost cache of this test alone."""
    return tmp_path


def pair(model: nn.Module, cache: Path, *args: Any, **options: Any) -> tuple[nn.Module, PlannedModule]:
    """An untouched copy, and the planned module."""
    torch.manual_seed(0)
    return copy.deepcopy(model), PlannedModule(
        model, args, {}, repeat_at_random(12), cache_dir=cache, **options
    )


def assert_same_step(
    original: nn.Module, planned: nn.Module, *args: Any, loss: Callable[[Any], Tensor] | None = None
) -> None:
    """One forward and backward each from the same seed: same numbers everywhere."""
    found = []
    for module in (original, planned):
        module.zero_grad()
        torch.manual_seed(5)
        output = module(*args)
        (loss(output) if loss is not None else output.float().square().mean()).backward()
        found.append((output, module))
    (expected, _), (actual, _) = found
    if isinstance(expected, Tensor):
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)
    named = dict(planned.named_parameters())
    for name, parameter in original.named_parameters():
        if parameter.grad is None:
            assert named[name].grad is None, name
        else:
            assert torch.equal(parameter.grad, named[name].grad), name
    for name, buffer in original.named_buffers():
        assert torch.equal(buffer, dict(planned.named_buffers())[name]), name


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
@pytest.mark.parametrize(
    "change",
    ["eval", "batch", "dtype", "autocast", "freeze", "thaw", "input_grad", "submodule_eval"],
)
def test_a_change_is_planned_anew(change: str, cache: Path) -> None:
    """Each change makes a new plan, gives the original's numbers, and going back reuses the first plan."""
    model = Net()
    if change == "thaw":
        model.first.weight.requires_grad_(False)
    x = torch.randn(5, 6)
    original, planned = pair(model, cache, x)
    assert_same_step(original, planned, x)
    context: Any = torch.enable_grad()
    other = x
    for module in (original, planned):
        if change == "eval":
            module.eval()
        elif change == "submodule_eval":
            module.norm.eval()
        elif change == "dtype":
            module.double()
        elif change == "freeze":
            module.last.weight.requires_grad_(False)
        elif change == "thaw":
            module.first.weight.requires_grad_(True)
    if change == "batch":
        other = torch.randn(9, 6)
    elif change == "dtype":
        other = x.double()
    elif change == "autocast":
        context = torch.autocast("cpu", torch.bfloat16)
    elif change == "input_grad":
        other = x.clone().requires_grad_(True)
    with context:
        assert_same_step(original, planned, other)
    assert planned.runs == {"planned": 2, "replanned": 1}
    if change in ("batch", "autocast", "input_grad"):
        assert_same_step(original, planned, x)
        assert planned.runs == {"planned": 3, "replanned": 1}


def test_replanning_is_said_once(cache: Path) -> None:
    """Two new batch sizes, one warning."""
    _, planned = pair(Net(), cache, torch.randn(5, 6))
    with pytest.warns(RematWarning, match="planning again"):
        planned(torch.randn(3, 6))
    planned(torch.randn(4, 6))  # a second warning would be an error
    assert planned.runs == {"planned": 2, "replanned": 2}


def test_an_input_that_requires_grad_gets_its_gradient(cache: Path) -> None:
    """The gradient of an input equals the original's."""
    x = torch.randn(5, 6, requires_grad=True)
    original, planned = pair(Net(), cache, x)
    grads = []
    for module in (original, planned):
        torch.manual_seed(3)
        x.grad = None
        module(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_original_runs(off: Callable[[], Any], cache: Path) -> None:
    """It is counted, warned about once, and gives the original's numbers."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    with off():
        torch.manual_seed(1)
        expected = original(x)
        torch.manual_seed(1)
        with pytest.warns(RematWarning, match="without a plan"):
            actual = planned(x)
        assert torch.equal(expected, actual)
        planned(x)  # a second warning would be an error
    assert planned.runs == {"original": 2}


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


class Branch(nn.Module):
    """Branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Draws(nn.Module):
    """Draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * random.random()


def test_a_data_dependent_branch_is_refused_with_its_line(cache: Path) -> None:
    """The error names the file, the line and a way out."""
    with pytest.raises(CaptureError, match=r"test_guards\.py.*y\.sum\(\) > 0.*wrap"):
        pair(Branch(), cache, torch.randn(2, 3))


def test_python_randomness_is_refused(cache: Path) -> None:
    """A captured graph would repeat one draw for ever."""
    state = random.getstate()
    with pytest.raises(CaptureError, match="random module"):
        pair(Draws(), cache, torch.randn(2, 3))
    assert random.getstate() == state


class Assigns(nn.Module):
    """Puts a new tensor in a buffer's place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Remembers(nn.Module):
    """Counts its calls and keeps its last hidden tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.hidden = 0, None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hidden = self.linear(x)
        self.seen.append(self.hidden)
        return self.hidden.tanh()


def test_assigning_a_buffer_is_refused(cache: Path) -> None:
    """The graph would compute the new buffer and lose it; the error says how to write it."""
    with pytest.raises(CaptureError, match=r"'mean'.*copy_"):
        pair(Assigns(), cache, torch.randn(2, 3))


def test_what_the_forward_sets_is_put_back_and_said(cache: Path) -> None:
    """No tracer stays behind in the user's module."""
    model = Remembers()
    with pytest.warns(RematWarning, match="calls"):
        _, planned = pair(model, cache, torch.randn(2, 3))
    assert (0, None, []) == (model.calls, model.hidden, model.seen)
    planned(torch.randn(2, 3)).sum().backward()
    assert planned.runs == {"planned": 1}


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_a_changed_setting_is_planned_anew(cache: Path) -> None:
    """A dropout rate is read by Python code: the captured one would be stale."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    for module in (original, planned):
        module.drop.p = 0.8
    assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 1, "replanned": 1}


def test_hooks_there_at_the_start_are_refused(cache: Path) -> None:
    """The error names the submodule."""
    model = Net()
    model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(BadInput, match="'norm' has hooks"):
        pair(model, cache, torch.randn(5, 6))


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_hooks_added_later_are_called(cache: Path) -> None:
    """The original runs, and so the hook does."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    seen = []
    planned.norm.register_forward_hook(lambda *_: seen.append(1))
    assert_same_step(original, planned, x)
    assert seen == [1]
    assert planned.runs == {"original": 1}


def test_parameter_hooks_are_called(cache: Path) -> None:
    """Hooks on gradients and after accumulation see what eager shows them."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    seen: list[list[Any]] = [[], []]
    for module, record in zip((original, planned), seen, strict=True):
        module.trunk.weight.register_hook(lambda g, record=record: record.append(g.clone()) or g * 2)
        module.left.bias.register_post_accumulate_grad_hook(
            lambda p, record=record: record.append(p.grad.clone())
        )
        module(x)["left"].square().sum().backward()
    assert len(seen[0]) == len(seen[1]) == 2
    for expected, actual in zip(*seen, strict=True):
        assert torch.equal(expected, actual)
    assert torch.equal(original.trunk.weight.grad, planned.trunk.weight.grad)


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


def test_state_dict_and_attributes_are_the_originals(cache: Path) -> None:
    """Keys, loading, and what the planned module does not have itself."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    assert original.state_dict().keys() == planned.state_dict().keys()
    planned.load_state_dict(original.state_dict())
    assert planned.drop.p == 0.3
    assert [n for n, _ in planned.named_parameters()] == [n for n, _ in original.named_parameters()]
    with pytest.raises(AttributeError):
        _ = planned.nothing_of_this_name
