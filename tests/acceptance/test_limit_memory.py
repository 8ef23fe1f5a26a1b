"""A memory limit in place: the user's object, class and programs, the same numbers, within the budget."""

from __future__ import annotations

import copy
import inspect
import io
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, PlannedModule, RematWarning, UnplannedUse, allocator_peak
from remat_facade import BadModel, Hiremate, limit_memory, planned, release
from remat_graph import BadBudget
from remat_solvers import InfeasibleBudget
from tests.helpers.offmates import PLATFORM

WIDTH = 48


class Network(nn.Module):
    """Dropout, a batch norm, keyword inputs, a method that calls the model."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        blocks = [
            layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        ]
        self.body = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.out(self.norm(self.body(x))).square().mean()

    def loss_of(self, x: Tensor) -> Tensor:
        loss: Tensor = self(x)
        return loss


def network(**options: Any) -> Network:
    """The same weights every time."""
    torch.manual_seed(0)
    return Network(**options)


def batch(seed: int = 0, rows: int = 128) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, steps: int = 3) -> list[Any]:
    """Losses, evaluations and gradients of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(batch(step))
        loss.backward()
        seen += [loss.item(), *(p.grad.sum().item() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model.eval()(batch(step)).item())
        model.train()
    return seen


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"time_limit_s": 1.0, "zoo": False, "cache_dir": tmp_path, "platform": PLATFORM}


def test_the_same_object_and_numbers(options: dict[str, Any]) -> None:
    model, expected = network(), trained(network())
    parameters = list(model.parameters())
    assert limit_memory(model, "50%", **options) is model
    assert planned(model) is None
    assert trained(model) == expected
    found = planned(model)
    assert found is not None
    assert (found.runs["planned"], found.runs["replanned"], found.plan.overhead > 0) == (3, 0, True)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert release(model) is model
    assert type(model) is Network
    assert planned(model) is None
    assert model(batch()).item() != 0.0


def test_within_the_budget(options: dict[str, Any]) -> None:
    """Planned at the first call; the second is measured."""
    model = limit_memory(network(), "40%", **options)
    model(batch()).backward()
    found = planned(model)
    assert found is not None

    def step() -> None:
        model.zero_grad()
        model(batch()).backward()

    step()
    x = batch()
    model.zero_grad()
    peak = allocator_peak(lambda: model(x).backward(), "cpu")
    assert 0 < peak.peak_nbytes <= found.plan.budget_nbytes < found.plan.noremat_peak_nbytes


def test_it_is_what_it_was_to_others(options: dict[str, Any]) -> None:
    plain, model = network(), limit_memory(network(), "50%", **options)
    assert isinstance(model, Network)
    assert not isinstance(model, PlannedModule)
    assert (type(model).__name__, type(model).__module__) == ("Network", Network.__module__)
    assert repr(model) == repr(plain)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(Network.forward)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.__dict__.keys() == plain.__dict__.keys()
    assert type(type(model)()) is Network
    many = limit_memory(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "50%", **options)
    assert (len(many), type(many[:1])) == (2, nn.Sequential)
    model.loss_of(batch()).backward()
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 1


def test_saved_as_the_original(options: dict[str, Any]) -> None:
    """A warning says once that the limit does not come along."""
    model = limit_memory(network(), "50%", **options)
    model(batch()).backward()
    file = io.BytesIO()
    with pytest.warns(RematWarning, match="pickled or copied without its limit; call limit_memory on"):
        torch.save(model, file)
    torch.save(model, io.BytesIO())  # another warning would be an error
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Network
    assert type(copy.copy(model)) is Network
    pairs = zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_copy_has_the_limit_and_shares_the_plan(options: dict[str, Any]) -> None:
    before = copy.deepcopy(limit_memory(network(), "50%", **options))
    assert planned(before) is None
    model = limit_memory(network(), "50%", **options)
    model(batch()).backward()
    model.itself = [model]
    copied = copy.deepcopy(model)
    assert copied.itself[0] is copied
    del model.itself, copied.itself
    copied.zero_grad()
    plain = network()
    plain.load_state_dict(model.state_dict())
    assert trained(copied) == trained(plain)
    found = planned(copied)
    assert found is not None
    assert found is not planned(model)
    assert found.runs["planned"] == 3
    release(copied)
    assert planned(model) is not None


def test_what_is_assigned_to_forward_is_planned(options: dict[str, Any]) -> None:
    """By a library, before the limit, after it, and after the first plan; deleting restores the class's."""
    for when in ("before", "after", "planned"):
        model, plain = network(), network()
        if when != "before":
            limit_memory(model, "50%", **options)
        if when == "planned":
            for each in (model, plain):
                torch.manual_seed(9)
                each(batch()).backward()
        for each in (model, plain):
            inner = each.forward
            each.forward = lambda x, inner=inner: 2.0 * inner(x, scale=0.25)
        if when == "before":
            limit_memory(model, "50%", **options)
        with (
            pytest.warns(RematWarning, match="called in another way") if when == "planned" else nullcontext()
        ):
            assert trained(model) == trained(plain)
        found = planned(model)
        assert found is not None
        assert found.runs["original"] == 3  # of the evaluations
        assert (found.runs["planned"], found.runs["replanned"]) == ((4, 1) if when == "planned" else (3, 0))
        del model.forward, plain.forward
        with torch.no_grad():
            assert model.eval()(batch()).item() == plain.eval()(batch()).item()
            release(model)
            assert "forward" not in model.__dict__
            assert model.eval()(batch()).item() == plain.eval()(batch()).item()


class Fused(NamedTuple):
    """What a trainer's own forward returns: it makes the loss of the scores."""

    loss: Tensor
    scores: Tensor


@pytest.mark.parametrize("before", [False, True])
def test_all_outputs_of_a_trainers_own_kind_count(before: bool, options: dict[str, Any]) -> None:
    """A scalar in front is the loss of a model, not of a forward that returns a type of its own package."""

    def fused(self: nn.Module, x: Tensor) -> Fused:
        scores = nn.functional.linear(x, self.weight).tanh()
        return Fused(scores.square().mean(), scores)

    def gradient(model: nn.Linear) -> Tensor:
        model(batch()).scores.exp().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    torch.manual_seed(0)
    expected, ours = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    ours.load_state_dict(expected.state_dict())
    if not before:
        limit_memory(ours, "100%", **options)
    for model in (expected, ours):
        model.forward = MethodType(fused, model)
    if before:
        limit_memory(ours, "100%", **options)
    assert torch.equal(gradient(expected), gradient(ours))
    assert planned(ours).runs == {"planned": 1}


def test_an_assigned_forward_that_cannot_be_captured(options: dict[str, Any]) -> None:
    """It runs as it is, the forward that it calls is planned, and a warning says so."""
    model = limit_memory(network(), "50%", **options)
    inner = model.forward

    def forward(x: Tensor) -> Tensor:
        loss: Tensor = inner(x)
        return loss if loss.item() > -1.0 else -loss  # an input of Python's

    model.forward = forward
    plain = network()
    with pytest.warns(RematWarning, match="outside of the plan and the budget"):
        assert trained(model) == trained(plain)
    found = planned(model)
    assert found is not None
    assert found.runs["planned"] == 3


def test_hooks_of_the_model_see_the_model(options: dict[str, Any]) -> None:
    model = limit_memory(network(), "50%", **options)
    seen: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module))
    model.register_forward_hook(lambda module, *_: seen.append(module))
    model(batch()).backward()
    assert [each is model for each in seen] == [True, True]
    assert planned(model) is not None


def test_calls_that_need_no_plan(options: dict[str, Any]) -> None:
    """Without gradients, frozen, with nothing to differentiate, in a transform: as before."""
    model = limit_memory(network(), "50%", **options)
    with torch.no_grad():
        model(batch())
    with torch.inference_mode():
        model(batch())
    model.requires_grad_(requires_grad=False)
    model(batch())
    model.requires_grad_()
    assert planned(model) is None
    with pytest.warns(RematWarning, match=r"a Network with a memory limit runs without a plan: .*transform"):
        torch.func.grad(model.eval())(batch())
    assert planned(model) is None


class Chosen(nn.Linear):
    """Its class overrides `__call__`."""

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x)
        return 2.0 * result


def test_a_class_with_a_call_of_its_own(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Chosen(WIDTH, WIDTH)
    plain = copy.deepcopy(model)
    limit_memory(model, "100%", **options)
    results = [each(batch()) for each in (model, plain)]
    for each in results:
        each.sum().backward()
    assert torch.equal(*results)
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert planned(model) is not None


def test_a_sample_plans_at_once(options: dict[str, Any]) -> None:
    model = limit_memory(network(), "50%", sample=batch(), sample_kwargs={"scale": 2.0}, **options)
    found = planned(model)
    assert found is not None
    model(batch(), scale=2.0).backward()
    assert (found.runs["planned"], found.runs["replanned"]) == (1, 0)
    other = network()
    with pytest.raises(InfeasibleBudget):
        limit_memory(other, 1000, sample=batch(), **options)
    assert type(other) is Network


def test_another_limit_replaces_the_first(options: dict[str, Any]) -> None:
    model = limit_memory(network(), "90%", sample=batch(), **options)
    first = planned(model)
    limit_memory(model, "50%", sample=batch(), **options)
    second = planned(model)
    assert first is not None
    assert second is not None
    assert second.plan.budget_nbytes < first.plan.budget_nbytes
    release(model)
    assert type(model) is Network


def test_the_environment_has_the_default(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_BUDGET", "3MiB")
    found = planned(limit_memory(network(), sample=batch(), **options))
    assert found is not None
    assert found.plan.budget_nbytes == 3 << 20
    monkeypatch.delenv("REMAT_BUDGET")
    found = planned(limit_memory(network(), sample=batch(), **options))
    assert found is not None
    assert found.plan.budget_nbytes > 1 << 28  # of what is free


def test_a_compiled_model_warns_and_follows_its_plan(options: dict[str, Any]) -> None:
    model = limit_memory(network(), "50%", **options)
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        assert trained(compiled) == trained(network())
    assert planned(compiled) is planned(model) is not None
    with pytest.warns(RematWarning, match="is not compiled"):
        model.compile()
    later: Any = torch.compile(network(), backend="eager")
    assert limit_memory(later, "50%", **options) is later
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        assert trained(later) == trained(network())
    assert planned(later) is not None
    release(later)
    assert planned(later) is None


def test_a_part_of_a_model(options: dict[str, Any]) -> None:
    model, plain = network(), network()
    limit_memory(model.body, "50%", **options)
    assert trained(model) == trained(plain)
    assert planned(model.body) is not None
    with pytest.raises(BadInput, match="submodule 'body' is planned already"):
        limit_memory(model, "50%", sample=batch(), **options)
    assert type(model) is Network


@pytest.mark.filterwarnings("ignore:called again before the backward")
def test_threads_plan_once(options: dict[str, Any]) -> None:
    model = limit_memory(network(), "50%", **options)
    losses: list[Tensor] = []
    threads = [threading.Thread(target=lambda: losses.append(model(batch()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = planned(model)
    assert found is not None
    assert (len(losses), found.runs["planned"], found.runs["replanned"]) == (3, 3, 0)


def test_a_dropped_model_gives_its_memory_back(options: dict[str, Any]) -> None:
    model = limit_memory(network(), "50%", **options)
    model(batch()).backward()
    weight = weakref.ref(model.out.weight)
    del model
    assert weight() is None


class Slotted(nn.Module):
    __slots__ = ("secret",)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (lambda: 3, BadModel, "is of type int; expected an nn.Module"),
        (Slotted, BadInput, r"keeps state in slots \(secret\).*Hiremate"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), BadInput, "keeps state in TorchScript"),
    ],
)
def test_what_cannot_be_limited(model: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        limit_memory(model(), "50%")


def test_wrong_arguments(options: dict[str, Any]) -> None:
    """At once, and the model is as it was."""
    model = network()
    with pytest.raises(BadBudget):
        limit_memory(model, "many", **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bugdet'"):
        limit_memory(model, "50%", bugdet=3)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="the Network has no memory limit; call limit_memory first"):
        release(model)
    with pytest.raises(BadModel, match="planned already"):
        limit_memory(Hiremate(model, batch(), "50%", **options), "50%")
    assert type(model) is Network
    limit_memory(model, "50%", **options)
    with pytest.raises(BadInput, match=r"planned already; .*release\(model\)"):
        Hiremate(model, batch(), "50%", **options)
    with pytest.raises(UnplannedUse, match="DistributedDataParallel"):
        model._replicate_for_data_parallel()  # as DataParallel does


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear, "is the class Linear; expected an nn.Module: make an object of it"),
        ([nn.Linear(2, 2)], "is of type list; expected an nn.Module: limit each model by a call of its own"),
        (None, r'is of type NoneType; expected an nn.Module: as in limit_memory\(model, "20GiB"\)'),
        (SimpleNamespace(model=nn.Linear(2, 2)), "is of type SimpleNamespace; .*: give its `model`"),
        (nn.ModuleList([nn.Linear(2, 2)]), r"a ModuleList has no forward, .* that training calls \(0\)"),
    ],
)
def test_what_came_instead_of_a_model(model: Any, text: str) -> None:
    with pytest.raises(BadModel, match=text):
        limit_memory(model, "50%")


def test_a_gradient_of_another_output_names_it(options: dict[str, Any]) -> None:
    """The error has the argument to give."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.network.body(x)
            return hidden.square().mean(), hidden

    _, hidden = limit_memory(Loss(), "70%", **options)(batch())
    with pytest.raises(UnplannedUse, match=r"output 1 .* as in differentiate=\[1\]"):
        hidden.sum().backward()
    _, hidden = limit_memory(Loss(), "70%", differentiate=[1], **options)(batch())
    hidden.sum().backward()


def test_a_budget_without_a_unit(options: dict[str, Any]) -> None:
    """Text is refused at once; a number, which programs compute, with the error of a budget too small."""
    with pytest.raises(BadBudget, match=r"'40': has no unit, so it would be 40 B; did you mean \"40%\" or"):
        limit_memory(network(), "40", **options)
    with pytest.raises(BadBudget, match="has no unit"):
        Hiremate(network(), batch(), " 1e2 ", **options)
    with pytest.raises(InfeasibleBudget, match='a number is bytes: "20GiB" is a size, "20%" a share'):
        limit_memory(network(), 20, sample=batch(), **options)
    with pytest.raises(InfeasibleBudget, match="raise the budget"):
        limit_memory(network(), "4KB", sample=batch(), **options)
    limit_memory(network(), "40B", **options)
    limit_memory(network(), "2000000", **options)


class Around(nn.Module):
    """What a trainer or an adapter makes of a model."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_planned_of_a_module_around_the_model(options: dict[str, Any]) -> None:
    model, other = limit_memory(network(), "50%", **options), limit_memory(network(), "50%", **options)
    around = Around(model, nn.Linear(2, 2))
    assert planned(around) is None
    model(batch()).backward()
    assert planned(around) is planned(model) is not None
    assert planned(Around(torch.compile(model))) is planned(model)
    assert planned(Around(Hiremate(network(), batch(), "50%", **options))) is not None
    assert planned(Around(model, other)) is None  # which one is not known
