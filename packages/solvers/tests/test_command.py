"""`remat` with remat-solvers alone plans saved graphs, and reports each mistake in one line."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest

import remat_command
from remat_graph import Graph, RematError, Schedule, load_plan, save_graph
from remat_graph.testing.random_graphs import random_graph
from remat_solvers import Deadline, MinBudget, Solution, command, queries, solve, solver_names, switching
from remat_solvers.running.stopping import default_limit_s

GRAPH = random_graph(5, 9)
OWN = EntryPoint(name="solvers", value="remat_solvers.command:main", group="remat.command")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no other distribution takes the command over."""
    monkeypatch.setattr(remat_command, "entry_points", lambda group: [OWN])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``graph.json``."""
    monkeypatch.chdir(tmp_path)
    save_graph(GRAPH, tmp_path / "graph.json")
    return tmp_path


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that is refused."""
    assert remat_command.main(words) == 2
    out, err = capsys.readouterr()
    assert ("", 1) == (out, err.count("\n")), err
    assert err.startswith("remat: ")
    return err


def test_a_plan_is_shown_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds a plan of the graph within the budget."""
    words = ["solve", "graph.json", "--budget", "100%", "--solver", "noremat", "--plan-out", "new/plan.json"]
    assert remat_command.main(words) == 0
    plan = load_plan(folder / "new" / "plan.json", GRAPH)
    assert plan.budget_nbytes == plan.noremat_peak_nbytes
    assert f"{plan.summary()}\nwrote new/plan.json\n" == capsys.readouterr().out


def test_the_smallest_budget_has_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And recomputes; below the floor there is none, which is an error that names it."""
    assert remat_command.main(["min-budget", "graph.json"]) == 0
    smallest, floor, *_ = capsys.readouterr().out.splitlines()
    nbytes, floor_nbytes = (int(line.split("(")[1].split()[0]) for line in (smallest, floor))
    assert remat_command.main(["solve", "graph.json", "--budget", str(nbytes), "--out", "plan.json"]) == 0
    capsys.readouterr()
    plan = load_plan(folder / "plan.json", GRAPH)
    assert plan.peak_nbytes == nbytes < plan.noremat_peak_nbytes
    assert "too small" in complaint(capsys, "solve", "graph.json", "--budget", str(floor_nbytes - 1))


def test_a_budget_without_a_unit_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the graph needs far more, and before a search."""
    graph = attrs.evolve(
        GRAPH, values=tuple(attrs.evolve(value, nbytes=value.nbytes * 2**20) for value in GRAPH.values)
    )
    save_graph(graph, Path("large.json"))
    said = complaint(capsys, "solve", "large.json", "--budget", "40")
    assert 'it would be 40 B; did you mean "40%" or "40GiB"?' in said


def test_a_result_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json`` it is all that is on stdout, with the names that the command of the facade has."""
    words = ["solve", "graph.json", "--budget", "100%", "--solver", "noremat", "--out", "plan.json", "--json"]
    assert remat_command.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrote"] == ["plan.json"]
    assert found["plan"]["peak_nbytes"] == load_plan("plan.json").peak_nbytes
    assert remat_command.main(["min-budget", "graph.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["graph_name"] == GRAPH.name
    assert found["floor_nbytes"] <= found["nbytes"]


def test_the_versions_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Of this package, the one that it needs, and Python."""
    assert remat_command.main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["remat-solvers", "remat-graph", "Python"] == [line.split()[0] for line in lines]


def test_every_solver_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with what it does."""
    assert remat_command.main(["solvers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert list(solver_names()) == [line.split()[0] for line in lines]
    assert all(len(line.split()) > 2 for line in lines)
    assert remat_command.main(["solvers", "--json"]) == 0
    assert list(solver_names()) == list(json.loads(capsys.readouterr().out)["solvers"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["plan", "train.py:make"], "pip install remat-facade"),
        (["min-budget", "train.py:make"], "`remat plan train.py:make --budget 100% --graph-out FILE` writes"),
        (["solve", "graph.json"], "--budget"),
        (["solve", "graph.json", "--budget", "lots"], "is neither a size nor a percentage"),
        (["solve", "graph.json", "--budget", "60%", "--solver", "gredy"], "did you mean 'greedy'"),
        (
            ["solve", "graph.json", "--budget", "40", "%"],
            ": %: write 40% without a space; see `remat solve --help`",
        ),
        (["min-budget", "graph.json", "more"], "unrecognized arguments: more; see `remat min-budget --help`"),
        (["solve", "missing.json", "--budget", "60%"], "missing.json"),
        (
            ["solve", "graph.json", "--budget", "60%", "--time-limit", "nan"],
            "expected seconds above 0, got 'nan'",
        ),
        (["solve", "graph.json", "--budget", "60%", "--plan-out", "."], "it is a folder"),
        (["solve", "graph.json", "--budget", "60%", "--plan-out", "./graph.json"], "same file as GRAPH.json"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what came and what to do; the exit code is 2."""
    assert part in complaint(capsys, *words)


def test_ctrl_c_gives_the_best_plan_until_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown and written, and one line says that the search ended early."""

    def solved(graph: Graph, budget_nbytes: int, solver: str, deadline: Deadline) -> Solution:
        assert deadline.seconds == default_limit_s(len(graph.ops))
        signal.raise_signal(signal.SIGINT)
        assert deadline.reached()
        return solve(graph, budget_nbytes, solver, deadline)

    monkeypatch.setattr(command, "solve", solved)
    words = ["solve", "graph.json", "--budget", "100%", "--solver", "noremat", "--plan-out", "plan.json"]
    assert remat_command.main(words) == 130
    shown = capsys.readouterr()
    assert shown.err == "remat: interrupted: a faster plan may exist\n"
    assert "cut short by Ctrl-C" in shown.out
    assert load_plan("plan.json", GRAPH).solver_stats["interrupted"] is True
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_gives_the_smallest_budget_until_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search has no limit by the clock unless one is given, as that of the facade."""

    def found(graph: Graph, deadline: Deadline) -> MinBudget:
        assert deadline.seconds is None
        signal.raise_signal(signal.SIGINT)
        assert deadline.reached()
        order = Schedule.from_order(graph, range(len(graph.ops)))
        return MinBudget(
            nbytes=9,
            schedule=order,
            floor_nbytes=7,
            floor_op="a",
            floor_place="a",
            floor_reason="b",
            floor_op_nbytes=7,
            proven_nbytes=7,
            cut_short=True,
        )

    monkeypatch.setattr(queries, "min_budget", found)
    monkeypatch.setattr(switching, "compile_first", lambda _: None)
    assert remat_command.main(["min-budget", "graph.json"]) == 130
    shown = capsys.readouterr()
    assert shown.err == "remat: interrupted: a smaller budget may work too\n"
    assert "time was up before smaller budgets were tried" in shown.out


def test_ctrl_c_where_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no error of the budget, and no file is written."""

    def solved(graph: Graph, budget_nbytes: int, solver: str, deadline: Deadline) -> Solution:
        signal.raise_signal(signal.SIGINT)
        raise RematError("no plan")

    monkeypatch.setattr(command, "solve", solved)
    words = ["solve", "graph.json", "--budget", "100%", "--plan-out", "plan.json"]
    assert remat_command.main(words) == 130
    assert capsys.readouterr().err == "remat: interrupted; files of earlier runs are unchanged\n"
    assert not Path("plan.json").exists()


def test_ctrl_c_before_a_command_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """While its modules are imported; one line, not a traceback."""

    def load(_: EntryPoint) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EntryPoint, "load", load)
    assert remat_command.main(["solvers"]) == 130
    assert capsys.readouterr().err == "remat: interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
def test_an_output_that_nobody_reads() -> None:
    """As that of `remat solvers | head -1` once `head` has ended: the command ends in silence."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from remat_solvers.command import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "solvers"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_and_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Both list the commands."""
    assert remat_command.main(["--help"]) == 0
    helped = capsys.readouterr().out
    assert remat_command.main([]) == 0
    assert helped == capsys.readouterr().out
    assert {"solve", "min-budget", "solvers"} <= set(helped.split())


def took_over(words: Sequence[str]) -> int:
    """A command of another distribution."""
    return len(words)


def test_the_command_of_the_facade_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the words, and its exit code counts."""
    facades = EntryPoint(name="facade", value=f"{__name__}:took_over", group="remat.command")
    monkeypatch.setattr(EntryPoint, "load", lambda point: took_over if point == facades else None)
    monkeypatch.setattr(remat_command, "entry_points", lambda group: [OWN, facades])
    assert remat_command.main(["a", "b", "c"]) == 3


def test_it_is_registered() -> None:
    """As this file assumes."""
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert settings["scripts"] == {"remat": "remat_command:main"}
    assert settings["entry-points"][remat_command.GROUP] == {OWN.name: OWN.value}


def test_no_torch_is_imported() -> None:
    """A plan of a saved graph, in a new process."""
    code = (
        "import sys; from remat_solvers.command import main; "
        "code = main(['solve', 'graph.json', '--budget', '100%', '--solver', 'greedy']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
