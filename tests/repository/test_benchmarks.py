"""The benchmarks start, explain themselves, and write what the report reads: nothing else runs them in CI."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_first, report, report_pictures, report_summary
from benchmarks.first_contact import processes
from benchmarks.first_contact.rows import Findings, Row, Setting
from remat_facade.report.picture import Look

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HELPERS = {
    *("child", "device_steps", "gallery_files", "offload_ways", "page_pictures", "peer_models"),
    *("planning_curves", "planning_models", "record"),
    *("report", "report_offload", "report_parts", "report_pictures", "report_planning", "report_summary"),
    "report_ways",
}
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


@pytest.mark.parametrize("page", list(report.PAGES))
def test_the_pages_show_the_committed_results(page: str) -> None:
    """As `benchmarks/report.py` writes them."""
    shown = (BENCHMARKS.parent / "docs" / f"{page}.md").read_text()
    if page == "results":
        assert "\n".join(report_summary.summary(report.RESULTS)) in shown
    for name, section in report.PAGES[page][1].items():
        path = report.RESULTS / f"{name}.json"
        if path.exists():
            assert "\n".join(section(json.loads(path.read_text()))) in shown, name


def test_the_pictures_of_the_pages_are_drawn(tmp_path: Path) -> None:
    """From the committed results; each is in the folder of images and on a page, and has its curves."""
    docs = BENCHMARKS.parent / "docs"
    pages = "".join((docs / f"{page}.md").read_text() for page in report.PAGES)
    drawn = [path.name for path in report_pictures.written(report.RESULTS, tmp_path)]
    names = report_pictures.PICTURES
    assert {f"{name}{kind}.svg" for name in names for kind in ("", "-narrow")} == set(drawn)
    for name in drawn:
        assert (docs / "images" / name).exists()
        assert f'"images/{name}"' in pages
    for name, (source, draw) in names.items():
        rows = json.loads((report.RESULTS / f"{source}.json").read_text())["rows"]
        for narrow in (False, True):
            curves = [line for axes in draw(rows, Look(narrow=narrow)).axes for line in axes.get_lines()]
            assert curves, name
            assert all(len(line.get_xdata()) for line in curves), name


def test_each_page_has_the_pictures_that_it_names() -> None:
    """In HTML too, where the builder of the site checks nothing."""
    root = BENCHMARKS.parent
    for page in (root / "README.md", *(root / "docs").rglob("*.md")):
        for place in re.findall(r'(?:src|srcset)="([^":]+)"', page.read_text(encoding="utf-8")):
            assert (page.parent / place).exists(), f"{page}: {place}"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
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


@pytest.mark.full
@pytest.mark.parametrize(
    "sections",
    [("environment", "tests", "exact"), ("full budget", "timing", "language model", "offmate")],
)
def test_first_contact_on_tiny_models(sections: tuple[str, ...], tmp_path: Path) -> None:
    """Each row is run, none is wrong, and a second run has nothing to do."""
    # No limit that a busy machine could reach.
    options = ("--small", "--out", str(tmp_path), "--time-limit", "86400")
    command = ("gpu_first.py", *options, "--sections", *sections)
    assert "none of" in run(*command)
    (file,) = tmp_path.glob("*-first-small.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["section"] for row in rows} == {*sections}
    assert all(row["said"] or row["skipped"] for row in rows)
    assert all(row["figures"]["exact"] for row in rows if row["section"] == "exact")
    assert [*tmp_path.glob("platforms/*.json")]
    before = file.stat().st_mtime_ns
    run(*command)
    assert file.stat().st_mtime_ns == before


class TestRowsInProcesses:
    """A row that ends its process, or does not end, costs no other row."""

    SCRIPT = """
import os, sys, threading
from benchmarks.first_contact.processes import announce
for name in sys.argv[1:]:
    announce(begin=name)
    if name == "aborts":
        print("a kernel failed", file=sys.stderr, flush=True)
        os.abort()
    if name == "hangs":
        threading.Event().wait()
    announce(name=name, row={"said": name})
"""

    def rows(self, names: list[str], **options: Any) -> list[tuple[str, dict[str, Any]]]:
        """The rows of a script that aborts or hangs at those names."""
        environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
        options = {"limit_s": 600.0, "environment": environment, **options}
        return list(
            processes.rows_of(lambda left: [sys.executable, "-P", "-c", self.SCRIPT, *left], names, **options)
        )

    def test_an_abort(self) -> None:
        rows = self.rows(["one", "aborts", "two"])
        assert [name for name, _ in rows] == ["one", "aborts", "two"]
        (wrong,) = rows[1][1]["wrong"]
        assert "status -6" in wrong
        assert not rows[1][1]["cut"]
        assert "a kernel failed" in wrong
        assert rows[2][1] == {"said": "two"}

    def test_a_process_that_cannot_begin(self) -> None:
        """Each row is tried, since each may be the cause."""
        rows = self.rows(["one", "two"], environment={**os.environ, "PYTHONPATH": ""})
        assert [name for name, _ in rows] == ["one", "two"]
        assert all("No module named 'benchmarks'" in row["wrong"][0] for _, row in rows)

    def test_all_are_ended(self) -> None:
        """Those of other threads too, and the rows after them do not begin."""
        group = processes.Group()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(self.rows(["hangs", "two"], group=group)))
        thread.start()
        pause = threading.Event()
        for _ in range(6000):
            if group.running:
                break
            pause.wait(0.01)
        group.end()
        thread.join(60)
        assert not thread.is_alive()
        assert "two" not in dict(found)
        assert not group.running
        assert self.rows(["one"], group=group) == []

    def test_no_time_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The row that is running is reported, and those after it are left for another run."""
        began = False

        def clock() -> float:
            return 1e6 if began else 0.0

        real = json.loads

        def loads(text: str) -> Any:
            nonlocal began
            message = real(text)
            began = message.get("begin") == "hangs"
            return message

        monkeypatch.setattr(processes, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
        rows = self.rows(["one", "hangs", "two"], clock=clock)
        assert [name for name, _ in rows] == ["one", "hangs"]
        assert "not done when the 600 s" in rows[1][1]["wrong"][0]
        assert rows[1][1]["cut"]


def test_first_contact_reports_what_is_wrong_first(capsys: pytest.CaptureFixture[str]) -> None:
    """With the goal and the figure of each."""
    found = Findings(Setting(device=torch.device("cpu"), small=False, platforms=Path()))
    found.judge_peak(1001, 1000, 1000)
    found.judge_step(1.06, 1.0)
    assert len(found.wrong) == 2
    good = Row(section="exact", name="good", said="bits of eager")
    bad = Row(section="exact", name="bad", wrong=found.wrong)
    skipped = Row(section="tests", name="cuda", skipped="there is no CUDA device")
    gpu_first.print_report([good, skipped, bad], [("offmate", "40%")])
    lines = capsys.readouterr().out.split("\n")[1:]
    assert lines[0] == "1 of 3 rows wrong"
    assert lines[1:3] == [f"  exact, bad: {goal}" for goal in found.wrong]
    assert "peak 1001 bytes above the budget of 1000" in lines[1]
    assert "+6.0%" in lines[2]
    assert "skipped" in lines[3]
    assert "offmate, 40%" in lines[4]


@pytest.mark.full
def test_two_versions_take_turns(tmp_path: Path) -> None:
    """A version beside itself finds the same plan; what is no working tree is refused."""
    file = tmp_path / "rows.json"
    root, small = str(BENCHMARKS.parent), ("sequential", "--budgets", "40%", "--json", str(file))
    assert "1 plans; before: median" in run("planning_versions.py", root, *small)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["before"].keys() == {"wall_s", "overhead", "bound"}
    assert all(row["before"][name] == row["now"][name] for name in ("overhead", "bound"))
    refused = subprocess.run(
        [sys.executable, "planning_versions.py", str(tmp_path)],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
    )
    assert "has no folder `packages`" in refused.stderr


@pytest.mark.full
def test_planning_goes_on_from_its_file(tmp_path: Path) -> None:
    """A model with a row for each budget keeps its rows; one that was interrupted is planned again."""
    file = tmp_path / "rows.json"
    command = ("planning.py", "sequential", "--json", str(file), "--resume", "--budgets")
    run(*command, "60%")
    first = json.loads(file.read_text())["rows"]
    run(*command, "60%")
    assert json.loads(file.read_text())["rows"] == first
    run(*command, "60%,40%")
    both = json.loads(file.read_text())["rows"]
    assert [row["budget"] for row in both] == ["60%", "40%"]
    assert both[0]["wall_s"] != first[0]["wall_s"]
