"""The benchmarks of an accelerator on tiny models: a row of each kind, and which errors are failures."""

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import gpu, gpu_first, gpu_offload, offload_ways
from benchmarks.device_steps import current_device, too_small
from benchmarks.first_contact import cuda_tests, runtimes
from benchmarks.first_contact.rows import Row as FirstRow
from benchmarks.first_contact.rows import Setting
from remat_executor.costs.failures import MeasureError
from remat_facade import InfeasibleBudget

Patch = pytest.MonkeyPatch
Run = Callable[..., tuple[int, list[dict[str, Any]]]]
TINY = gpu.Model(
    make=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))),
    sample=lambda: torch.ones(64, 32),
    blocks=list,
    fractions=(0.6,),
)


@pytest.fixture(autouse=True)
def one_cache(monkeypatch: Patch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Operators are measured here, and once."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "costs"))


def main_of(script: Any, monkeypatch: Patch, *words: str) -> int:
    """Run a script in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *words])
    status: int = script.main()
    return status


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """What a script wrote."""
    (file,) = folder.glob("*.json")
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


@pytest.fixture
def gpu_rows(monkeypatch: Patch, tmp_path: Path) -> Run:
    """Run some rows of `gpu.py` on a tiny model: the exit status, and the rows."""

    def run(*rows: tuple[str, float | None], model: gpu.Model = TINY) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(gpu, "models", lambda small: {"tiny": model})
        monkeypatch.setattr(gpu, "methods", lambda model: rows)
        status = main_of(gpu, monkeypatch, "--small", "--out", str(tmp_path))
        return status, rows_in(tmp_path)

    return run


def check_the_rows_of_a_model(run: Run, monkeypatch: Patch) -> None:
    """Figures where there can be some, else the reason."""
    monkeypatch.setattr(gpu, "without_inductor", lambda device: "Inductor needs a compiler")
    status, rows = run(("remat", 0.6), ("checkpoint", None), ("remat inductor", 0.4))
    assert status == 0
    ours, theirs, without = rows
    assert ours["budget_nbytes"] >= ours["peak_nbytes"] > 0
    assert theirs["eager_nbytes"] > 0
    assert without["note"] == "skipped: Inductor needs a compiler"
    assert not any(row["failed"] for row in rows)


def test_the_rows_of_a_model(gpu_rows: Any, monkeypatch: Patch) -> None:
    check_the_rows_of_a_model(gpu_rows, monkeypatch)


@pytest.mark.cuda
def test_the_rows_of_a_model_on_cuda(gpu_rows: Any, monkeypatch: Patch) -> None:
    check_the_rows_of_a_model(gpu_rows, monkeypatch)


@pytest.mark.parametrize("error", [ValueError("broken"), RuntimeError("CUDA error: illegal address")])
def test_a_row_that_fails(error: Exception, gpu_rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not stop the others, the exit status shows it, and the next run runs it again."""

    def fail() -> nn.Module:
        raise error

    rows = (("remat", 0.6), ("checkpoint", None))
    failing = attrs.evolve(TINY, blocks=lambda network: [fail()])
    status, found = gpu_rows(*reversed(rows), model=failing)
    assert status == 1
    assert [row["failed"] for row in found] == [True, False]
    assert f"failed: tiny          checkpoint            {type(error).__name__}: " in capsys.readouterr().out
    status, found = gpu_rows(*rows)
    assert status == 0
    assert [row["method"] for row in found] == ["remat", "checkpoint"]
    assert [row["note"] for row in found] == ["", ""]


def test_a_row_that_does_not_fit(gpu_rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its note is the result."""

    def fail() -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    status, (row,) = gpu_rows(("checkpoint", None), model=attrs.evolve(TINY, blocks=lambda network: [fail()]))
    assert (status, row["failed"]) == (0, False)
    assert row["note"] == "OutOfMemoryError: CUDA out of memory"
    assert "1 rows, 1 without figures" in capsys.readouterr().out


def test_which_errors_are_results() -> None:
    """A budget or a memory that is too small, and an operator that does not fit the device."""
    sizes = {"budget_nbytes": 1, "smallest_nbytes": 2, "floor_nbytes": 1, "floor_op_nbytes": 1}
    full = torch.OutOfMemoryError("CUDA out of memory")
    unmeasured = MeasureError(key="aten.mm", problem="no memory", advice="free some")
    assert not too_small(unmeasured)
    unmeasured.__cause__ = full
    results = (full, unmeasured, InfeasibleBudget(**sizes, floor_op="mm", floor_place="mm"))
    assert all(map(too_small, results))
    assert not any(map(too_small, (RuntimeError("CUDA error"), KeyError("x"), AssertionError())))


def test_the_blocks_of_a_vgg() -> None:
    """Each is checkpointed with what writes over its input, and the gradients stay."""

    def network() -> Any:
        torch.manual_seed(1)
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        whole = nn.Module()
        whole.features = nn.Sequential(*layers)
        return whole

    x, plain, checkpointed = torch.ones(1, 3, 8, 8), network(), network()
    blocks = gpu._up_to_poolings(checkpointed)
    assert [len(block) for block in blocks] == [5, 5]
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    losses: list[Tensor] = [each.features(x).square().sum() for each in (plain, checkpointed)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    pairs = zip(plain.parameters(), checkpointed.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_pass_is_timed_by_itself(monkeypatch: Patch) -> None:
    """No update of the step whose peak was read is pending, although nothing waits for it on a device."""
    pending: list[str] = []
    begun_with: list[list[str]] = []

    def loss() -> Tensor:
        begun_with.append(list(pending))
        return torch.ones((), requires_grad=True)

    def step_alone(step: Any, *_: Any) -> int:
        step()
        return 0

    way = offload_ways.Way(
        loss=loss,
        update=lambda: pending.append("an update"),
        forget=int,
        wait=pending.clear,
        there=tuple,
    )
    monkeypatch.setattr(gpu_offload, "_peak_nbytes", step_alone)
    row = gpu_offload.Row(model="tiny", method="eager")
    gpu_offload.measure(row, gpu_offload.TINY, lambda: way, torch.device("cpu"), 1)
    first, peak, timed, *_ = begun_with
    assert first == peak == timed == []


@pytest.mark.cuda
def test_training_that_moves_on_cuda(monkeypatch: Patch, tmp_path: Path) -> None:
    """Its twin runs the whole script: `test_benchmarks.py`."""
    monkeypatch.setattr(gpu_offload, "TINY_ORDER", gpu_offload.TINY_ORDER[:2])
    assert main_of(gpu_offload, monkeypatch, "--tiny", "--out", str(tmp_path)) == 0
    _, row = rows_in(tmp_path)
    assert row["budget_nbytes"] >= row["peak_nbytes"] > 0
    assert row["on_host_nbytes"] > 0


def test_training_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status shows it; memory that is too small is a result."""

    def row_of(error: Exception) -> gpu_offload.Row:
        def make() -> Any:
            raise error

        row = gpu_offload.Row(model="tiny", method="eager")
        return gpu_offload.measure(row, gpu_offload.TINY, make, current_device(), 1)

    full = row_of(torch.OutOfMemoryError("CUDA out of memory"))
    assert gpu_offload.conclude([full]) == 0
    assert gpu_offload.conclude([full, row_of(TypeError("broken"))]) == 1
    assert "FAILED: tiny       eager            TypeError: broken" in capsys.readouterr().out


@pytest.mark.cuda
def test_first_contact_on_cuda(monkeypatch: Patch, tmp_path: Path) -> None:
    """Its processes run where this one does. Its twin runs all sections: `test_benchmarks.py`."""
    words = ("--small", "--out", str(tmp_path), "--sections", "environment")
    assert main_of(gpu_first, monkeypatch, *words) == 0
    assert [row["name"] for row in rows_in(tmp_path)] == ["versions", "blocks"]
    assert all(row["said"] for row in rows_in(tmp_path))


class TestTheTimeOfFirstContact:
    """Rows that time cut short are run again, and sections that are done need no time."""

    def test_a_row_that_was_cut(self, monkeypatch: Patch, tmp_path: Path) -> None:
        runs: list[tuple[str, ...]] = []
        limits_s: list[float] = []

        def rows_of(command: Any, names: list[str], *, limit_s: float, **_: Any) -> Any:
            runs.append(tuple(names))
            limits_s.append(limit_s)
            for name in names:
                yield name, {"said": "done"} if len(runs) > 1 else {"wrong": ["not done"], "cut": True}

        monkeypatch.setattr(gpu_first, "rows_of", rows_of)
        monkeypatch.setattr(gpu_first, "time", SimpleNamespace(time=lambda: 0.0))
        options = (
            "--small",
            "--out",
            str(tmp_path),
            "--sections",
            "tests",
            "runtimes",
            "--time-limit",
            "195",
        )
        assert main_of(gpu_first, monkeypatch, *options) == 1
        assert main_of(gpu_first, monkeypatch, *options) == 0
        assert runs == [("cuda",), runtimes.names(small=True), ("cuda",)]
        assert limits_s == [150.0, 195.0, 195.0]  # 150 of 195 shares, then all that is left
        assert not any(row["cut"] for row in rows_in(tmp_path))

    def test_sections_at_the_same_time(self, monkeypatch: Patch, tmp_path: Path) -> None:
        """On a large machine those that time nothing, the rows of a model in one process; others alone."""
        barrier = threading.Barrier(4)
        runs: list[tuple[list[str], float, bool, str]] = []

        def rows_of(command: Any, names: list[str], *, limit_s: float, environment: Any, **_: Any) -> Any:
            kept = "--platforms" not in command(names)
            runs.append((list(names), limit_s, kept, environment["REMAT_CACHE_DIR"]))
            if not kept:
                barrier.wait(60)  # all four are there at once
            for name in names:
                yield name, {"said": "done"}

        monkeypatch.setattr(gpu_first, "rows_of", rows_of)
        monkeypatch.setattr(gpu_first, "is_large", lambda device: True)
        monkeypatch.setattr(gpu_first, "time", SimpleNamespace(time=lambda: 0.0))
        sections = ("tests", "exact", "full budget", "runtimes")
        words = ("--small", "--out", str(tmp_path), "--sections", *sections, "--time-limit", "230")
        assert main_of(gpu_first, monkeypatch, *words) == 0
        together, alone = runs[:4], runs[4:]
        assert not any(kept for _, _, kept, _ in together)
        assert all(kept for _, _, kept, _ in alone)
        assert {limit_s for _, limit_s, _, _ in together} == {150.0}  # the share of the longest, of 230
        assert len({folder for *_, folder in together}) == len({folder for *_, folder in alone}) == 1
        assert together[0][3] != alone[0][3]  # times that were disturbed are not used again
        models = [{name.split()[0] for name in names} for names, *_ in together]
        assert sum(map(len, models)) == len(set().union(*models))
        assert [names for names, *_ in alone] == [["resnet", "gpt"], list(runtimes.names(small=True))]
        found = [(row["section"], row["name"]) for row in rows_in(tmp_path)]
        assert len(found) == len(set(found)) == sum(len(names) for names, *_ in runs)

    def test_a_process_that_begins_late(self, monkeypatch: Patch, tmp_path: Path) -> None:
        """It ends when its section ends, however long it took to begin."""
        settings: list[Setting] = []
        monkeypatch.setattr(gpu_first, "run_rows", lambda section, names, setting: settings.append(setting))
        monkeypatch.setattr(gpu_first, "time", SimpleNamespace(time=lambda: 1040.0, monotonic=lambda: 7.0))
        words = ("--worker", "tests", "--until", "1100", "--rows", "cuda")
        assert main_of(gpu_first, monkeypatch, *words, "--out", str(tmp_path)) == 0
        assert settings[0].end_s == 7.0 + 60.0

    def test_tests_that_failed(self, monkeypatch: Patch) -> None:
        """With the reason that pytest prints at the end."""
        said = ["[gw0] [ 50%] FAILED tests/a.py::two[x]", "FAILED tests/a.py::two[x] - assert 7 == 5"]
        ended = SimpleNamespace(stdout=said, wait=lambda: 1, kill=lambda: None)
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: ended)
        found = cuda_tests.run("cuda", Setting(device=torch.device("cuda"), small=True, platforms=Path()))
        assert found.wrong == ["tests/a.py::two[x] failed: assert 7 == 5; goal: all pass"]

    def test_tests_that_were_cut(self, monkeypatch: Patch) -> None:
        """What ran is counted, and the rest is run next time."""
        said = ["tests/a.py::one PASSED", "tests/a.py::two FAILED"]
        killed = SimpleNamespace(stdout=said, wait=lambda: -9, kill=lambda: None)
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: killed)
        setting = Setting(device=torch.device("cuda"), small=True, platforms=Path())
        found = cuda_tests.run("cuda", setting)
        assert found.cut
        assert found.figures["counts"] == {"passed": 1, "failed": 1}
        assert "not all tests ran" in found.wrong[0]
        assert "no reason was printed" in found.wrong[1]
        assert FirstRow(section="tests", name="cuda", cut=found.cut).cut
