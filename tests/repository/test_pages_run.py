"""The pages for users run as they stand: every Python block, every `remat` command, in the order of the page.

The blocks of a page share one namespace. A block with a title is written to the file of that name too. Each
page begins in an empty folder. Where a table has a column of what to type here, each line in it runs as well.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from remat_facade import limit_memory
from remat_facade.cli.app import main
from remat_facade.entrypoints.keywords import LimitKeywords
from remat_graph import get_platform
from remat_solvers import command, registry
from tests.repository.pages import (
    GIVEN,
    LEFT_OUT,
    PAGES,
    ROOT,
    blocks,
    first_line,
    give,
    path_of,
    runs,
    without_comment,
)

OTHER_COMMANDS = re.compile(
    r"pip install |python3 -m venv |hatch run |python (examples|benchmarks)/|torchrun |export "
)
"""What a page may show and no test here runs; `test_examples` runs the examples."""


def rows(page: str) -> list[list[str]]:
    """The cells of each row of the tables of what to type here, in order."""
    text = path_of(page).read_text(encoding="utf-8")
    tables = re.findall(r"^\| there \| here \| remark \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for table in tables for row in table.splitlines()
    ]


def run(command: str) -> None:
    """Run a line of the command line; only `remat` runs, and searches end early."""
    if OTHER_COMMANDS.match(command):
        return
    name, *words = shlex.split(command, comments=True)
    assert name == "remat", command
    limit_s = {"plan": "3", "sweep": "1", "solve": "3"}.get(words[0])
    words += ["--time-limit", limit_s] if limit_s else []
    assert main(words) == 0, command


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Times that were measured for one page hold for the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the page runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(cache))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


LONG = ("coming_from/research", "gallery/index")  # 40 s of CI


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page in LONG)) for page in PAGES]
)
def test_the_page_runs(page: str, folder: Path) -> None:
    """No block raises, and no command fails."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
            sys.modules.pop(Path(block.title).stem, None)
        give(page, block, names)
        if block.language == "python" and runs(page, first_line(block)):
            exec(compile(block.text, f"{page}.md", "exec"), names)
        elif block.language == "console":
            for line in (line for line in block.text.splitlines() if runs(page, line)):
                run(line)
    commands = set()
    for _, here, _ in rows(page):
        for line in re.findall("`(.*?)`", here):
            if not re.match(rf"remat |{OTHER_COMMANDS.pattern}", line):
                exec(compile(line, f"{page}.md: {line}", "exec"), names)
            elif line not in commands:  # several rows may name the same one
                commands.add(line)
                run(line)


def test_what_is_given_or_left_out_is_on_the_page() -> None:
    """Each entry of both lists names the first line of a block, or a command, of its page."""
    for page in PAGES:
        firsts = {first_line(block) for block in blocks(page)}
        commands = {
            without_comment(line)
            for block in blocks(page)
            if block.language == "console"
            for line in block.text.splitlines()
        }
        assert LEFT_OUT.get(page, set()) <= firsts | commands, page
        assert GIVEN.get(page, {}).keys() <= firsts, page
    assert {*LEFT_OUT, *GIVEN, *LONG} <= set(PAGES)


def test_commands_for_remat_solvers_alone_need_no_facade() -> None:
    """The pages that say so name only commands that `remat` has without remat-facade."""
    page = path_of("solvers").read_text(encoding="utf-8")
    (alone,) = re.findall(r"is enough for these commands:\n\n```console\n(.*?)```", page, re.DOTALL)
    readme = [block.text for block in blocks("packages/solvers/README") if block.language == "console"]
    verbs = {line.split()[1] for text in (alone, *readme) for line in text.splitlines()}
    assert {"solve", "min-budget", "solvers"} == verbs
    assert {0} == {command.main([verb, "--help"]) for verb in verbs}
    assert command.main(["sweep", "--help"]) != 0


def test_every_row_has_a_line_or_says_that_there_is_none() -> None:
    """What users of the research projects know: each has a line that runs here, or no counterpart."""
    found = rows("coming_from/research")
    wrong = [row for row in found if not re.fullmatch(r"no counterpart|`[^`]+`( `[^`]+`)*", row[1])]
    assert [] == wrong
    assert len(found) > 100


def test_the_first_twelve_questions_are_titles_of_answers() -> None:
    """Each is a link to the section that has the question as its title, on a page that runs."""
    text = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\d+\. \[(.*\?)\]\(([\w/]+)\.md#(.*)\)$", text, re.MULTILINE)
    assert len({question for question, _, _ in asked}) == 12
    assert {page for _, page, _ in asked} <= set(PAGES)
    for question, page, anchor in asked:
        assert f"\n## {question}\n" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        words = re.sub(r"[^\w\s-]", "", question).lower()
        assert anchor == re.sub(r"[\s-]+", "-", words).strip("-")


def test_the_page_on_options_has_each_once() -> None:
    """The tables of options are the arguments of `limit_memory` and the keywords that it passes on."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").split("## The environment")[0]
    named = inspect.signature(limit_memory).parameters.keys() - {"model", "options"}
    assert sorted(named | LimitKeywords.__annotations__.keys()) == sorted(
        re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    )


def string_literals(path: Path) -> list[str]:
    """The strings of a source, with a mark for each part that is computed."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
    return found


def test_the_messages_are_those_of_the_code() -> None:
    """The fixed words of each message on the page stand in a string of the sources."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    titles = [line for line in page.splitlines() if line.startswith("### ")]
    strings = [text for path in ROOT.glob("packages/*/src/**/*.py") for text in string_literals(path)]
    fixed = [
        part.strip() for title in titles for each in re.findall("`(.*?)`", title) for part in each.split("…")
    ]
    assert len(titles) > 40
    assert [] == [part for part in fixed if len(part) > 1 and not any(part in text for text in strings)]


def test_the_entry_points_of_the_page_register(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with the entry points of the page offers its solver and its platform by name."""
    files = [block for block in blocks("solvers") if block.title]
    groups = [
        tomllib.loads(block.text)["project"]["entry-points"] for block in files if block.language == "toml"
    ]
    for block in files:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    lines = [
        f"[{group}]\n{name} = {value}"
        for each in groups
        for group in each
        for name, value in each[group].items()
    ]
    information = folder / "mine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n", encoding="utf-8"
    )
    (information / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    registry._registered.cache_clear()
    try:
        assert registry.get_solver("segments", count=8).name == "segments"
        assert get_platform("my_device").name == "my_device"
    finally:
        registry._registered.cache_clear()
