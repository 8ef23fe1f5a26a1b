"""A planned module called in another way than it was planned for is never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, CaptureError, PlannedModule, RematWarning
from remat_executor.guards.differences import differences
from remat_executor.guards.snapshot import Snapshot
from remat_executor.inspection.tensors import collect
from remat_executor.torch_private.precision import select_attention
from tests.capture.test_gradients import Losing
from tests.capture.test_refused_forwards import Config
from tests.helpers.planners import repeat_at_random
from tests.helpers.small import Net
from tests.helpers.steps import assert_same_step, pair


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


def test_torch_reorders_attention_at_its_first_selection(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, where cuDNN comes first from then on: the order of the plan is the one of its calls."""
    order, select = [1, 2, 0], torch._fused_sdp_choice

    def selecting(*tensors: Tensor) -> int:
        order[:] = [3, 1, 2, 0]
        return select(*tensors)

    def capturing(what: str, done: int, total: int) -> None:
        order[:] = [3, 1, 2, 0]  # attention in the model selects a kernel too

    monkeypatch.setattr(torch, "_fused_sdp_choice", selecting)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: list(order))
    select_attention.cache_clear()
    x = torch.randn(5, 6)
    planned = PlannedModule(Net(), (x,), {}, repeat_at_random(4), cache_dir=cache, on_progress=capturing)
    assert ("attention", "[3, 1, 2, 0]") in planned.graph.conditions
    planned(x)  # a warning would be an error
    assert planned.runs == {"planned": 1}


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
    grads: list[Any] = []
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


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_a_changed_setting_is_planned_anew(cache: Path) -> None:
    """A dropout rate is read by Python code: the captured one would be stale."""
    x = torch.randn(5, 6)
    original, planned = pair(Net(), cache, x)
    for module in (original, planned):
        module.drop.p = 0.8
    assert_same_step(original, planned, x)
    assert planned.runs == {"planned": 1, "replanned": 1}


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


def _plainest_first() -> Callable[[], object]:
    """All of attention's kernels, in another order."""
    kernel = torch.nn.attention.SDPBackend
    order = [kernel.MATH, kernel.FLASH_ATTENTION, kernel.EFFICIENT_ATTENTION, kernel.CUDNN_ATTENTION]
    context = torch.nn.attention.sdpa_kernel(order, set_priority=True)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


FLAGS: dict[str, Callable[[], Callable[[], object]]] = {
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


def test_what_moves_is_under_the_autocast_of_where_it_runs() -> None:
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
    assert "flags" in [each.kind for each in differences(before[1], after[1])]


def test_a_changed_attribute_is_named_as_the_user_named_it() -> None:
    """Also if its name is that of a field of the signature."""
    module: Any = nn.Linear(2, 2)
    module.external_state = 1
    tensors = collect(module, (torch.ones(1, 2),), {})
    before = Snapshot.take(module).signature(tensors)
    module.external_state = 2
    after = Snapshot.take(module).signature(tensors)
    (found,) = differences(before, after)
    assert str(found) == "attributes (external_state: 1 -> 2)"
