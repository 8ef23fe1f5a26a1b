"""Tables in a terminal of 80 columns: every name and figure stands on one line."""

import pytest

from remat_facade.cli.app import main
from remat_facade.cli.terminal import show
from remat_facade.cli.widths import FIGURE, as_list, column_widths, line_width
from remat_facade.report.table import Table
from remat_solvers import solver_names

from .corpus import GRAPHS

WIDTH = 80
SWEEP = ["sweep", str(GRAPHS / "gpt2.json"), "--budgets", "100%", "--time-limit", "1", "--solvers"]
LONG_NAME = "encoder.layers.*.self_attention.out_projection"


def cells() -> Table:
    """A long name, words that may be on several lines, and figures."""
    rows = (
        (f"masks in {LONG_NAME}", "pack_mask, native_dropout_backward", "12 of 12", "1.58 GiB"),
        ("linear cross entropy", "nll_loss_forward, 3 more", "1 of 1", "196 MiB"),
    )
    return Table(title="ways", columns=("way", "ops", "on", "saves"), rows=rows)


@pytest.mark.parametrize(
    "command",
    [
        ["solvers"],
        ["zoo"],
        ["zoo", "gpt2-a100-40"],
        ["solve", str(GRAPHS / "gpt2.json"), "--budget", "100%", "--solver", "noremat"],
        [*SWEEP, "noremat,chen_sqrt,chen_sqrt_linear,chen_greedy,chen_greedy_linear,checkpoint_ap"],
    ],
    ids=["solvers", "zoo", "plan", "solve", "sweep"],
)
def test_no_word_is_broken(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are those of a wide terminal, and no line is longer than the terminal."""
    shown = {}
    for width in (400, WIDTH):
        monkeypatch.setenv("COLUMNS", f"{width}")
        assert main(command) == 0
        shown[width] = capsys.readouterr().out
    assert max(map(len, shown[WIDTH].splitlines())) <= WIDTH
    words = set(shown[WIDTH].replace(";", "").split())
    assert {word for word in shown[400].replace(";", "").split() if not set(word) <= {"─"}} <= words


def test_columns_are_narrowed_between_words() -> None:
    """The widest first; a figure is never broken, and a table that is narrow enough is left alone."""
    table = cells()
    assert [len(f"masks in {LONG_NAME}"), 34, 8, 8] == column_widths(table, 400)
    narrowed = column_widths(table, 101)
    assert narrowed is not None
    assert 101 == line_width(narrowed)
    assert narrowed[0] >= len(LONG_NAME)
    assert narrowed[1] >= len("native_dropout_backward")
    assert [8, 8] == narrowed[2:]
    assert len("1.58 GiB") <= FIGURE


def test_a_table_that_is_too_wide_is_a_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row is a name and its values, by their heads; a cell without a value is left out."""
    monkeypatch.setenv("COLUMNS", f"{WIDTH}")
    assert column_widths(cells(), WIDTH) is None
    show(cells())
    lines = capsys.readouterr().out.splitlines()
    assert "   ops nll_loss_forward, 3 more; on 1 of 1; saves 196 MiB" in lines
    assert f" masks in {LONG_NAME}" in lines
    empty = Table(title="", columns=("", "one", "two"), rows=(("name", "", "2"),))
    assert ["", " name", "   two 2", ""] == list(as_list(empty, WIDTH))


def test_every_method_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a terminal that is narrower still."""
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["solvers"]) == 0
    assert set(solver_names()) <= {
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()
    }
