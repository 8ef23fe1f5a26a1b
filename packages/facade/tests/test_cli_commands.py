"""The rest of the command: help, configs, the list of solvers, usage errors, Ctrl-C."""

import subprocess
import sys
from pathlib import Path

import pytest

from remat_facade import load_config
from remat_facade.cli.app import main
from remat_facade.config.types import config_types
from remat_solvers import solver_names

GPT2 = Path(__file__).resolve().parents[3] / "tests" / "data" / "graphs" / "gpt2.json"


@pytest.mark.parametrize("words", [[], ["--help"], ["solve", "--help"], ["demo", "--help"]])
def test_help_is_quick_and_imports_nothing_heavy(words: list[str]) -> None:
    """No torch, matplotlib or numpy for a page of text."""
    code = (
        f"import sys; from remat_facade.cli.app import main; code = main({words!r}); "
        "assert not {'torch', 'matplotlib', 'numba', 'scipy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


@pytest.mark.parametrize("name", config_types())
def test_a_config_is_printed_and_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stdout shows is what the file holds, and it loads."""
    assert main(["config", name]) == 0
    printed = capsys.readouterr().out
    assert main(["config", name, "--out", str(tmp_path / "c.yaml")]) == 0
    assert printed == (tmp_path / "c.yaml").read_text()
    assert name == load_config(tmp_path / "c.yaml").type


def test_every_solver_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """With a line on what it does."""
    assert main(["solvers"]) == 0
    shown = capsys.readouterr().out
    for name in solver_names():
        assert name in shown
    assert "cannot be loaded" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slove"], "slove"),
        (["solve"], "GRAPH.json"),
        (["solve", "graph.json"], "--budget"),
        (["solve", "graph.json", "--budget", "40%", "--fast"], "--fast"),
        (["solve", "graph.json", "--budget", "40%", "--time-limit", "soon"], "--time-limit"),
        (["config", "chekmate"], "did you mean checkmate?"),
        (["demo", "--model", "gpt5"], "gpt2 or resnet"),
        (["demo", "--steps", "0"], "--steps"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2; the line names what was wrong."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


INTERRUPTED_SOLVE = """
import os, signal, sys, time
from remat_facade.planning import planner
from remat_facade.cli.app import main

class Slow:
    def solve(self, problem, deadline):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

planner.get_solver = lambda name, **parameters: Slow()
sys.exit(main())
"""


def test_ctrl_c_while_solving_loses_nothing(tmp_path: Path) -> None:
    """One line, exit code 130, the file of an earlier run untouched and no half-written one beside it."""
    plan = tmp_path / "plan.json"
    plan.write_text("mine")
    words = ["solve", str(GPT2), "--budget", "60%", "--plan-out", str(plan)]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_SOLVE, *words], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.count("\n") == 1
    assert "interrupted" in done.stderr
    assert plan.read_text() == "mine"
    assert [plan] == list(tmp_path.iterdir())
