"""`remat solve` and `remat show` on saved graphs: without torch, and one line for each mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remat_facade.cli.app import main
from remat_graph import load_graph, load_plan, simulate

DATA = Path(__file__).resolve().parents[3] / "tests" / "data" / "graphs"
UNET = DATA / "unet.json"


def solve(*words: str | Path) -> int:
    """Run `remat solve` in this process."""
    return main(["solve", *map(str, words)])


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to stderr: one line, and no traceback."""
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("remat: ")
    assert "Traceback" not in err
    return err


def test_a_saved_graph_is_solved_without_torch(tmp_path: Path) -> None:
    """The whole command, in a process of its own, never imports torch."""
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
    """The corpus' own judge replays the order and finds the plan's peak."""
    order, plan = tmp_path / "order.json", tmp_path / "plan.json"
    assert solve(UNET, "--budget", "60%", "--time-limit", "20", "--order-out", order, "--plan-out", plan) == 0
    made = load_plan(plan, load_graph(UNET))
    assert made.peak_nbytes <= made.budget_nbytes < made.noremat_peak_nbytes
    assert list(made.schedule.order) == json.loads(order.read_text())

    done = subprocess.run(
        [sys.executable, str(DATA / "judge.py"), str(UNET), str(order)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{made.peak_nbytes / 2**20:.1f} MiB" in done.stdout or str(made.peak_nbytes) in done.stdout


def test_a_config_says_who_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its file or its type; beside a solver's name it is refused, and so is a method that is not there."""
    path = tmp_path / "config.yaml"
    assert main(["config", "noremat", "--out", str(path)]) == 0
    for config in (path, "noremat"):
        assert solve(UNET, "--budget", "100%", "--config", config) == 0
        assert "planned by noremat" in capsys.readouterr().out
    assert solve(UNET, "--budget", "100%", "--config", path, "--solver", "noremat") == 2
    assert "one of solver and config" in complaint(capsys)
    assert solve(UNET, "--budget", "100%", "--config", "offmate") == 2
    assert "use Offmate" in complaint(capsys)


def test_a_plan_is_shown_with_its_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pictures and the page are written, and the figures are on stdout."""
    plan = tmp_path / "plan.json"
    assert solve(UNET, "--budget", "100%", "--solver", "noremat", "--plan-out", plan) == 0
    png, matrix, html = tmp_path / "new" / "plan.png", tmp_path / "matrix.png", tmp_path / "plan.html"
    words = ["--graph", str(UNET), "--png", str(png), "--matrix", str(matrix), "--html", str(html)]
    assert main(["show", str(plan), *words]) == 0
    assert png.read_bytes()[:4] == matrix.read_bytes()[:4] == b"\x89PNG"
    assert png.read_bytes() != matrix.read_bytes()
    assert "what runs when" in html.read_text()
    out = capsys.readouterr().out
    assert "unplanned" in out
    assert out.count("wrote") == 4


@pytest.mark.parametrize(
    "budget", ["0", "-5", "-5%", "0%", "2 bananas", "nan", "", "1e999", "40 %%", "2 GiB 3"]
)
def test_a_budget_that_means_nothing(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and a line that shows how to write one."""
    assert solve(UNET, "--budget", budget) == 2
    assert '"40%"' in complaint(capsys)


def test_a_config_file_sets_a_methods_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkmate in its paper's accounting: the plan's record says what the paper would."""
    config, plan = tmp_path / "checkmate.yaml", tmp_path / "plan.json"
    config.write_text("type: checkmate\naccounting: paper\n")
    assert solve(UNET, "--budget", "100GiB", "--config", config, "--plan-out", plan) == 0
    assert "planned by checkmate" in capsys.readouterr().out
    assert 0 < load_plan(plan).solver_stats["paper_peak_nbytes"]


def test_an_infeasible_budget_names_one_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest budget in the message can be used as it stands."""
    assert solve(UNET, "--budget", "1%", "--time-limit", "20") == 2
    said = complaint(capsys)
    smallest = said.partition(" bytes)")[0].rpartition("(")[2]
    assert solve(UNET, "--budget", smallest, "--plan-out", tmp_path / "plan.json") == 0
    assert simulate(load_graph(UNET), load_plan(tmp_path / "plan.json").schedule).peak_nbytes <= int(smallest)


def test_an_unknown_solver_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """And a close one is suggested."""
    assert solve(UNET, "--budget", "40%", "--solver", "noremt") == 2
    assert "did you mean 'noremat'" in complaint(capsys)


def test_no_text_of_a_file_writes_on_the_terminal_or_breaks_it(tmp_path: Path) -> None:
    """Codes are shown as such, and letters that the output does not know are too."""
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
    """Whatever takes it."""

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("remat_graph.load_graph", full)
    assert solve(UNET, "--budget", "40%") == 2
    assert "memory does not do for it" in complaint(capsys)


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "{}", '{"format": "remat-plan", "version": 1}', "\x00\x01", '{"format": 3}'],
)
def test_a_file_that_is_no_graph(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, empty, cut off, or of another kind."""
    path = tmp_path / "graph.json"
    if content is not None:
        path.write_text(content)
    assert solve(path, "--budget", "40%") == 2
    assert str(path) in complaint(capsys).replace("\n", "")


def test_plans_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut off, newer, of another graph, or without the graph that its picture needs."""
    plan = tmp_path / "plan.json"
    solve(UNET, "--budget", "100%", "--solver", "noremat", "--plan-out", plan)
    capsys.readouterr()
    text = plan.read_text()

    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    (tmp_path / "newer.json").write_text(text.replace('"version":1', '"version":99', 1))
    for words, said in (
        (["cut.json"], "cut off"),
        (["newer.json"], "upgrade"),
        (["plan.json", "--graph", str(DATA / "vgg16.json")], "another graph"),
        (["plan.json", "--png", "picture.png"], "--graph"),
        (["plan.json", "--matrix", "picture.png"], "--graph"),
        (["plan.json", "--graph", str(UNET), "--png", "a.png", "--matrix", "a.png"], "names the same file"),
    ):
        assert main(["show", str(tmp_path / words[0]), *words[1:]]) == 2
        assert said in complaint(capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before any work is done."""
    tmp_path.chmod(0o500)
    assert solve(UNET, "--budget", "100%", "--plan-out", tmp_path / "plan.json") == 2
    assert "read-only" in complaint(capsys)


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file stands where the folder should be; it stays as it is."""
    (tmp_path / "file").write_text("mine")
    assert solve(UNET, "--budget", "100%", "--plan-out", tmp_path / "file" / "plan.json") == 2
    assert "choose another place" in complaint(capsys)
    assert (tmp_path / "file").read_text() == "mine"
