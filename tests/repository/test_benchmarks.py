"""The benchmarks start, explain themselves, and write what the report reads: nothing else runs them in CI."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from remat_graph.testing.random_graphs import random_graph

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HELPERS = {"child", "offload_ways", "peer_models", "record", "report", "report_offload", "report_parts"}
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in HELPERS)


def run(*command: str) -> str:
    """Run Python on a few arguments; returns what it prints."""
    done = subprocess.run([sys.executable, *command], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_explains_itself() -> None:
    """In one process: nearly all of the time goes into imports."""
    lines = ["import contextlib, importlib, sys"]
    for script in SCRIPTS:
        lines += [
            f"sys.argv = ['{script}', '--help']",
            "with contextlib.suppress(SystemExit):",
            f"    importlib.import_module('{script}').main()",
        ]
    said = run("-c", "\n".join(lines))
    assert [script for script in SCRIPTS if f"usage: {script}" not in said] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_of_the_acceptance(ranks: int, tmp_path: Path) -> None:
    """Alone and under DDP, each gradient by itself."""
    file = tmp_path / "rows.json"
    table = run(
        *("exact.py", "sequential", "--budgets", "70%", "--time-limit", "1", "--json", str(file)),
        *("--part-nbytes", "0", "--ranks", str(ranks)),
    )
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == ranks
    assert "0 rules broken" in table
    for row in rows:
        assert row["exact"]
        assert row["parts"] > 1
        assert row["budget_nbytes"] >= row["metered_nbytes"]
        assert row["repeats"] > 0


def test_training_that_moves_on_a_tiny_model(tmp_path: Path) -> None:
    """Each way of training gives its row, within its budgets."""
    run("gpu_offload.py", "--tiny", "--out", str(tmp_path))
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["eager", "offmate", "cpu step", "save_on_cpu", "offmate"]
    assert [row["note"] for row in rows] == [""] * len(rows)
    for row in rows:
        assert row["tokens_per_s"] > 0
        if row["method"] == "offmate":
            assert row["on_host_nbytes"] > 0
            assert row["budget_nbytes"] >= row["peak_nbytes"] > 0
            assert row["host_budget_nbytes"] >= row["host_nbytes"] > 0


def test_memory_beside_the_allocator(tmp_path: Path) -> None:
    """A process that counts what its C library hands out sees all that the meter sees."""
    file = tmp_path / "rows.json"
    run("scratch.py", "sequential", "--budgets", "100%", "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert 0 < row["metered_nbytes"] <= row["budget_nbytes"]
    assert row["metered_nbytes"] < row["first_nbytes"]
    assert row["code_nbytes"] > 0


@pytest.mark.parametrize(
    ("ratio", "drawn"), [(0.49, False), (0.51, True), (1, True), (1.99, True), (2.01, False), (47, False)]
)
def test_no_picture_of_a_busy_machine(
    ratio: float,
    drawn: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is drawn where the ops together take about as long as the step, and else the old one stays."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    picture, graph = importlib.import_module("picture"), random_graph(1)
    monkeypatch.setattr(picture, "get_task", lambda name: None)
    monkeypatch.setattr(picture, "BUDGET", "100%")
    monkeypatch.setattr(picture, "measured", lambda task, rounds: (graph, graph.time_s * ratio))
    out = tmp_path / "memory.png"
    out.write_text("old")
    monkeypatch.setattr(sys, "argv", ["picture", "--out", str(out)])
    assert (0 if drawn else 1) == picture.main()
    assert drawn == (b"old" != out.read_bytes())
    assert drawn == ("nothing else to do" not in capsys.readouterr().err)
