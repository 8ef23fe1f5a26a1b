"""`remat` and its files: none is lost, and errors of paths come before the work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from remat_facade import CannotWrite
from remat_facade.cli.app import main
from remat_graph import load_graph, load_plan
from remat_graph.serialization.outputs import check_paths, write_whole

from .corpus import GRAPHS

GRAPH = GRAPHS / "unet.json"
FACTORY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 8)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the inputs of the commands, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(GRAPH, "graph.json")
    assert (
        main(["solve", "graph.json", "--budget", "100%", "--solver", "noremat", "--plan-out", "plan.json"])
        == 0
    )
    assert main(["config", "noremat", "--out", "config.yaml"]) == 0
    Path("make.py").write_text(FACTORY)
    Path("platform.json").write_text("{}")
    Path("link.json").symlink_to("graph.json")
    os.link("graph.json", "hard.json")
    return tmp_path


PLAN = ["plan", "make.py:make", "--budget", "100%"]
SOLVE = ["solve", "graph.json", "--budget", "100%"]
SWEEP = ["sweep", "graph.json", "--budgets", "100%"]
SHOW = ["show", "plan.json", "--graph", "graph.json"]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([*PLAN, "--plan-out", "new", "--graph-out", "new"], ("--graph-out", "--plan-out")),
        ([*PLAN, "--plan-out", "make.py"], ("--plan-out", "MODULE:FACTORY")),
        ([*PLAN, "--config", "config.yaml", "--plan-out", "config.yaml"], ("--plan-out", "--config")),
        (
            [*PLAN, "--platform", "platform.json", "--graph-out", "platform.json"],
            ("--graph-out", "--platform"),
        ),
        ([*SOLVE, "--plan-out", "new", "--order-out", "new"], ("--order-out", "--plan-out")),
        ([*SOLVE, "--plan-out", "new", "--order-out", "./new"], ("--order-out", "--plan-out")),
        ([*SOLVE, "--plan-out", "a/new", "--order-out", "a/../a/new"], ("--order-out", "--plan-out")),
        ([*SOLVE, "--plan-out", "graph.json"], ("--plan-out", "GRAPH.json")),
        ([*SOLVE, "--order-out", "link.json"], ("--order-out", "GRAPH.json")),
        ([*SOLVE, "--order-out", "hard.json"], ("--order-out", "GRAPH.json")),
        ([*SOLVE, "--config", "config.yaml", "--order-out", "config.yaml"], ("--order-out", "--config")),
        ([*SWEEP, "--csv", "new", "--png", "new"], ("--png", "--csv")),
        ([*SWEEP, "--csv", "graph.json"], ("--csv", "GRAPH.json")),
        ([*SHOW, "--png", "new", "--html", "new"], ("--html", "--png")),
        ([*SHOW, "--matrix", "new", "--html", "new"], ("--html", "--matrix")),
        ([*SHOW, "--html", "plan.json"], ("--html", "PLAN")),
        ([*SHOW, "--snapshot", "new", "--trace", "new"], ("--trace", "--snapshot")),
        ([*SHOW, "--dataflow", "new", "--trace", "new"], ("--trace", "--dataflow")),
        ([*SHOW, "--html", "graph.json"], ("--html", "--graph")),
    ],
)
def test_no_file_takes_the_place_of_another(
    words: list[str], options: tuple[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any spelling is refused before the work, in one line, and every file is unchanged."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    capsys.readouterr()
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{options[0]} names the same file as {options[1]}" in err
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_two_files_of_one_name_in_two_folders(folder: Path) -> None:
    """Different files are accepted, and a type's name is not a file."""
    words = ["--config", "noremat", "--plan-out", "a/new.json", "--order-out", "b/new.json"]
    assert main([*SOLVE, *words]) == 0
    assert load_plan("a/new.json", load_graph("graph.json")).schedule.order
    assert (folder / "b" / "new.json").read_text().startswith("[0,")


def test_a_device_takes_as_much_as_is_written(folder: Path) -> None:
    """A pipe or device is not replaced, and may be named twice."""
    assert main([*SOLVE, "--solver", "noremat", "--plan-out", os.devnull, "--order-out", os.devnull]) == 0
    assert not Path(os.devnull).is_file()


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
def test_a_pipe_is_written_to(folder: Path) -> None:
    """This holds for pictures, pages and configs too: the reader of a replaced pipe would wait forever."""
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole("pipe", "whole")
    assert b"whole" == os.read(reader, 100)
    os.close(reader)
    assert not Path("pipe").is_file()


@pytest.mark.skipif(os.name != "posix", reason="pipes are posix")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["config", "auto"],
        ["solvers", "--json"],
        [*SOLVE, "--solver", "noremat", "--plan-out", "new"],
    ],
    ids=["help", "line", "json", "table"],
)
def test_an_output_that_nobody_reads(words: list[str], folder: Path) -> None:
    """As in `remat ... | head -1` once `head` has ended: the command ends in silence, its files written."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from remat_facade.cli.app import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert ("new" in words) == Path("new").is_file()


@pytest.mark.skipif(os.name != "posix", reason="modes are posix")
def test_what_is_asked_for_has_the_mode_of_any_file(folder: Path) -> None:
    """Plans, graphs, orders, pictures, pages and configs follow the umask."""
    umask = os.umask(0o027)
    try:
        assert main([*SOLVE, "--solver", "noremat", "--plan-out", "a", "--order-out", "b"]) == 0
        assert main([*SHOW, "--html", "c"]) == 0
        assert main(["config", "auto", "--out", "d"]) == 0
    finally:
        os.umask(umask)
    assert [0o640] * 4 == [Path(name).stat().st_mode & 0o777 for name in "abcd"]


@pytest.mark.parametrize("name", ["n" * 300, "n" * 100_000, "/".join(["n" * 200] * 30)])
@pytest.mark.parametrize("words", [[*SOLVE, "--config"], [*SOLVE, "--plan-out"], ["show"], ["config"]])
def test_names_that_are_too_long(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is one short line."""
    capsys.readouterr()
    assert main([*words, name]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err) < 2100


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("words", [["config", "auto"], ["--help"], ["show", "plan.json"]])
def test_an_output_that_takes_nothing(words: list[str]) -> None:
    """The error is one line and an exit code, not a traceback."""
    code = "import sys; from remat_facade.cli.app import main; sys.exit(main(sys.argv[1:]))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("remat: system error: No space left on device")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no endless device")
@pytest.mark.parametrize("words", [[*SOLVE, "--config", "/dev/zero"], ["show", "/dev/zero"]])
def test_an_endless_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An endless file is not read to its end."""
    capsys.readouterr()
    if words[-2] == "--config":
        words = [*words[:-1], "endless.yaml"]
        Path("endless.yaml").symlink_to("/dev/zero")
    assert main(words) == 2
    assert "is longer than" in capsys.readouterr().err


def test_solvers_and_budgets_are_looked_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong name is found before the work."""
    capsys.readouterr()
    assert main(["sweep", "platform.json", "--solvers", "auto,nobody"]) == 2  # which is no graph
    assert "unknown solver 'nobody'" in capsys.readouterr().err
    assert main(["demo", "--budget", "many"]) == 2
    assert "budget 'many'" in capsys.readouterr().err


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    """The path is a folder, or its folder is a file."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file" / "new"):
        with pytest.raises(CannotWrite, match="choose another path"):
            check_paths({"--out": path})
