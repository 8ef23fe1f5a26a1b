"""The commands min-budget, sweep and max-batch."""

from __future__ import annotations

import csv
import sys
from json import loads
from pathlib import Path

import pytest

from remat_facade.cli.app import main
from remat_facade.cli.batch_search import BatchClock, TimeUp, Unplanned
from remat_facade.cli.terminal import show
from remat_facade.report.table import Table
from remat_graph import save_graph
from remat_graph.switches.families import families_in
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers.testing import random_graph

from .corpus import GRAPHS

UNET = str(GRAPHS / "unet.json")


def test_the_smallest_budget_is_told_with_its_floor(capsys: pytest.CaptureFixture[str]) -> None:
    """Both numbers are shown, and the op that needs most."""
    assert main(["min-budget", str(GRAPHS / "vgg16.json")]) == 0
    out = capsys.readouterr().out
    assert "smallest budget with a schedule" in out
    assert "no schedule exists below" in out


def test_a_sweep_is_a_table_a_csv_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per method and budget; a dash if the method found no schedule."""
    table, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    words = ["sweep", UNET, "--solvers", "mincut,chen_sqrt", "--budgets", "50%,80%", "--csv", str(table)]
    assert main([*words, "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "mincut" in out
    assert " - " in out
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["solver"], bool(row["overhead"])) for row in rows] == [
        ("mincut", True),
        ("mincut", True),
        ("chen_sqrt", False),
        ("chen_sqrt", True),
    ]
    for row in rows:
        if row["overhead"]:
            assert float(row["overhead"]) >= float(row["lower_bound_overhead"])
            assert int(row["peak_nbytes"]) <= int(row["budget_nbytes"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_draws_what_families_of_ways_are_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One more curve for each method and each set of families that is left out."""
    graph = with_random_switches(random_graph(21, ops=8, fancy=False), 21, most=6)
    path, table = tmp_path / "graph.json", tmp_path / "sweep.csv"
    save_graph(graph, path)
    one, *others = families_in(graph)
    assert others
    words = ["--no", one, "--no", ",".join([one, others[0]]), "--no", "all"]
    words += ["--budgets", "90%,100%", "--csv", str(table), "--png", str(tmp_path / "sweep.png")]
    assert main(["sweep", str(path), "--solvers", "monet,auto", *words]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    ablations = ["", f" (no {one})", f" (no {one} or {others[0]})", " (no ways)"]
    names = [name + what for name in ("monet", "auto") for what in ablations]
    assert [name for name in names for _ in range(2)] == [row["solver"] for row in rows]
    least = {row["solver"]: float(row["overhead"]) for row in rows if row["overhead"]}  # of the last budget
    assert least["monet"] < least[f"monet (no {one})"] < least["monet (no ways)"]
    assert 0.0 == least["monet (no ways)"] == least["auto (no ways)"]
    assert "extra time by budget" in capsys.readouterr().out
    assert main(["sweep", str(path), "--no", "nobody"]) == 2
    assert f"no ways of a family 'nobody': it has {one}, " in capsys.readouterr().err


def test_a_sweep_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """The command imports no torch."""
    before = "torch" in sys.modules
    assert main(["sweep", UNET, "--solvers", "noremat", "--budgets", "100%"]) == 0
    assert ("torch" in sys.modules) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sweep", UNET, "--solvers", "nobody"], "unknown solver 'nobody'"),
        (["sweep", UNET, "--budgets", "50%,2 bananas"], "bananas"),
        (["sweep", UNET, "--no", "masks"], "no ways of a family 'masks': it has no other ways to run ops"),
        (["min-budget", "nowhere.json"], "nowhere.json"),
        (["max-batch", "nowhere.py:make", "--budget", "1GiB"], "nowhere.py"),
        (["max-batch", "nowhere.py:make", "--budget", "40%"], "40%"),
        (["sweep", UNET, "--points", "100000000"], "--points"),
        *(
            ([*words, "--time-limit", seconds], f"expected seconds above 0, up to 1e+09, got {seconds}")
            for words in (["sweep", UNET], ["min-budget", UNET], ["solve", UNET, "--budget", "50%"])
            for seconds in ("0", "inf", "nan", "1e+300")
        ),
    ],
)
def test_mistakes_are_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the line says what to do."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_the_largest_batch_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest batch fits, and the next one does not."""
    factory = tmp_path / "made.py"
    factory.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make(batch):\n"
        "    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]\n"
        "    return nn.Sequential(*layers), torch.randn(batch, 64)\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = f"{factory}:make"
    assert main(["max-batch", target, "--budget", "200KiB", "--max-overhead", "0"]) == 0
    unplanned = capsys.readouterr().out
    assert main(["max-batch", target, "--budget", "200KiB"]) == 0
    planned = capsys.readouterr().out
    assert " ".join(planned.split()).count("without a plan about 122 ") == 1  # as noremat finds, below

    def batch(out: str) -> int:
        return int(next(line for line in out.splitlines() if "largest batch" in line).split()[-1])

    assert 0 < batch(unplanned) < batch(planned)
    assert main(["max-batch", target, "--budget", "200KiB", "--solvers", "noremat"]) == 0
    noremat = capsys.readouterr().out
    assert batch(noremat) == 122
    assert " ".join(noremat.split()).count("without a plan 122 ") == 1
    words = ["--budget", "200KiB", "--gradients", "present"]
    assert main(["max-batch", target, *words]) == 0
    assert batch(planned) < batch(capsys.readouterr().out)
    for size in ("--budget", "--device-memory"):
        assert main(["max-batch", target, size, "600KiB", "--first", "10000"]) == 1
        assert f"a batch of 10000 does not fit: lower --first, or raise {size} or" in capsys.readouterr().err
    assert main(["max-batch", target, "--device-memory", "80KiB"]) == 1  # less than parameters and gradients
    shown = capsys.readouterr()
    assert batch(shown.out) == 0
    assert "a batch of 1 does not fit: of the 80.0 KiB of the given device, parameters and" in shown.err
    assert "nothing is left" in shown.err


@pytest.mark.parametrize(
    ("peaks", "budget_nbytes", "shown"),
    [
        ({1: 300, 2: 400}, 350, "1"),
        ({1: 300}, 200, "0"),
        ({80: 900, 160: 1700}, 500, "None"),  # smaller ones were not tried
        ({1: 300}, 350, "about 1"),
        ({2: 300, 8: 900}, 600, "about 5"),
        ({2: 300, 8: 900, 16: 1700}, 899, "about 7"),
        ({4: 500, 8: 500}, 500, "about 8"),
        ({4: 900, 8: 500}, 500, "about 8"),  # whatever grows, what fits fits
        ({1: 200, 4: 500, 8: 900}, 1950, "about 18"),  # a search that ran out of time
    ],
)
def test_the_largest_batch_without_a_plan(peaks: dict[int, int], budget_nbytes: int, shown: str) -> None:
    """It is exact where the next size does not fit, else on the line between two sizes."""
    assert str(Unplanned.between(peaks, budget_nbytes)) == shown


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_search_of_batches_that_ran_out_of_time(
    json: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size takes a while, so the search would take hours; the largest until then is shown."""
    factory = tmp_path / "slow.py"
    factory.write_text(
        "import time, torch\n"
        "def make(batch):\n"
        "    time.sleep(0.5)\n"
        "    return torch.nn.Linear(8, 8), torch.randn(batch, 8)\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["max-batch", f"{factory}:make", "--budget", "1TiB", "--platform", "flops", "--time-limit", "1"]
    assert main([*words, *json]) == 0
    out = capsys.readouterr().out
    if json:
        assert loads(out)["out_of_time"] == ["auto"]
    else:
        said = " ".join(out.split())
        assert "largest batch at least " in said
        assert "the time limit ended the search of auto: a larger batch may fit, or a faster" in said


def test_no_size_begins_that_would_end_too_late() -> None:
    """A size takes as long as a smaller one; the first does not count, since it also imports libraries."""
    now = [0.0]
    clock = BatchClock(1000.0, now=lambda: now[0])

    def take(batch: int, seconds: float) -> None:
        with clock.size(batch):
            now[0] += seconds

    take(1, 500)
    clock.know()
    take(2, 1)
    take(8, 300)
    with pytest.raises(TimeUp):
        take(16, 300)
    take(4, 100)
    clock.begin()
    take(16, 300)


def test_no_batch_without_a_plan_is_known() -> None:
    """Where no size was tried."""
    assert Unplanned.between({}, 100) is None


def test_a_table_without_names_of_columns_has_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    """Between the title and the first row is one empty line."""
    show(Table(title="t", columns=("", ""), rows=(("a", "1"), ("b", "2"))))
    assert [["t"], [], ["a", "1"], ["b", "2"], []] == [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_a_table_in_a_pipe_breaks_no_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe has no width, unless one is set."""
    monkeypatch.delenv("COLUMNS", raising=False)
    name = ".".join(["layers"] * 30)
    show(Table(title="t", columns=("", "bytes"), rows=((name, "1"), ("b", "2"))))
    assert [line.split() for line in capsys.readouterr().out.splitlines() if name in line] == [[name, "1"]]
    monkeypatch.setenv("COLUMNS", "80")
    show(Table(title="t", columns=("", "bytes"), rows=((name, "1"), ("b", "2"))))
    lines = capsys.readouterr().out.splitlines()
    assert f" {name}" in lines  # to be copied; all other lines are narrow
    assert max(len(line) for line in lines if name not in line) <= 80
