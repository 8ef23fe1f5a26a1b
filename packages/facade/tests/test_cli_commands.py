"""The command: help, configs, the list of solvers, usage errors."""

import json
import os
import platform
import subprocess
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from remat_facade import __version__, load_config
from remat_facade.cli.app import app, main
from remat_facade.cli.output import CommandOutput
from remat_facade.config.types import config_types
from remat_solvers import solver_names

from .corpus import GRAPHS

GPT2 = GRAPHS / "gpt2.json"


@pytest.mark.parametrize("words", [[], ["--help"], ["solve", "--help"], ["demo", "--help"]])
def test_help_is_quick_and_imports_nothing_heavy(words: list[str]) -> None:
    """Help imports neither torch nor matplotlib nor compiled solvers."""
    code = (
        f"import sys; from remat_facade.cli.app import main; code = main({words!r}); "
        "assert not {'torch', 'matplotlib', 'numba', 'scipy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


def test_no_two_options_of_a_command_have_one_explanation() -> None:
    """A command that writes several files says what each of them is."""
    command: Any = typer.main.get_command(app)
    for verb, each in command.commands.items():
        texts = Counter(parameter.help for parameter in each.params if parameter.help)
        assert [] == [text for text, count in texts.items() if count > 1], verb


@pytest.mark.parametrize("name", config_types())
def test_a_config_is_printed_and_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output equals the file, and the file loads."""
    assert main(["config", name]) == 0
    printed = capsys.readouterr().out
    assert main(["config", name, "--out", str(tmp_path / "c.yaml")]) == 0
    assert printed == (tmp_path / "c.yaml").read_text()
    assert name == load_config(tmp_path / "c.yaml").type


def test_every_solver_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each solver has a line of description."""
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
        (["demo", "--model", "gpt5"], "'gpt5' is not one of 'gpt2', 'resnet'"),
        (["demo", "--steps", "0"], "--steps"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the line names the mistake."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


def test_the_versions_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every package, torch and Python, as a report of an error needs them."""
    assert main(["--version"]) == 0
    shown = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    packages = ["remat-facade", "remat-executor", "remat-offload", "remat-solvers", "remat-graph", "torch"]
    assert [*packages, "Python"] == list(shown)
    assert shown["remat-facade"] == __version__
    assert shown["torch"] == version("torch")
    assert shown["Python"] == platform.python_version()


def test_a_shell_completes_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the protocol of typer, which ends the program."""
    monkeypatch.setenv("_REMAT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "remat s")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == {"sweep", "solve", "show", "solvers"}


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("plan --platform h1", {"h100", "h100-spec"}),
        ("solve --solver min", {"mincut"}),
        ("sweep --solvers mincut,rot", {"mincut,rotor"}),
        ("max-batch --solvers mincut,min", set()),
        ("zoo gpt2-a100-4", {"gpt2-a100-40"}),
    ],
)
def test_a_shell_completes_values(line: str, completed: set[str]) -> None:
    """Without torch, whose import takes seconds."""
    code = (
        "import sys; from remat_facade.cli.app import main\n"
        "try: main([])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    words = ["remat", *line.split()]
    given = {
        "_REMAT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": f"{len(words) - 1}",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | given
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert completed == set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["solve", str(GPT2), "--budget", "100%", "--solver", "noremat"], {"plan"}),
        (["min-budget", str(GPT2), "--time-limit", "1"], {"graph_name", "nbytes", "floor_nbytes"}),
        (["sweep", str(GPT2), "--solvers", "noremat", "--budgets", "100%"], {"curves", "graph_name"}),
        (["doctor", str(GPT2), "--solver", "noremat", "--budget", "100%", "--time-limit", "1"], {"advice"}),
        (["solvers"], {"solvers"}),
        (["config", "rotor"], {"type", "about", "fields"}),
    ],
    ids=["solve", "min-budget", "sweep", "doctor", "solvers", "config"],
)
def test_a_result_is_one_object(words: list[str], keys: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` it is all that is on stdout."""
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    assert keys <= json.loads(shown.out).keys()
    assert shown.err == ""


def test_every_command_can_print_one_object() -> None:
    """None of them lacks `--json`."""
    command: Any = typer.main.get_command(app)
    with_json = {verb for verb, each in command.commands.items() if "json" in {p.name for p in each.params}}
    assert set(command.commands) == with_json


def test_a_warning_is_in_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    """As well as where it is shown: a program that reads the figures learns what spoiled them."""
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: said.append(f"{message}")
        with CommandOutput(as_json=True) as output:
            output.facts["name"] = "this"
            warnings.warn("this is old", UserWarning, stacklevel=1)
    shown = json.loads(capsys.readouterr().out)
    assert (shown, said) == ({"name": "this", "warnings": ["this is old"]}, ["this is old"])


def test_a_saved_plan_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files that a command writes are named in its object."""
    path = tmp_path / "plan.json"
    words = ["solve", str(GPT2), "--budget", "100%", "--solver", "noremat", "--plan-out", str(path)]
    assert main([*words, "--json"]) == 0
    solved = json.loads(capsys.readouterr().out)
    assert solved["wrote"] == [str(path)]
    assert main(["show", str(path), "--graph", str(GPT2), "--json"]) == 0
    assert solved["plan"] == json.loads(capsys.readouterr().out)["plan"]
