"""A call that the original does not take raises what the original raises, when it is planned and later."""

from __future__ import annotations

import copy
import dataclasses
import random
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from remat_executor import CaptureError, PlannedModule
from remat_executor.errors import note_on
from tests.helpers.offmates import MODELS, OPTIMIZERS, Run, differences, offmate
from tests.helpers.planners import save_all


class Small(Exception):
    """A user's own, with arguments that no message tells."""

    def __init__(self, what: str, rows: int) -> None:
        super().__init__(what, rows)
        self.what, self.rows = what, rows


class Checks(nn.Module):
    """Refuses batches of fewer than four rows, in some way, after it has changed all that it can."""

    count: Tensor

    def __init__(self, how: str = "custom") -> None:
        super().__init__()
        self.how, self.seen = how, [0]
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.zeros(2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.count.add_(1)
        hidden = self.drop(self.linear(x))
        if x.shape[0] < 4:
            self.plain += 1
            self.seen.append(len(x))
            random.random()
            x.zero_()
            refuse(self.how, x)
        return hidden.relu().sum()


def refuse(how: str, x: Tensor) -> None:
    """Raise in one of the ways in which a forward may."""
    match how:
        case "custom":
            raise Small("batch", len(x))
        case "chained":
            raise ValueError("batch too small") from KeyError("cause")
        case "assert":
            assert len(x) >= 4, "rows"
        case "attribute":
            x.nothing  # type: ignore[attr-defined] # noqa: B018
        case "key":
            raise KeyError("rows")
        case "index":
            raise IndexError("rows")
        case "not implemented":
            raise NotImplementedError
        case "numpy":
            torch.from_numpy(x.detach().numpy()) @ torch.ones(7)


HOWS = ("custom", "chained", "assert", "attribute", "key", "index", "not implemented", "numpy")


class Tokens(nn.Module):
    """An embedding with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).tanh()


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


X, IMAGE, INDICES = torch.ones(5, 6), torch.ones(2, 3, 6, 6), torch.ones(2, 3, dtype=torch.long)
WRONG: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = {
    "width": (_layers, (X,), (torch.ones(5, 7),), {}),
    "an int": (_layers, (X,), (X.long(),), {}),
    "a bool": (_layers, (X,), (X.bool(),), {}),
    "a double": (_layers, (X,), (X.double(),), {}),
    "complex": (_layers, (X,), (X + 0j,), {}),
    "no dimension": (_layers, (X,), (torch.tensor(1.0),), {}),
    "one row for a norm": (_layers, (X,), (X[:1],), {}),
    "None": (_layers, (X,), (None,), {}),
    "a tuple": (_layers, (X,), ((X, X),), {}),
    "a text": (_layers, (X,), ("text",), {}),
    "a number": (_layers, (X,), (3.0,), {}),
    "too many": (_layers, (X,), (X, X), {}),
    "none at all": (_layers, (X,), (), {}),
    "an unknown name": (Checks, (X,), (X,), {"masks": X}),
    "a missing one": (Checks, (X,), (), {"mask": X}),
    "channels": (_convolution, (IMAGE,), (IMAGE[:, :2],), {}),
    "a small image": (_convolution, (IMAGE,), (IMAGE[..., :2, :2],), {}),
    "floats for indices": (Tokens, (INDICES,), (INDICES.float(),), {}),
} | {how: (lambda how=how: Checks(how), (X,), (X[:2],), {}) for how in HOWS}


def _raised(call: Any, *args: Any, **kwargs: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - compared with what eager raises
        call(*args, **kwargs)
    return caught.value


def _in_full(error: BaseException | None) -> Any:
    """Type, arguments, attributes and causes: what a handler could look at, but for notes and traceback."""
    if error is None:
        return None
    attributes = {name: value for name, value in vars(error).items() if name not in ("__notes__", "obj")}
    return type(error), error.args, attributes, _in_full(error.__cause__), _in_full(error.__context__)


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("when", ["built", "called"])
def test_it_is_the_originals_error(case: str, when: str, tmp_path: Path) -> None:
    """Same type, arguments and cause, with a note; nothing has changed, and a right call works."""
    make, right, wrong, named = WRONG[case]
    torch.manual_seed(0)
    model = make()
    expected = _raised(copy.deepcopy(model), *copy.deepcopy(wrong), **named)
    planned = PlannedModule(model, right, {}, save_all, cache_dir=tmp_path)
    state, given = copy.deepcopy(model.state_dict()), copy.deepcopy(wrong)
    drawn = torch.get_rng_state(), random.getstate()
    if when == "called":
        actual = _raised(planned, *given, **named)
    else:
        actual = _raised(PlannedModule, model, given, named, save_all, cache_dir=tmp_path)
    assert _in_full(expected) == _in_full(actual)
    assert "the original raises the same when it is called alone: correct the model, or" in str(
        note_on(actual)
    )
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in state.items())
    assert all(torch.equal(t, g) for t, g in zip(wrong, given, strict=True) if isinstance(t, Tensor))
    if isinstance(model, Checks):
        assert ([0], 0) == (model.seen, int(model.plain.sum()))
    planned(*right)
    assert planned.runs == {"planned": 1}


class Mute(Exception):
    """Raises when it is asked for its text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Empty(Exception):
    """Has something for its text that is none."""

    def __str__(self) -> str:
        return cast(str, None)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Lets nobody set an attribute, not even what Python's own contexts set."""

    code: int = 3


class Raises(nn.Linear):
    """Raises an error of a class of the user's."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(6, 6)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Raise it, after some work."""
        super().forward(x)
        raise self.kind


@pytest.mark.parametrize("kind", [Mute, Empty, Frozen])
def test_an_error_of_an_odd_class_is_the_originals(kind: type[Exception], tmp_path: Path) -> None:
    """One that has no text or lets nobody write on it: the same, with a note."""
    model = Raises(kind)
    expected = _raised(model, X)
    actual = _raised(PlannedModule, model, (X,), {}, save_all, cache_dir=tmp_path)
    assert _in_full(expected) == _in_full(actual)
    assert f"raised at {__file__}" in str(note_on(actual))


def test_the_note_names_module_and_line(tmp_path: Path) -> None:
    """Where the forward was, in the user's file."""
    error = _raised(PlannedModule, Tokens(), (INDICES.float(),), {}, save_all, cache_dir=tmp_path)
    note = str(note_on(error))
    assert note.startswith(f"raised in 'embed' (Embedding), at {__file__}:")
    assert "(return self.head(self.embed(tokens)).tanh()) while" in note


def test_a_user_who_handles_the_error_goes_on(tmp_path: Path) -> None:
    """The error is freed as soon as it is handled, with the tensors in its traceback."""
    planned = PlannedModule(Checks(), (X,), {}, save_all, cache_dir=tmp_path)
    met: list[Any] = []
    for _ in range(3):
        try:
            planned(X[:2].clone())
        except Small as error:
            met.append(weakref.ref(error))
    assert [None] * 3 == [found() for found in met]


class OnlyTraced(nn.Module):
    """Takes every call, but cannot be traced."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "type" and type(x) is not Tensor:
            raise TypeError("wanted a tensor")
        elif self.how == "written":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.01, 0.01)
            if type(x) is not Tensor:
                raise TypeError("wanted a tensor")
        elif self.how == "backward":
            (x,) = torch.autograd.grad(self.linear(x).pow(2).sum(), self.linear.bias)
            if type(x) is not Tensor:
                raise TypeError("wanted a tensor")
        elif self.how == "functional":
            x = x + torch.func.grad(lambda w: (x @ w).sum())(self.linear.weight).sum()
            if type(x) is not Tensor:
                raise TypeError("wanted a tensor")
        return self.linear(x)


@pytest.mark.parametrize("how", ["type", "written", "backward", "functional"])
def test_what_only_a_trace_raises_is_said_as_that(how: str, tmp_path: Path) -> None:
    """An error that the original does not raise is never passed off as its own."""
    model = OnlyTraced(how)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=r"test_wrong_inputs\.py:\d+.*wrap a submodule") as caught:
        PlannedModule(model, (X,), {}, save_all, cache_dir=tmp_path)
    assert ("though OnlyTraced alone accepts this call" in str(caught.value)) == (how == "type")
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())


class Refused(nn.Module):
    """Does what no graph would do again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "seeds":
            torch.manual_seed(0)
        elif self.how == "assigns":
            self.linear.weight.data = self.linear.weight.detach() * 1
        elif self.how == "selects":
            x = x[x[:, 0] > 0]
        elif self.how == "reads":
            x = x * x.sum().item()
        elif self.how == "leaves":
            x = x * torch.from_numpy(x.numpy())
        return self.linear(x)


REFUSED = {
    "seeds": "random generator",
    "assigns": r"\.data",
    "selects": "a shape depends on the values",
    "reads": "a branch or a Python number depends on the values",
    "leaves": "makes a NumPy array of a tensor",
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_refusal_names_module_and_line(how: str, tmp_path: Path) -> None:
    """Whatever stops the trace, it is said where."""
    place = r".* in 'inner' \(Refused\), at .*test_wrong_inputs\.py:\d+ \("
    with pytest.raises(CaptureError, match=REFUSED[how] + place):
        PlannedModule(nn.Sequential(OrderedDict(inner=Refused(how))), (X,), {}, save_all, cache_dir=tmp_path)


def test_memory_that_runs_out_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the original alone had room says nothing about what stopped the capture."""
    model = OnlyTraced("type")

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError

    def fails(x: Tensor) -> Tensor:
        return full(x) if type(x) is Tensor else OnlyTraced.forward(model, x)

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(CaptureError, match=r"wanted a tensor.*if OnlyTraced alone raises this too"):
        PlannedModule(model, (X,), {}, save_all, cache_dir=tmp_path)


def test_a_norm_that_averages_over_all_batches_is_named(tmp_path: Path) -> None:
    """Its place, and what to set."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6, momentum=None)))
    with pytest.raises(CaptureError, match=r"momentum=None.*'1\.0' \(BatchNorm1d\); give it a momentum"):
        PlannedModule(model, (X,), {}, save_all, cache_dir=tmp_path)
    PlannedModule(model.eval(), (X,), {}, save_all, cache_dir=tmp_path)


def test_a_wrong_batch_between_steps_of_an_offmate() -> None:
    """The original's error where parameters are placed on the host too; training goes on as without it."""
    make, batches = MODELS["convolutions"]
    runs = []
    for kind in ("plain", "offmate"):
        model = make()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        module: Any = model
        if kind == "offmate":
            module = offmate(model, batches(0), "60%", optimizer=optimizer)
            assert module.plan.on_host
        runs.append(Run(module, optimizer, batches))
    plain, ours = (run.train(2) for run in runs)
    wrong = batches(5) | {"images": torch.ones(4, 2, 12, 12)}
    expected, actual = (_raised(run.model, **wrong) for run in (plain, ours))
    assert _in_full(expected) == _in_full(actual)
    assert [] == differences(plain.train(2), ours.train(2))
