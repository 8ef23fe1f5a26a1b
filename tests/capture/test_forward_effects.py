"""What a forward reads and does beside computing: planned as eager does it, or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat_executor import CaptureError, RematWarning
from tests.helpers.small_forward import Forward, Small, assert_trains_alike, planned


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


@pytest.mark.filterwarnings("ignore:called in another way:remat_executor.RematWarning")
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
    with pytest.warns(RematWarning, match=r"arguments \(argument 1\) changed"):
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
    """A counter that the training loop sets is not guarded: a warning would be an error."""
    x = torch.randn(8, 16)
    module = planned(Small(lambda m, x: m.middle(x).sum()), cache, x)
    for epoch in range(3):
        module.epoch = epoch
        module(x)
    assert module.runs == {"planned": 3}


def test_a_setting_that_changes_no_op_keeps_the_plan(cache: Path) -> None:
    """The forward reads it and it changes no op: captured again, with the values said; not solved."""
    x = torch.randn(8, 16)

    def forward(m: Small, x: Tensor) -> Tensor:
        return (m.middle(x) if m.epoch >= 0 else x).sum()

    model = Small(forward)
    model.epoch = 0
    module = planned(model, cache, x)
    first = module.plan
    module.epoch = 1
    with pytest.warns(RematWarning, match=r"attributes \(epoch: 0 -> 1\) changed.*hold them in tensors"):
        module(x)
    assert module.plan is first
    module.epoch = 2
    module(x)
    module.epoch = 3
    with pytest.warns(RematWarning, match=r"every call is recaptured because attributes \(epoch: 2 -> 3\)"):
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
