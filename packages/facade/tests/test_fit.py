"""Will it fit: the memory of training, as torch allocates it; budget='auto' uses the remainder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_facade import Hiremate, NothingLeft, UnknownOptimizer
from remat_facade.cli.app import main
from remat_facade.planning.memory_fit import (
    FRAGMENTED_RESERVE,
    FRAGMENTS,
    RESERVE,
    auto_budget,
    fit_of,
    free_on,
    reserved_share,
    states_nbytes,
    total_nbytes,
)
from remat_facade.planning.state_rules import optimizer_names
from remat_graph import BadBudget, format_nbytes, load_plan, parse_nbytes
from remat_graph.serialization.plans import plan_to_data

CPU = torch.device("cpu")


class Net(nn.Module):
    """A matrix, a stack of matrices, a vector, a frozen layer and a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.stack = nn.Parameter(torch.randn(3, 16, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,kio->bko", self.first(x).tanh(), self.stack)
        return self.frozen(y).square().mean() + 0 * self.steps.sum()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
}


def test_every_name_is_tested() -> None:
    """Every name except "none" is a class of torch."""
    assert {*OPTIMIZERS, "none"} == set(optimizer_names())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_torch_makes(name: str, dtype: torch.dtype) -> None:
    """The sizes match the optimizer's states exactly, by name and by the optimizer itself."""
    model = Net().to(dtype)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[name](trainable)
    predicted = states_nbytes(trainable, optimizer)
    model(torch.randn(2, 8, dtype=dtype)).backward()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    assert sum(t.numel() * t.element_size() for t in tensors) == predicted
    assert states_nbytes(trainable, name) == predicted
    assert states_nbytes(trainable, "none") == 0


def test_a_report_adds_up(tmp_path: Path) -> None:
    """Parameters, buffers, gradients, states and budget, against a device of a given size."""
    model = Hiremate(Net(), torch.randn(4, 8), "100%", cache_dir=tmp_path, solver="noremat")
    trainable = 4 * (8 * 16 + 16 + 3 * 16 * 4)
    fit = model.will_it_fit()
    assert fit.parameters_nbytes == trainable + 4 * (4 * 4 + 4)
    assert fit.buffers_nbytes == 20
    assert fit.gradients_nbytes == trainable
    assert fit.states_nbytes == 2 * trainable + 3 * 4
    assert fit.budget_nbytes == model.plan.budget_nbytes
    assert fit.total_nbytes == fit.kept_nbytes + fit.budget_nbytes
    assert fit.fits
    assert "fits" in fit.summary()
    assert model.plan.summary().splitlines()[-1] == fit.details()
    assert f"parameters {format_nbytes(fit.parameters_nbytes)}" in fit.details()
    assert "notes" not in plan_to_data(model.plan)

    assert model.will_it_fit(device_nbytes="1KiB").device_nbytes == 1024
    with pytest.raises(BadBudget, match=r"device_nbytes '8': is 8 bytes; did you mean .8GiB"):
        model.will_it_fit(device_nbytes="8")
    exactly = model.will_it_fit("sgd", device_nbytes=fit.total_nbytes - fit.states_nbytes)
    assert (exactly.left_nbytes, exactly.fits) == (0, True)
    tight = model.will_it_fit("sgd", device_nbytes=fit.total_nbytes - fit.states_nbytes - 1)
    assert (tight.left_nbytes, tight.fits) == (-1, False)
    assert tight.summary().startswith("does not fit")
    assert "\n" not in tight.summary()


def test_a_device_that_does_not_say() -> None:
    """The answer is unknown."""
    fit = fit_of(Net(), 1, device=torch.device("meta"))
    assert (fit.device_nbytes, fit.left_nbytes, fit.fits) == (None, None, None)
    assert "is unknown" in fit.summary()
    with pytest.raises(NothingLeft, match="is unknown"):
        auto_budget(Net(), "sgd", torch.device("meta"))


def test_this_machine() -> None:
    """The CPU has memory, and some of it is free."""
    total, free = total_nbytes(CPU), free_on(CPU)
    assert total is not None
    assert free is None or 0 < free <= total


def test_auto_is_what_is_left() -> None:
    """Free memory less the reserve, gradients and states; allocated ones are not subtracted again."""
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients, states = sum(4 * p.numel() for p in trainable), states_nbytes(trainable, "adam")
    free = 100_000

    def auto(optimizer: Any) -> int:
        return auto_budget(model, optimizer, CPU, free=lambda _: free)

    assert auto("adam") == 95_000 - gradients - states
    optimizer = torch.optim.Adam(trainable)
    assert auto(optimizer) == auto("adam")
    model(torch.randn(2, 8)).backward()
    assert auto(optimizer) == auto("none") - states == 95_000 - states
    optimizer.step()
    assert auto(optimizer) == 95_000


def test_auto_where_nothing_is_left() -> None:
    """One line names the parts and says what to do."""
    with pytest.raises(NothingLeft, match=r"gradients take .* adam .* nothing is left; .*sgd") as caught:
        auto_budget(Net(), "adam", CPU, free=lambda _: 4_000)
    assert "\n" not in str(caught.value)


def test_auto_as_a_budget(tmp_path: Path) -> None:
    """A small model is planned without recomputation."""
    model = Hiremate(Net(), torch.randn(4, 8), "auto", cache_dir=tmp_path, optimizer="sgd-momentum")
    assert model.plan.recomputed_s == 0
    assert model.will_it_fit().optimizer == "sgd-momentum"
    model(torch.randn(4, 8)).backward()


@pytest.mark.parametrize(
    "optimizer",
    ["adamv", torch.optim.RMSprop([torch.zeros(1)], momentum=0.9), torch.optim.ASGD([torch.zeros(1)])],
)
def test_an_unknown_optimizer(optimizer: Any, tmp_path: Path) -> None:
    """The error lists the known optimizers; a plan is made without the sum."""
    with pytest.raises(UnknownOptimizer, match="adamw, ") as caught:
        states_nbytes([torch.zeros(1)], optimizer)
    assert "\n" not in str(caught.value)
    options: dict[str, Any] = {"cache_dir": tmp_path, "solver": "noremat", "optimizer": optimizer}
    model = Hiremate(Net(), torch.randn(4, 8), "100%", **options)
    assert model.plan.summary().splitlines()[-1].startswith("by noremat")


FACTORY = f"""
import torch
from {__name__} import Net

def make():
    return Net(), torch.randn(4, 8)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a factory, and its own cache."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "fit_factory.py").write_text(FACTORY)
    return f"{tmp_path / 'fit_factory.py'}:make"


def test_the_command(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`remat plan` shows the sum for the given optimizer and device."""
    words = ["plan", target, "--budget", "auto", "--optimizer", "adafactor", "--device-memory"]
    assert main([*words, "80GiB"]) == 0
    out = capsys.readouterr().out
    assert "states of adafactor" in out
    assert "left of the 80.0 GiB" in out


def test_the_command_where_it_does_not_fit(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is shown, one line says what is missing, and the exit code is 1."""
    assert main(["plan", target, "--budget", "3KiB", "--device-memory", "4KiB"]) == 1
    out, err = capsys.readouterr()
    assert "Net, predicted" in out
    assert "remat: training does not fit: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("size", ["20KiB", "80GiB", "4096PiB"])
def test_auto_is_of_the_memory_named(size: str, target: str, tmp_path: Path) -> None:
    """The budget is of the given memory, less the model and a reserve."""
    words = ["plan", target, "--budget", "auto", "--optimizer", "adam", "--device-memory", size]
    assert main([*words, "--out", str(tmp_path / "plan.json")]) == 0
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    kept = sum(4 * p.numel() for p in model.parameters()) + sum(4 * b.numel() for b in model.buffers())
    free = parse_nbytes(size) - kept
    left = (
        free - int(RESERVE * free) - sum(4 * p.numel() for p in trainable) - states_nbytes(trainable, "adam")
    )
    assert left == load_plan(tmp_path / "plan.json").budget_nbytes


@pytest.mark.parametrize(
    ("device", "settings", "share"),
    [
        ("cpu", "", RESERVE),
        ("cuda", "", FRAGMENTED_RESERVE),
        ("cuda", "max_split_size_mb:64", FRAGMENTED_RESERVE),
        ("cuda", "expandable_segments:True", RESERVE),
    ],
)
def test_auto_reserves_what_fragments_take(device: str, settings: str, share: float) -> None:
    """By the settings of CUDA's allocator."""
    assert share == reserved_share(torch.device(device), {"PYTORCH_ALLOC_CONF": settings})


def test_auto_of_memory_that_is_too_small(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the parts that leave nothing."""
    assert main(["plan", target, "--budget", "auto", "--device-memory", "1KiB"]) == 1
    said = capsys.readouterr().err
    assert "of the 1.00 KiB of the given device, parameters and buffers take " in said
    assert "nothing is left" in said


def test_a_budget_above_the_memory_named(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget above the given device is refused, even if this machine has the memory."""
    assert main(["plan", target, "--budget", "2MiB", "--device-memory", "1MiB"]) == 2
    assert "exceeds the memory of the given device, which has 1.00 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--optimizer", "adamv"], "optimizer 'adamv'"),
        (["--device-memory", "many"], "neither a size"),
        (["--device-memory", "40%"], "percentage"),
    ],
)
def test_what_the_command_cannot_do(
    words: list[str], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake gives one line before any work."""
    assert main(["plan", target, "--budget", "100%", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert said in err


def test_fragments_are_named_where_they_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA without expandable segments, if less is left than they may take."""
    device = torch.device("cuda")
    tensors_nbytes = fit_of(Net(), 1 << 30, "adamw", device=device, device_nbytes=0).total_nbytes
    for setting, device_nbytes, named in (
        ("", tensors_nbytes * 13 // 10, False),
        ("", tensors_nbytes * 12 // 10, True),
        ("expandable_segments:True", tensors_nbytes * 12 // 10, False),
    ):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
        fit = fit_of(Net(), 1 << 30, "adamw", device=device, device_nbytes=device_nbytes)
        assert fit.fits
        assert fit.summary().startswith("fits: ")
        assert ("fragments may take 287 MiB without" in fit.summary()) == named
    assert fit_of(Net(), 1 << 30, device=CPU, device_nbytes=1 << 31).fragments_nbytes == 0
    assert (1 - FRAGMENTED_RESERVE) * (1 + FRAGMENTS) < 1
