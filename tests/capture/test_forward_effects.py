"""What a forward reads and does beside computing: planned as eager does it, or refused with what to do."""

from __future__ import annotations

import collections
import copy
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat_executor import CaptureError, PlannedModule, RematWarning, UnplannedUse
from tests.helpers.acceptance import same_bits
from tests.helpers.planners import repeat_at_random

Forward = Callable[[Any, Tensor], Tensor]


class Small(nn.Module):
    """Two layers, a buffer and plainly held tensors; its forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))
        self.table = torch.linspace(0, 1, 16)
        self.tables = [torch.ones(16), self.first.weight]
        self.by_name = {"left": torch.full((16,), 2.0)}
        self.extra: nn.Module | None = None
        self.compute = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def twice(self, x: Tensor) -> Tensor:
        """Calls itself."""
        return self(x) * 2

    def middle(self, x: Tensor) -> Tensor:
        """The part that most forwards share."""
        return self.last(torch.relu(self.first(x)))


def planned(model: nn.Module, cache: Path, *args: Any) -> PlannedModule:
    """The model under a plan that repeats ops at random."""
    return PlannedModule(model, args, {}, repeat_at_random(12), cache_dir=cache)


def assert_trains_alike(forward: Forward, cache: Path, extra: Callable[[], nn.Module] | None = None) -> None:
    """Two steps of training: every number as without a plan, what is plainly held included."""
    x = torch.randn(8, 16)
    found = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = Small(forward)
        model.extra = extra() if extra is not None else None
        module = planned(model, cache, x.clone()) if plan else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        results = []
        for _ in range(2):
            optimizer.zero_grad()
            output = module(x.clone())
            output.backward()
            optimizer.step()
            results += [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            results += [b.clone() for b in model.buffers()]
            results += [model.table.clone(), model.tables[0].clone(), model.by_name["left"].clone()]
        found.append([*results, torch.get_rng_state()])
        if plan:
            assert module.runs == {"planned": 2}
    expected, actual = found
    assert len(expected) == len(actual)
    assert all(same_bits(a, b) for a, b in zip(expected, actual, strict=True))


def _attention(m: Small, x: Tensor) -> Tensor:
    h = m.first(x)[None]
    attended, weights = m.extra(h, h, h)
    return m.last(attended).sum() + weights.sum()


def _force(m: Small, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = m.last(torch.tanh(m.first(x))).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return (force**2).sum() + energy


def _hooked_tensor(m: Small, x: Tensor) -> Tensor:
    hidden = m.first(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    return m.last(torch.relu(hidden)).sum()


def _no_grad_inside(m: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.last(x)
    return (m.first(x) * gate).sum()


def _writes_parts(m: Small, x: Tensor) -> Tensor:
    y = m.first(x)
    z = torch.zeros(8, 16)
    z[torch.arange(4)] = y[:4]
    z[0, :4] += 1
    z.index_add_(0, torch.tensor([1, 1]), y[:2])
    return m.last(z.scatter(1, torch.zeros(8, 1, dtype=torch.long), y[:, :1])).sum()


def _losses(m: Small, x: Tensor) -> Tensor:
    y = m.middle(x)
    entropy = functional.cross_entropy(y, torch.arange(8), label_smoothing=0.1)
    return entropy + functional.smooth_l1_loss(y, x) + functional.triplet_margin_loss(y, x, -x)


def _samples(m: Small, x: Tensor) -> Tensor:
    y, grid = m.first(x).view(1, 1, 8, 16), torch.tanh(m.last(x))[:, :8].view(1, 8, 4, 2)
    resized = functional.interpolate(y, scale_factor=2, mode="bicubic")
    return functional.grid_sample(y, grid, align_corners=False).sum() + resized.sum()


def _draws(m: Small, x: Tensor) -> Tensor:
    chosen = torch.multinomial(torch.ones(8), 3)
    coins = torch.bernoulli(torch.full((8, 16), 0.5))
    return (m.middle(x[torch.randperm(8)]) * coins)[chosen].sum()


def _orders(m: Small, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.last(h.sort(dim=1)[0]).sum() + h.topk(3)[0].sum() + h.cumsum(1).max(1)[0].sum()


def _writes_held(m: Small, x: Tensor) -> Tensor:
    m.table.add_(1)
    return (m.middle(x) * m.table).sum()


def _writes_input(m: Small, x: Tensor) -> Tensor:
    return m.middle(x.add_(1)).sum()


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(16, 16))


def _layers() -> nn.Module:
    norms = nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(), nn.ConvTranspose2d(4, 2, 3), nn.Dropout2d())
    return nn.Sequential(nn.Conv2d(1, 4, 3), norms, nn.RReLU(), nn.FractionalMaxPool2d(2, 2))


FORWARDS: dict[str, tuple[Forward, Callable[[], nn.Module] | None]] = {
    "held": (lambda m, x: (m.middle(x) * m.table).sum(), None),
    "held_in_list": (lambda m, x: ((m.middle(x) + m.tables[0]) @ m.tables[1]).sum(), None),
    "held_in_dict": (lambda m, x: (m.middle(x) * m.by_name["left"]).sum(), None),
    "writes_held": (_writes_held, None),
    "writes_input": (_writes_input, None),
    "writes_buffer_data": (lambda m, x: (m.middle(x) * m.scale.data.mul_(0.5)).sum(), None),
    "gradient_inside": (_force, None),
    "hook_on_a_tensor": (_hooked_tensor, None),
    "no_grad_inside": (_no_grad_inside, None),
    "vmap": (lambda m, x: torch.vmap(m.middle)(x).sum(), None),
    "compiled": (lambda m, x: torch.compile(torch.relu, backend="eager")(m.middle(x)).sum(), None),
    "scripted": (lambda m, x: m.middle(m.extra(x)).sum(), _scripted),
    "weight_norm": (
        lambda m, x: m.middle(m.extra(x)).sum(),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
    ),
    "attention": (_attention, lambda: nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)),
    "encoder": (
        lambda m, x: m.middle(m.extra(x[None])).sum(),
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    ),
    "layers": (lambda m, x: m.extra(m.middle(x)[None, None]).sum(), _layers),
    "embedding_bag": (
        lambda m, x: m.middle(m.extra(torch.arange(8), torch.tensor([0, 4]))).sum() + m.first(x).sum(),
        lambda: nn.EmbeddingBag(8, 16),
    ),
    "writes_parts": (_writes_parts, None),
    "losses": (_losses, None),
    "samples": (_samples, None),
    "draws": (_draws, None),
    "orders": (_orders, None),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", r"ignore:The \.grad attribute")
@pytest.mark.parametrize("name", FORWARDS)
def test_trains_as_without_a_plan(name: str, cache: Path) -> None:
    """Bitwise, planned at each call."""
    forward, extra = FORWARDS[name]
    assert_trains_alike(forward, cache, extra)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cost cache of this test alone."""
    return tmp_path


def _assigns_data(m: Small, x: Tensor) -> Tensor:
    m.scale.data = m.scale * 0.5
    return (m.middle(x) * m.scale).sum()


def _assigns_local_data(m: Small, x: Tensor) -> Tensor:
    hidden = m.first(x)
    hidden.data = hidden.data * 2
    return m.last(hidden).sum()


def _writes_weight(m: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.first.weight.clamp_(-0.1, 0.1)
    return m.middle(x).sum()


def _replaces_held(m: Small, x: Tensor) -> Tensor:
    m.table = m.table + 1
    return (m.middle(x) * m.table).sum()


def _forks(m: Small, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(16)
    return (m.middle(x) + noise).sum()


def _rewinds(m: Small, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand(16)
    torch.set_rng_state(state)
    return (m.middle(x) + noise).sum()


def _seeds(m: Small, x: Tensor) -> Tensor:
    torch.manual_seed(torch.initial_seed())
    return functional.dropout(m.middle(x)).sum()


OUTSIDE = torch.ones(16)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (_assigns_data, r"assigns a tensor's \.data.*copy_"),
        (_assigns_local_data, r"assigns a tensor's \.data"),
        (_writes_weight, r"writes into 'first\.weight'.*outside"),
        (_replaces_held, r"'table' and replaces it by a new tensor.*buffer"),
        (_forks, r"sets torch's random generator \(set_state\)"),
        (_rewinds, r"sets torch's random generator \(set_state\)"),
        (_seeds, r"sets torch's random generator \(manual_seed\)"),
        (
            lambda m, x: (m.middle(x) + torch.rand(16, generator=torch.Generator())).sum(),
            r"generator of its own.*default",
        ),
        (
            lambda m, x: (m.middle(x) * OUTSIDE).sum(),
            r"neither in its module nor an argument.*test_forward_effects.*register",
        ),
        (lambda m, x: torch.linalg.inv(m.middle(x)[:, :8]).sum(), r"_linalg_check_errors"),
    ],
)
def test_refused(forward: Forward, match: str, cache: Path) -> None:
    """With what was met and what to do; generators and tensors stay as they were."""
    model, state = Small(forward), torch.get_rng_state()
    table, scale = model.table.clone(), model.scale.clone()
    with pytest.raises(CaptureError, match=match):
        planned(model, cache, torch.randn(8, 16))
    assert torch.equal(model.table, table)
    assert torch.equal(model.scale, scale)
    assert type(torch.default_generator) is torch.Generator
    torch.set_rng_state(state)


def test_a_tensor_left_behind_is_no_input(cache: Path) -> None:
    """A forward that keeps its last hidden tensor, called unplanned before: its history is not used."""

    def keeps(m: Small, x: Tensor) -> Tensor:
        m.kept = m.first(x)
        return m.last(m.kept).sum()

    model, x = Small(keeps), torch.randn(8, 16)
    model(x)
    left = model.kept
    with pytest.warns(RematWarning, match="kept"):
        module = planned(model, cache, x)
    module(x).backward()
    assert model.kept is left
    assert module.runs == {"planned": 1}


def test_another_function_at_the_same_address(cache: Path) -> None:
    """Functions are told apart by identity, also when one is gone and the next takes its place in memory."""

    class Applies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
            return act(self.linear(x)).sum()

    x = torch.randn(3, 4)
    module = planned(Applies(), cache, x, lambda h: h * 2)
    expected = [(module.module(x, lambda h: h * 3)), (module.module(x, lambda h: h * 4))]
    with pytest.warns(RematWarning, match="constants changed"):
        # Each function is gone after its call, and each call too.
        found = [module(x, lambda h: h * 3).detach(), module(x, lambda h: h * 4).detach()]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_submodule_of_another_class(cache: Path) -> None:
    """Sigmoid replaced by Tanh: neither has a setting of its own."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), torch.randn(3, 4)
    module = planned(model, cache, x)
    model[1] = nn.Tanh()
    with pytest.warns(RematWarning, match="modules changed"):
        result = module(x)
    assert torch.equal(result, model(x))


def test_a_setting_that_nothing_reads_keeps_the_plan(cache: Path) -> None:
    """A counter that the training loop sets: captured anew, with its name said, and not solved anew."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    first = module.plan
    module.epoch = 1
    with pytest.warns(RematWarning, match=r"attributes \(epoch\) changed"):
        module(x)
    assert module.plan is first
    module.epoch = 2
    module(x)
    module.epoch = 3
    with pytest.warns(RematWarning, match=r"every call is recaptured because attributes \(epoch\)"):
        module(x)


def test_a_method_that_calls_its_module_is_planned(cache: Path) -> None:
    """A method of the original's class runs on the planned module, so what it calls is the plan."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    result = module.twice(x)
    assert torch.equal(result, module.module(x) * 2)
    assert module.runs == {"planned": 1}


class Clashing(Small):
    """A model with an attribute of a name that planned modules have."""

    plan = "mine"

    def named(self) -> str:
        return self.plan


def test_a_method_of_a_model_with_a_name_of_ours_is_counted(cache: Path) -> None:
    """It is the original's, which finds its own attributes and runs without a plan: said once and counted."""
    x = torch.randn(8, 16)
    module = planned(Clashing(lambda m, x: m.middle(x).sum()), cache, x)
    assert isinstance(module, Clashing)
    assert (module.named(), module.module.plan, type(module).named(module.module)) == ("mine",) * 3
    with pytest.warns(RematWarning, match="its method twice calls it"):
        result = module.twice(x)
    assert torch.equal(result, module.module(x) * 2)
    assert module.runs == {"original": 1}
    with torch.no_grad():
        module.twice(x)
    module(x).backward()
    assert module.runs == {"original": 1, "planned": 1}


@pytest.mark.parametrize("cell", [nn.GRU, nn.GRUCell])
def test_a_gru_to_the_last_bit_but_one(cell: type[nn.Module], cache: Path) -> None:
    """Eager's GRU works in place on slices, where torch's vector code rounds other elements than on a whole
    tensor; a graph has no such slices. The largest difference is an ulp or two, in whatever depends on it.
    """
    x = torch.randn(5, 3, 8) if cell is nn.GRU else torch.randn(3, 8)
    torch.manual_seed(0)
    model = Small(lambda m, x: m.middle(m.extra(x)[0] if cell is nn.GRU else m.extra(x)).square().sum())
    model.extra = cell(8, 16)
    found = []
    for module in (model, planned(model, cache, x)):
        module.zero_grad()
        loss = module(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for expected, actual in zip(*found, strict=True):
        assert float((expected - actual).abs().max()) <= 4e-7 * float(expected.abs().max())


def _accumulates(holder: Callable[[Small], Any]) -> Forward:
    def forward(m: Small, x: Tensor) -> Tensor:
        return m.middle(x).sum() * holder(m)

    return forward


def _raises_by_one(container: Any, key: Any) -> int:
    container[key] += 1
    return int(container[key])


@pytest.mark.parametrize(
    ("held", "count", "name"),
    [
        ({"_n": 0}, lambda m: _raises_by_one(m.__dict__, "_n"), "_n"),
        ({"d": {"n": 0}}, lambda m: _raises_by_one(m.d, "n"), r"d\['n'\]"),
        ({"d": [0]}, lambda m: _raises_by_one(m.d, 0), r"d\[0\]"),
        ({"d": {"a": {"n": 0}}}, lambda m: _raises_by_one(m.d["a"], "n"), r"d\['a'\]\['n'\]"),
        ({"d": {1}}, lambda m: m.d.add(len(m.d) + 1) or len(m.d), "d"),
        ({"d": collections.deque()}, lambda m: m.d.append(1) or len(m.d), "d"),
        ({"d": np.zeros(2)}, lambda m: _raises_by_one(m.d, 0), "d"),
        ({"d": bytearray(2)}, lambda m: _raises_by_one(m.d, 0), "d"),
    ],
)
def test_state_anywhere_is_refused_and_put_back(
    held: dict[str, Any], count: Callable[[Small], int], name: str, cache: Path
) -> None:
    """However deep it lies, and the user's module is as it was."""
    model = Small(_accumulates(count))
    model.__dict__.update(copy.deepcopy(held))
    with pytest.raises(CaptureError, match=f"the forward changes {name}.*buffer"):
        planned(model, cache, torch.randn(8, 16))
    assert repr({key: model.__dict__[key] for key in held}) == repr(held)


class Counter:
    """Counts its calls."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def _counting_closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


@pytest.mark.parametrize(
    "make",
    [Counter, _counting_closure, lambda: random.Random(3).random, lambda: np.random.default_rng(3).random],
)
def test_state_of_what_is_called_is_refused(make: Callable[[], Callable[[], float]], cache: Path) -> None:
    """A counter in slots, in a closure, in a generator of the module's own: put back as it was."""
    model = Small(_accumulates(lambda m: m.draw()))
    model.draw = make()
    model.owner = getattr(model.draw, "__self__", None)
    expected = copy.deepcopy(model.owner) if model.owner is not None else None
    with pytest.raises(CaptureError, match="the forward changes"):
        planned(model, cache, torch.randn(8, 16))
    if isinstance(expected, random.Random | np.random.Generator):
        assert model.draw() == expected.random()
    else:
        assert model.draw() == 1


def _lazy_buffer(m: Small, x: Tensor) -> Tensor:
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.ones(16))
    return m.middle(x).sum()


def _lazy_parameter(m: Small, x: Tensor) -> Tensor:
    if not hasattr(m, "gain"):
        m.gain = nn.Parameter(torch.ones(16))
    return (m.middle(x) * m.gain).sum()


def _lazy_layer(m: Small, x: Tensor) -> Tensor:
    if not hasattr(m, "third"):
        m.third = nn.Linear(16, 16)
    return m.third(m.middle(x)).sum()


@pytest.mark.parametrize("forward", [_lazy_buffer, _lazy_parameter, _lazy_layer])
def test_what_the_first_call_registers(forward: Forward, cache: Path) -> None:
    """Refused before that call, with the model as it was; planned after it."""
    model, x = Small(forward), torch.randn(8, 16)
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    with pytest.raises(CaptureError, match="call the model once before"):
        planned(model, cache, x)
    assert [n for n, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    expected = model(x)
    module = planned(model, cache, x)
    assert torch.equal(module(x), expected)
    assert module.runs == {"planned": 1}


def test_other_threads_may_seed_while_a_forward_is_captured(cache: Path) -> None:
    """The watch is over the thread that captures."""
    failures: list[Exception] = []

    def seeds() -> None:
        try:
            torch.manual_seed(1)
        except CaptureError as error:
            failures.append(error)

    def forward(m: Small, x: Tensor) -> Tensor:
        other = threading.Thread(target=seeds)
        other.start()
        other.join()
        return m.middle(x).sum()

    planned(Small(forward), cache, torch.randn(8, 16))
    assert not failures


def test_a_queue_that_a_module_refers_to_keeps_its_items(cache: Path) -> None:
    """Somebody else may fill it meanwhile: it is left alone."""

    def forward(m: Small, x: Tensor) -> Tensor:
        m.inbox.put(1)  # as another thread would
        return m.middle(x).sum()

    model = Small(forward)
    model.inbox = queue.Queue()
    planned(model, cache, torch.randn(8, 16))
    assert model.inbox.qsize() > 0


def test_hooks_that_the_forward_installs_are_taken_back(cache: Path) -> None:
    """Installed at the first call, as transformers does: neither they nor their mark stay after planning."""

    def forward(m: Small, x: Tensor) -> Tensor:
        if not getattr(m, "_installed", False):
            m.last.register_forward_hook(lambda module, args, output: output * 2)
            m._installed = True
        return m.middle(x).sum()

    model, x = Small(forward), torch.randn(8, 16)
    module = planned(model, cache, x)
    assert not model.last._forward_hooks
    assert not hasattr(model, "_installed")
    planned_loss = module(x)
    assert torch.equal(planned_loss, model(x))
    assert len(model.last._forward_hooks) == 1


def test_no_tensor_of_the_trace_stays_in_a_queue(cache: Path) -> None:
    """A deque of hidden tensors: put back, and said."""

    def forward(m: Small, x: Tensor) -> Tensor:
        hidden = m.first(x)
        m.queue.append(hidden.detach())
        return m.last(hidden).sum()

    model = Small(forward)
    model.queue = collections.deque(maxlen=3)
    with pytest.warns(RematWarning, match="sets queue") as caught:
        planned(model, cache, torch.randn(8, 16))
    assert caught[0].filename == __file__
    assert not model.queue


@pytest.mark.parametrize("victim", ["input", "buffer", "held", "average", "view"])
def test_a_written_tensor_that_is_returned(victim: str, cache: Path) -> None:
    """The caller gets the tensor itself, written once."""

    def forward(m: Small, x: Tensor) -> Any:
        if victim == "input":
            return m.middle(x.add_(1)).sum(), x
        loss = m.middle(x).sum()
        if victim == "buffer":
            return loss, m.scale.add_(1)
        if victim == "held":
            return loss, m.table.add_(1)
        average = m.scale.mul_(0.9).add_(m.first(x).detach().mean(0))
        return loss, average if victim == "average" else average[:3]

    x = torch.randn(8, 16)
    found = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = Small(forward)
        module = planned(model, cache, x.clone()) if plan else model
        mine = x.clone()
        results = [module(mine)[1].clone() for _ in range(3)]
        found.append([*results, mine, model.scale.clone(), model.table.clone()])
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(expected, actual)


def test_a_change_of_shape_in_place_is_refused(cache: Path) -> None:
    """``unsqueeze_`` on the caller's tensor."""
    with pytest.raises(CaptureError, match=r"shape of an input in place.*unsqueeze\(0\)"):
        planned(Small(lambda m, x: m.middle(x.unsqueeze_(0)).sum()), cache, torch.randn(8, 16))


def test_a_submodule_used_again_elsewhere(cache: Path) -> None:
    """The same object under a second name is another model."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    module = planned(model, cache, x)
    model.append(model[0])
    with pytest.warns(RematWarning, match="modules changed"):
        result = module(x)
    assert torch.equal(result, model(x))


def test_a_buffer_that_requires_a_gradient_later(cache: Path) -> None:
    """It gets one."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: (m.middle(x) * m.scale).sum()), cache, x)
    module.scale.requires_grad_()
    with pytest.warns(RematWarning, match="buffers changed"):
        module(x).backward()
    gradient, module.scale.grad = module.scale.grad, None
    module.module(x).backward()
    assert torch.equal(gradient, module.scale.grad)


def test_zeros_for_an_unused_output_never_make_a_number(cache: Path) -> None:
    """A root of zero in a branch that the loss does not use: eager's gradients are finite, a product with
    zeros is not.
    """

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x)
            return hidden.square().sum(-1).sqrt(), self.head(hidden)

    x = torch.randn(3, 4)
    x[1] = 0
    module = planned(Distances(), cache, x)
    with pytest.raises(UnplannedUse, match=r"not finite.*differentiate=\[\.\.\.\]"):
        module(x)[1].sum().backward()
    chosen = PlannedModule(module.module, (x,), {}, repeat_at_random(4), cache_dir=cache, differentiate=[1])
    chosen.zero_grad()
    chosen(x)[1].sum().backward()
    assert chosen.body.weight.grad.isfinite().all()


def test_hooks_on_the_planned_module_are_its_own(cache: Path) -> None:
    """A full backward hook is called, once."""
    x = torch.randn(8, 16, requires_grad=True)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    calls: list[int] = []
    module.register_full_backward_hook(lambda *_: calls.append(1))
    module(x).backward()
    assert calls == [1]


def test_dropping_everything_draws_nothing(cache: Path) -> None:
    """Dropout with a rate of 1 leaves the generator where it was, as in eager."""
    assert_trains_alike(lambda m, x: functional.dropout(m.middle(x), 1.0).sum() + m.first(x).sum(), cache)


def test_a_loss_that_torch_decomposes_wrongly(cache: Path) -> None:
    """Torch's Python form of this loss gives other numbers than its kernel."""

    def forward(m: Small, x: Tensor) -> Tensor:
        return functional.multilabel_margin_loss(m.middle(x), torch.tensor([[3, -1] + [0] * 14] * 8))

    assert_trains_alike(forward, cache)


def _under_vmap(module: PlannedModule, x: Tensor) -> Any:
    return torch.vmap(module)(x[None])


def _under_forward_ad(module: PlannedModule, x: Tensor) -> Any:
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def _under_saved_tensor_hooks(module: PlannedModule, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return module(x)


def _under_functional_grad(module: PlannedModule, x: Tensor) -> Any:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(module, parameters, (x,)).square().sum()
        return found

    return torch.func.grad(loss)({name: p.detach() for name, p in module.named_parameters()})


UNDER = [_under_functional_grad, _under_vmap, _under_forward_ad, _under_saved_tensor_hooks]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("under", UNDER)
def test_under_a_transform_the_original_runs(
    under: Callable[[PlannedModule, Tensor], Any], cache: Path
) -> None:
    """What a plan does not know of is left to the original, counted and said."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    with pytest.warns(RematWarning, match="without a plan"):
        result = under(module, x)
    assert result is not None
    assert module.runs == {"original": 1}


def test_autocast_around_the_backward_alone_is_refused(cache: Path) -> None:
    """Eager would compute it in half precision."""
    x = torch.randn(8, 16)
    loss = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnplannedUse, match="leave autocast"):
        loss.backward()
