"""`remat check`: a planned step against the original."""

import copy
import json
from itertools import count
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_executor.costs.stopwatch import HostClocks
from remat_facade import Hiremate
from remat_facade.cli.app import main
from remat_facade.report.step_check import SideFigures, StepCheck, check_step

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        parts = (part for _ in range(4) for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()))
        self.body, self.drop = nn.Sequential(*parts), nn.Dropout(0.1)

    def forward(self, x):
        y = self.drop(self.body(x))
        return y.square().mean(), y

def make():
    return Net(), torch.randn(128, 32)
"""


class Net(nn.Module):
    """Two outputs, neither of them a loss."""

    def __init__(self) -> None:
        super().__init__()
        parts = (part for _ in range(4) for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()))
        self.body, self.head = nn.Sequential(*parts), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the head and the body return."""
        hidden = self.body(x)
        return self.head(hidden), hidden


@pytest.fixture(scope="module")
def sample() -> Tensor:
    """A batch whose gradient is wanted too."""
    return torch.randn(128, 32, requires_grad=True)


@pytest.fixture(scope="module")
def pair(sample: Tensor, tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Hiremate]:
    """A model and a planned copy."""
    model = Net()
    folder = tmp_path_factory.mktemp("cache")
    return model, Hiremate(copy.deepcopy(model), sample, "70%", cache_dir=folder, time_limit_s=2.0)


def clock(share: float) -> HostClocks:
    """A clock that counts readings; its thread has a core for a share of the seconds that pass."""
    passed, worked = count(), count()
    return HostClocks(passed=lambda: float(next(passed)), worked=lambda: share * next(worked))


@pytest.fixture(scope="module")
def found(pair: tuple[Net, Hiremate], sample: Tensor) -> StepCheck:
    """A check with a clock that counts."""
    return check_step(*pair, (sample,), {}, steps=3, clock=clock(1.0))


def test_a_plan_keeps_its_promises(found: StepCheck) -> None:
    """Results are identical, gradients of inputs among them, and peaks are within the budget."""
    assert found.problems == ()
    assert {kind: each.differing for kind, each in found.compared.items()} == dict.fromkeys(
        ("outputs", "gradients", "buffers", "random state"), 0
    )
    assert [2, 19, 12] == [found.compared[kind].tensors for kind in ("outputs", "gradients", "buffers")]
    assert found.planned.meter_nbytes <= found.planned.allocator_nbytes <= found.plan.budget_nbytes
    assert found.planned.allocator_nbytes < found.unplanned.allocator_nbytes
    assert (found.unplanned.step_s, found.planned.step_s) == (1.0, 1.0)


def test_a_busy_machine_is_said(pair: tuple[Net, Hiremate], sample: Tensor, found: StepCheck) -> None:
    """Where the thread had no core for more than a fifth of the timed steps: in the table and as a flag."""
    said = "other processes kept the cores busy"
    assert (found.busy, said in found.table.note) == (False, False)
    waited = check_step(*pair, (sample,), {}, steps=2, clock=clock(0.5))
    assert (waited.busy, said in waited.table.note) == (True, True)
    assert waited.problems == ()


def test_other_results_are_a_problem(pair: tuple[Net, Hiremate], sample: Tensor) -> None:
    """The line names the kind and the tensor that differs most."""
    model = copy.deepcopy(pair[0])
    with torch.no_grad():
        model.head.bias += 1.0
    compared = check_step(model, pair[1], (sample,), {}, steps=1)
    assert [problem.partition(":")[0] for problem in compared.problems] == ["outputs"]
    assert compared.compared["outputs"].worst == "output 0"
    assert compared.compared["outputs"].relative > 0.01


def test_the_check_adds_no_bytes_of_its_own(tmp_path: Path) -> None:
    """To the byte: the step needs all of its budget when the backward begins."""
    model, sample = nn.Linear(4, 1), torch.randn(2, 4)
    planned = Hiremate(copy.deepcopy(model), (sample,), "100%", cache_dir=tmp_path)
    found = check_step(model, planned, (sample,), {}, steps=1)
    assert found.planned.meter_nbytes == found.planned.allocator_nbytes == planned.plan.budget_nbytes
    assert found.problems == ()


def test_a_peak_above_the_budget_is_a_problem(found: StepCheck) -> None:
    """By either reading; so are steps without the plan."""
    above = found.plan.budget_nbytes + 1
    wrong = attrs.evolve(
        found, planned=SideFigures(meter_nbytes=0, allocator_nbytes=above, step_s=1.0), missed=2
    )
    assert wrong.problems == (
        f"the allocator read {above} bytes, 1 above the budget of {above - 1}",
        "2 steps ran without the plan",
    )


@pytest.mark.parametrize(
    "words", [[], ["--outputs", "dropped", "--gradients", "present"]], ids=["kept", "dropped"]
)
def test_the_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table, and its object for a saved plan; the exit code says whether all promises hold."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "checked.py").write_text(FACTORY)
    target = [f"{tmp_path / 'checked.py'}:make", "--budget", "60%", "--time-limit", "2", *words]
    assert main(["check", *target, "--steps", "1"]) == 0
    shown = capsys.readouterr()
    assert (shown.out.count("identical"), shown.err) == (4, "")
    saved = str(tmp_path / "plan.json")
    assert main(["plan", *target, "--solver", "greedy", "--out", saved]) == 0
    capsys.readouterr()
    assert main(["check", *target, "--plan", saved, "--steps", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["solver"] == "greedy"
    assert facts["busy"] in (False, True)
    assert (facts["holds"], facts["problems"], facts["missed"]) == (True, [], 0)
    assert facts["planned"]["allocator_nbytes"] <= facts["plan"]["budget_nbytes"]
