"""The pages for users run as they stand: every Python block, every `remat` command, in the order of the page.

The blocks of a page share one namespace. A block with a title is written to the file of that name too. Each page
begins in an empty folder.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remat_facade.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("index", "budgets", "troubleshooting", "performance", "solvers"),
    *("coming_from/checkpoint", "coming_from/deepspeed", "coming_from/activation_memory_budget"),
)
OTHER_COMMANDS = re.compile(r"pip install |hatch run |python examples/|torchrun |export ")
"""What a page may show and no test here runs; `test_examples` runs the examples."""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', text, flags=re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def run(command: str) -> None:
    """Run a line of the command line; only `remat` runs."""
    if OTHER_COMMANDS.match(command):
        return
    name, *words = shlex.split(command, comments=True)
    assert name == "remat", command
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
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, folder: Path) -> None:
    """No block raises, and no command fails."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
            sys.modules.pop(Path(block.title).stem, None)
        if block.language == "python":
            exec(compile(block.text, f"{page}.md", "exec"), names)
        elif block.language == "console":
            for line in block.text.splitlines():
                run(line)


def test_a_page_asks_what_users_of_other_methods_ask() -> None:
    """Twelve questions at least, each the title of a section."""
    pages = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
    asked = [re.findall(r"^## (.*\?)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages]
    assert all(len(each) >= 4 for each in asked)
    assert sum(map(len, asked)) >= 12
