"""`remat solve` and `remat show` on saved graphs need no torch; each mistake gives one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from remat_facade.cli.app import main
from remat_graph import Grads, format_nbytes, load_graph, load_plan, save_graph, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_solvers import min_budget, min_present_budget

from .corpus import GRAPHS

UNET = GRAPHS / "unet.json"


def solve(*words: str | Path) -> int:
    """Run `remat solve` in this process."""
    return main(["solve", *map(str, words)])


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The text on stderr: one line without a traceback."""
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("remat: ")
    assert "Traceback" not in err
    return err


def test_a_saved_graph_is_solved_without_torch(tmp_path: Path) -> None:
    """The whole command, in a new process, never imports torch."""
    code = (
        "import sys; from remat_facade.cli.app import main; "
        f"code = main(['solve', {str(UNET)!r}, '--budget', '100%', '--solver', 'noremat', "
        f"'--plan-out', {str(tmp_path / 'plan.json')!r}]); "
        f"code = code or main(['show', {str(tmp_path / 'plan.json')!r}, '--graph', {str(UNET)!r}, "
        f"'--html', {str(tmp_path / 'plan.html')!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "plan.html").is_file()


def test_the_order_is_what_the_judge_of_the_corpus_reads(tmp_path: Path) -> None:
    """The oracle of the corpus replays the order and finds the plan's peak."""
    order, plan = tmp_path / "order.json", tmp_path / "plan.json"
    assert solve(UNET, "--budget", "60%", "--time-limit", "20", "--order-out", order, "--plan-out", plan) == 0
    made = load_plan(plan, load_graph(UNET))
    assert made.peak_nbytes <= made.budget_nbytes < made.noremat_peak_nbytes
    assert list(made.schedule.order) == json.loads(order.read_text())

    done = subprocess.run(
        [sys.executable, str(GRAPHS / "judge.py"), str(UNET), str(order)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{made.peak_nbytes / 2**20:.1f} MiB" in done.stdout or str(made.peak_nbytes) in done.stdout


def test_a_config_says_who_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config is a file or a type; together with a solver, or of an unknown method, it is refused."""
    path = tmp_path / "config.yaml"
    assert main(["config", "noremat", "--out", str(path)]) == 0
    for config in (path, "noremat"):
        assert solve(UNET, "--budget", "100%", "--config", config) == 0
        assert "planned by noremat" in capsys.readouterr().out
    assert solve(UNET, "--budget", "100%", "--config", path, "--solver", "noremat") == 2
    assert "give either solver or config" in complaint(capsys)
    assert solve(UNET, "--budget", "100%", "--config", "offmate") == 2
    assert "use Offmate" in complaint(capsys)


def test_a_plan_for_gradients_that_are_present(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below the smallest budget of new gradients; the table says what the plan is for."""
    graph = random_graph(5, 9)
    new, present = min_budget(graph).nbytes, min_present_budget(graph).nbytes
    assert present < new
    path, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    save_graph(graph, path)
    words = ["--budget", f"{present}", "--gradients", "present", "--plan-out", plan]
    assert solve(path, *words) == 0
    made = load_plan(plan, graph)
    assert (Grads.PRESENT, present) == (made.grads, made.peak_nbytes)
    assert main(["show", str(plan)]) == 0
    assert "for steps that find a .grad for every parameter" in capsys.readouterr().out.replace("\n", " ")
    assert main(["min-budget", str(path), "--gradients", "present"]) == 0
    assert str(present) in capsys.readouterr().out
    assert solve(path, "--budget", f"{present}") == 2
    assert f"the smallest budget with a schedule is {format_nbytes(new)}" in complaint(capsys)


def test_a_plan_is_shown_with_its_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pictures and the page are written, and the numbers are on stdout."""
    plan = tmp_path / "plan.json"
    assert solve(UNET, "--budget", "100%", "--solver", "noremat", "--out", plan) == 0
    png, matrix, html = tmp_path / "new" / "plan.png", tmp_path / "matrix.png", tmp_path / "plan.html"
    words = ["--graph", str(UNET), "--png", str(png), "--matrix", str(matrix), "--html", str(html)]
    assert main(["show", str(plan), *words]) == 0
    assert png.read_bytes()[:4] == matrix.read_bytes()[:4] == b"\x89PNG"
    assert png.read_bytes() != matrix.read_bytes()
    assert "runs and live values by stage" in html.read_text()
    out = capsys.readouterr().out
    assert "unplanned" in out
    assert out.count("wrote") == 4


def test_a_plan_is_shown_in_other_viewers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data flow is a picture, the trace is JSON, and the snapshot is a file of its own."""
    plan = tmp_path / "plan.json"
    assert solve(UNET, "--budget", "100%", "--solver", "noremat", "--plan-out", plan) == 0
    dataflow, snapshot, trace = (tmp_path / name for name in ("flow.png", "memory.pickle", "trace.json"))
    words = ["--dataflow", str(dataflow), "--snapshot", str(snapshot), "--trace", str(trace)]
    assert main(["show", str(plan), "--graph", str(UNET), *words]) == 0
    assert dataflow.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(trace.read_text())["traceEvents"]
    assert b"device_traces" in snapshot.read_bytes()
    assert capsys.readouterr().out.count("wrote") == 4
    assert main(["show", str(plan), "--trace", str(trace)]) == 2


@pytest.mark.parametrize(("ending", "begins"), [("svg", b"<?xml"), ("PDF", b"%PDF"), ("", b"\x89PNG")])
def test_a_picture_is_of_the_format_that_its_name_ends_with(
    ending: str, begins: bytes, tmp_path: Path
) -> None:
    """PNG without an ending, as `--png /dev/stdout` is."""
    plan, drawn = tmp_path / "plan.json", [tmp_path / f"{i}.{ending}".rstrip(".") for i in range(3)]
    assert solve(UNET, "--budget", "100%", "--solver", "noremat", "--plan-out", plan) == 0
    words = ["--graph", str(UNET), "--png", str(drawn[0]), "--matrix", str(drawn[1])]
    assert main(["show", str(plan), *words, "--dataflow", str(drawn[2])]) == 0
    assert [True] * 3 == [path.read_bytes().startswith(begins) for path in drawn]


def test_a_plan_is_told_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a graph whose ops know their layers: with the graph, from the plan alone, and as the binding op."""
    graph = load_graph(UNET)
    ops = [attrs.evolve(op, layer=f"stage.{i % 7}.conv") for i, op in enumerate(graph.ops)]
    named, plan = tmp_path / "named.json", tmp_path / "plan.json"
    save_graph(attrs.evolve(graph, ops=ops), named)
    assert solve(named, "--budget", "60%", "--solver", "mincut", "--plan-out", plan) == 0
    capsys.readouterr()
    assert main(["show", str(plan)]) == 0
    alone = capsys.readouterr().out
    assert "stage.*.conv" in alone
    assert main(["show", str(plan), "--graph", str(named)]) == 0
    assert alone in (whole := capsys.readouterr().out)
    assert " in stage.*.conv" in whole
    assert solve(named, "--budget", "1%") == 2
    assert re.search(
        r"(where|ops;) \S+ in (the backward of )?stage\.\d\.conv \(\S+\) needs", complaint(capsys)
    )


@pytest.mark.parametrize(
    "budget", ["0", "-5", "-5%", "0%", "2 bananas", "nan", "", "1e999", "40 %%", "2 GiB 3"]
)
def test_a_budget_that_means_nothing(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the line shows valid budgets."""
    assert solve(UNET, "--budget", budget) == 2
    assert '"40%"' in complaint(capsys)


def test_a_config_file_sets_a_methods_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the paper's accounting of Checkmate, the plan records the paper's numbers."""
    config, plan = tmp_path / "checkmate.yaml", tmp_path / "plan.json"
    config.write_text("type: checkmate\naccounting: paper\n")
    assert solve(UNET, "--budget", "100GiB", "--config", config, "--plan-out", plan) == 0
    assert "planned by checkmate" in capsys.readouterr().out
    assert 0 < load_plan(plan).solver_stats["paper_peak_nbytes"]


def test_an_infeasible_budget_names_one_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest budget in the message works unchanged."""
    assert solve(UNET, "--budget", "1%", "--time-limit", "20") == 2
    said = complaint(capsys)
    smallest = said.partition(" bytes)")[0].rpartition("(")[2]
    assert solve(UNET, "--budget", smallest, "--plan-out", tmp_path / "plan.json") == 0
    assert simulate(load_graph(UNET), load_plan(tmp_path / "plan.json").schedule).peak_nbytes <= int(smallest)


def test_an_unknown_solver_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """A similar name is suggested."""
    assert solve(UNET, "--budget", "40%", "--solver", "noremt") == 2
    assert "did you mean 'noremat'" in complaint(capsys)


def test_no_text_of_a_file_writes_on_the_terminal_or_breaks_it(tmp_path: Path) -> None:
    """Control codes and letters outside the encoding of the output are escaped."""
    data = json.loads(UNET.read_text())
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**data, "name": "\x1b[31mgr\u00f6\u00dfe\x9b1m"}))
    code = "import sys; from remat_facade.cli.app import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "solve", str(path), "--budget", "100%", "--solver", "noremat"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (0, b"") == (done.returncode, done.stderr)
    assert rb"\x1b[31mgr\xf6\xdfe\x9b1m" in done.stdout
    assert not {b"\x1b", b"\x9b"} & {bytes([byte]) for byte in done.stdout}


def test_memory_that_runs_out_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lack of memory gives one line."""

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("remat_graph.load_graph", full)
    assert solve(UNET, "--budget", "40%") == 2
    assert "out of memory" in complaint(capsys)


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "{}", '{"format": "remat-plan", "version": 1}', "\x00\x01", '{"format": 3}'],
)
def test_a_file_that_is_no_graph(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is missing, empty, truncated, or of another kind."""
    path = tmp_path / "graph.json"
    if content is not None:
        path.write_text(content)
    assert solve(path, "--budget", "40%") == 2
    assert str(path) in complaint(capsys).replace("\n", "")


def test_plans_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is truncated, newer, of another graph, or lacks the graph for a picture."""
    plan = tmp_path / "plan.json"
    solve(UNET, "--budget", "100%", "--solver", "noremat", "--plan-out", plan)
    capsys.readouterr()
    text = plan.read_text()

    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    (tmp_path / "newer.json").write_text(text.replace('"version":1', '"version":99', 1))
    for words, said in (
        (["cut.json"], "cut off"),
        (["newer.json"], "upgrade"),
        (["plan.json", "--graph", str(GRAPHS / "vgg16.json")], "another graph"),
        (["plan.json", "--png", "picture.png"], "--graph"),
        (["plan.json", "--matrix", "picture.png"], "--graph"),
        (["plan.json", "--graph", str(UNET), "--png", "a.png", "--matrix", "a.png"], "names the same file"),
    ):
        assert main(["show", str(tmp_path / words[0]), *words[1:]]) == 2
        assert said in complaint(capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before any work."""
    tmp_path.chmod(0o500)
    assert solve(UNET, "--budget", "100%", "--plan-out", tmp_path / "plan.json") == 2
    assert "read-only" in complaint(capsys)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with the name of the folder stays unchanged."""
    (tmp_path / "file").write_text("mine")
    assert solve(UNET, "--budget", "100%", "--plan-out", tmp_path / "file" / "plan.json") == 2
    assert "choose another path" in complaint(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_bound_is_raised_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    """For the seconds given, after which the same plan is nearer to its bound; they must be seconds."""
    found = []
    for words in ([], ["--prove", "3"]):
        assert solve(UNET, "--budget", "30%", "--solver", "greedy", "--json", *words) == 0
        found.append(json.loads(capsys.readouterr().out)["plan"])
    without, proven = found
    assert (proven["overhead"], proven["peak_nbytes"]) == (without["overhead"], without["peak_nbytes"])
    assert without["lower_bound_s"] < proven["lower_bound_s"] <= proven["time_s"]
    assert solve(UNET, "--budget", "30%", "--prove", "-3") == 2
    assert "expected seconds above 0" in complaint(capsys)
