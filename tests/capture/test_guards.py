"""A planned module called in another way than it was planned for is never silently wrong."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, CaptureError, MemoryMeter, PlannedModule, RematWarning, UnplannedUse
from remat_executor.guards.snapshot import Snapshot
from remat_executor.inspection.tensors import collect
from tests.helpers.planners import repeat_at_random


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
    """It is counted, gives the original's numbers, and is nothing to warn of: there is nothing to plan."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    with off():
        torch.manual_seed(1)
        expected = original(x)
        torch.manual_seed(1)
        actual = planned(x)  # a warning would be an error
        assert torch.equal(expected, actual)
    assert planned.runs == {"original": 1}


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
    """Keeps its last hidden tensor, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.hidden: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.linear(x)
        self.seen.append(self.hidden)
        return self.hidden.tanh()


class Counts(Remembers):
    """Counts its calls, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, [1]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        return self.linear(x) * self.calls * len(self.sizes)


def test_assigning_a_buffer_is_refused(cache: Path) -> None:
    """The graph would compute the new buffer and lose it; the error says how to write it."""
    with pytest.raises(CaptureError, match=r"'mean'.*copy_"):
        pair(Assigns(), cache, torch.randn(2, 3))


def test_state_of_the_forward_is_refused(cache: Path) -> None:
    """A count would stand still in a graph."""
    model = Counts()
    with pytest.raises(CaptureError, match=r"changes calls, sizes.*buffer"):
        pair(model, cache, torch.randn(2, 3))
    assert (0, [1]) == (model.calls, model.sizes)


def test_what_the_forward_keeps_is_put_back_and_said(cache: Path) -> None:
    """No tracer stays behind in the user's module."""
    model = Remembers()
    with pytest.warns(RematWarning, match="hidden"):
        _, planned = pair(model, cache, torch.randn(2, 3))
    assert (None, []) == (model.hidden, model.seen)
    planned(torch.randn(2, 3)).sum().backward()
    assert planned.runs == {"planned": 1}


class Config:
    """What a model reads its settings from."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.kind: str | None = None


class FillsIn(nn.Module):
    """Fills a default into its config at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(3, 3), Config()

    def forward(self, x: Tensor) -> Tensor:
        self.config.kind = self.config.kind or "regression"
        return self.linear(x) if self.config.kind == "regression" else x


def test_a_default_that_the_forward_fills_in(cache: Path) -> None:
    """The config is as it was, and one plan serves."""
    x = torch.randn(2, 3)
    original, planned = pair(FillsIn(), cache, x)
    assert planned.config.kind is None
    assert_same_step(original, planned, x)
    assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 2}


class Configured(nn.Module):
    """Reads settings of every kind: an object, a dict, a function, an argument, its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config, self.options, self.activation = Config(), {"shift": 1.0}, torch.tanh
        self.gain = 1.0
        self.register_buffer("moved", torch.zeros(3))

    def forward(self, x: Tensor, k: Any = 2, w: Tensor | None = None) -> Tensor:
        y = self.activation(self.linear(x)) * self.config.scale + self.options["shift"]
        factor = 5 if k is True else 3 if isinstance(k, int) else 7
        y = nn.functional.dropout(y * factor * self.gain, 0.3, self.training)
        self.moved.add_(1.0)
        return y if w is None else y * w


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
@pytest.mark.parametrize(
    "change", ["config", "options", "activation", "on_planned", "eval_original", "true", "float", "alias"]
)
def test_every_kind_of_setting_is_seen(change: str, cache: Path) -> None:
    """Whatever the forward reads, a change of it is not answered by a stale plan."""
    x, w = torch.randn(2, 3), torch.zeros(3)
    model = Configured()
    original, planned = pair(model, cache, x, 2, w)
    args: tuple[Any, ...] = (x, 2, w)
    if change == "eval_original":
        original.eval(), model.eval()
    for module in (original, planned):
        if change == "config":
            module.config.scale = 7.0
        elif change == "options":
            module.options["shift"] = 3.0
        elif change in ("activation", "on_planned"):
            setattr(module, *{"activation": ("activation", torch.relu), "on_planned": ("gain", 4.0)}[change])
    if change in ("true", "float"):
        args = (x, {"true": True, "float": 2.0}[change], w)
    found = []
    for module in (original, planned):
        torch.manual_seed(4)
        found.append(module(*args[:2], module.moved if change == "alias" else w))
    assert torch.equal(*found)
    assert planned.runs["replanned"] + planned.runs["original"] == 1


def test_an_argument_that_could_change_unseen_runs_the_original(cache: Path) -> None:
    """An array in place of a tensor is compared by nothing."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, factors: Any = 1) -> Tensor:
            return self.linear(x) * (factors if isinstance(factors, int) else max(factors))

    original, planned = pair(Scales(), cache, torch.randn(2, 3))
    factors = {1, 2}
    x = torch.randn(2, 3)
    with pytest.warns(RematWarning, match="a set, which could change"):
        assert torch.equal(original(x, factors), planned(x, factors))
    factors.add(9)
    assert torch.equal(original(x, factors), planned(x, factors))
    with pytest.raises(BadInput, match="a set"):
        pair(Scales(), cache, x, factors)


def test_copies_share_plans_and_pickling_is_refused(cache: Path) -> None:
    """A deep copy trains by itself; a pickle is one clear error."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    for _ in range(3):
        copied = copy.deepcopy(planned)
        assert_same_step(copy.deepcopy(original), copied, x)
        assert copied.runs == {"planned": 1}
        assert copied.first.weight is not planned.first.weight
    with pytest.raises(UnplannedUse, match="state_dict"):
        pickle.dumps(planned)


def test_replaced_data_does_not_reach_the_backward(cache: Path) -> None:
    """A weight swapped through `.data` after the forward: the backward uses what the forward read."""
    x = torch.randn(5, 4)
    original, planned = pair(Heads(), cache, x)
    for module in (original, planned):
        output = module(x)["left"]
        module.left.weight.data = torch.ones(3, 4)
        output.square().sum().backward()
    assert torch.equal(original.trunk.weight.grad, planned.trunk.weight.grad)


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_generators_moved_by_hand_are_refused(source: str, cache: Path) -> None:
    """Numpy's numbers would be constants, a seed would be set once."""

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if source == "torch":
                torch.manual_seed(3)
                return self.linear(x)
            return self.linear(x) * float(np.random.rand())

    with pytest.raises(CaptureError, match="random module" if source == "numpy" else "manual_seed"):
        pair(Moves(), cache, torch.randn(2, 3))


def test_global_hooks_are_called(cache: Path) -> None:
    """Hooks for all modules: the original runs."""
    x = torch.randn(5, 6)
    _, planned = pair(Net(), cache, x)
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        with pytest.warns(RematWarning, match="hooks"):
            planned(x)
    finally:
        handle.remove()
    assert seen


def test_inputs_that_share_a_storage(cache: Path) -> None:
    """Tokens and labels cut from one tensor, as language models get them."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embed(tokens).tanh())
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().t().flatten())

    tokens = torch.randint(0, 9, (3, 6))
    original, planned = pair(Shifted(), cache, tokens[:, :-1], tokens[:, 1:])
    assert_same_step(original, planned, tokens[:, :-1], tokens[:, 1:], loss=lambda loss: loss)
    assert planned.runs == {"planned": 1}


def test_stacked_lstm_layers_with_a_head(cache: Path) -> None:
    """Their workspaces are made by real forwards only, while planning too."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    x = torch.randn(4, 5, 8)
    original, planned = pair(Stacked(), cache, x)
    assert_same_step(original, planned, x)


def test_a_sample_that_does_not_fit(cache: Path) -> None:
    """The error is about the sample, not about code inside of remat."""
    with pytest.raises(TypeError, match=r"Losing\.forward\(\) takes 2 positional arguments but 3 were given"):
        pair(Losing(), cache, torch.randn(4, 3), torch.randn(4, 3))


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


def test_the_modules_own_hooks_are_called_around_its_plan(cache: Path) -> None:
    """There at the start or added to either; the plan runs between them."""
    x = torch.randn(5, 6)
    model = nn.Linear(6, 6)
    expected = 3 * model(2 * x)
    model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    planned = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=cache)
    planned.register_forward_hook(lambda _, args, output: 3 * output)
    for module in (planned, model):
        assert torch.equal(expected, module(x))
    assert planned.runs == {"planned": 1}


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


def _set(owner: Any, name: str, value: Any) -> Callable[[], Callable[[], None]]:
    """Set an attribute; call what it returns to put it back."""

    def change() -> Callable[[], None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def _call(function: Callable[[Any], Any], value: Any, before: Any) -> Callable[[], Callable[[], None]]:
    """The same for what is set by a function."""

    def change() -> Callable[[], None]:
        function(value)
        return lambda: function(before)

    return change


def _plainest_first() -> Callable[[], None]:
    """All of attention's kernels, in another order."""
    kernel = torch.nn.attention.SDPBackend
    order = [kernel.MATH, kernel.FLASH_ATTENTION, kernel.EFFICIENT_ATTENTION, kernel.CUDNN_ATTENTION]
    context = torch.nn.attention.sdpa_kernel(order, set_priority=True)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


FLAGS: dict[str, Callable[[], Callable[[], None]]] = {
    "threads": _call(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "deterministic": _call(torch.use_deterministic_algorithms, True, False),
    "precision": _call(torch.set_float32_matmul_precision, "high", "highest"),
    "precision of one library": _set(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "flash": _call(torch.backends.cuda.enable_flash_sdp, False, True),
    "efficient": _call(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "math": _call(torch.backends.cuda.enable_math_sdp, False, True),
    "cudnn attention": _call(torch.backends.cuda.enable_cudnn_sdp, False, True),
    "order of kernels": _plainest_first,
    "cudnn": _set(torch.backends.cudnn, "enabled", False),
    "benchmark": _set(torch.backends.cudnn, "benchmark", True),
    "deterministic cudnn": _set(torch.backends.cudnn, "deterministic", True),
    "oneDNN": _set(torch.backends.mkldnn, "enabled", False),
    "default dtype": _call(torch.set_default_dtype, torch.float64, torch.float32),
}


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
@pytest.mark.parametrize("name", FLAGS)
def test_global_state_that_chooses_kernels_is_seen(name: str, cache: Path) -> None:
    """Planned anew while it is changed, and the plan of before serves when it is back."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    put_back = FLAGS[name]()
    try:
        assert_same_step(original, planned, x)
        assert planned.runs["replanned"] == 1
    finally:
        put_back()
    assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 2, "replanned": 1}


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


class Special(nn.Parameter):
    """A subclass, as quantized weights are."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Tensor.to_sparse, "layout torch.sparse_coo"),
        (Tensor.to_mkldnn, "layout torch._mkldnn"),
        (lambda x: x.to("meta"), "device meta|on meta"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), "NestedTensor"),
        (Special, "a Special, a tensor subclass"),
    ],
)
def test_tensors_that_no_plan_handles(change: Callable[[Tensor], Tensor], said: str, cache: Path) -> None:
    """As a sample they are refused in one line; given later, the original runs."""
    x = torch.randn(5, 6)
    linear = nn.Linear(6, 6)
    with pytest.raises(BadInput, match=said) as refused:
        PlannedModule(linear, (change(x),), {}, repeat_at_random(12), cache_dir=cache)
    assert "\n" not in str(refused.value)
    original, planned = pair(linear, cache, x)
    if "meta" in said:
        original, planned = original.to("meta"), planned.to("meta")
    with pytest.warns(RematWarning, match="without a plan"):
        found = planned(change(x))
    assert found.ndim == original(change(x)).ndim
    assert planned.runs == {"original": 1}


def test_a_parameter_of_a_subclass_is_refused(cache: Path) -> None:
    """Nothing would ever be planned."""
    model = nn.Linear(6, 6)
    model.weight = Special(model.weight.detach())
    with pytest.raises(BadInput, match="the model has a Special, a tensor subclass"):
        PlannedModule(model, (torch.randn(5, 6),), {}, repeat_at_random(12), cache_dir=cache)


def test_compile_on_the_planned_module_itself(cache: Path) -> None:
    """`planned.compile()`: said to change nothing; the plan runs, the original is as before."""
    x = torch.randn(5, 6)
    original, planned = pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), cache, x)
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        planned.compile(backend="eager")
    assert_same_step(original, planned, x)
    assert planned.runs["planned"] == 1
    assert torch.equal(original(x), planned.module(x))
    copied = copy.deepcopy(planned)
    assert_same_step(original, copied, x)
    assert copied.runs["planned"] == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(5, 6))])
@pytest.mark.parametrize("inner", [False, True])
def test_torchscript_is_refused_by_name(compiled: Any, inner: bool, cache: Path) -> None:
    """One line that says which module it is; a scripted submodule alone can be planned."""
    model = compiled(nn.Linear(6, 6))
    if inner:
        model = nn.Sequential(model)
    if inner and compiled is torch.jit.script:
        x = torch.randn(5, 6)
        assert torch.equal(PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=cache)(x), model(x))
        return
    with pytest.raises(
        BadInput, match="submodule '0' is TorchScript" if inner else "the model is TorchScript"
    ):
        PlannedModule(model, (torch.randn(5, 6),), {}, repeat_at_random(1), cache_dir=cache)


def test_an_index_reaches_the_originals_submodules(cache: Path) -> None:
    """As of a `Sequential`; another module has none."""
    _, planned = pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), cache, torch.randn(5, 6))
    assert planned[0] is planned.module[0]
    _, plain = pair(nn.Linear(6, 8), cache, torch.randn(5, 6))
    with pytest.raises(TypeError, match="not subscriptable"):
        plain[0]
    assert plain


def test_what_moves_is_under_the_autocast_of_where_it_runs():
    """Weights on the host say nothing of it."""
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    snapshot, tensors = Snapshot.take(module), collect(module, (x,), {})
    devices = (None, torch.device("cuda"))
    before = [snapshot.signature(tensors, device) for device in devices]
    torch.set_autocast_enabled("cuda", True)
    try:
        after = [snapshot.signature(tensors, device) for device in devices]
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert before[0] == after[0]
    assert "flags" in before[1].changes(after[1])
