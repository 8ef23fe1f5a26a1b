"""The reference by topic: each name on one page, each argument in the table, all of them there."""

import inspect
import re
from collections import Counter
from pathlib import Path

import remat_facade
from remat_facade.entrypoints.keywords import LimitKeywords, OffmateKeywords
from tests.repository.test_doc_names import PACKAGES, resolves

ROOT = Path(__file__).resolve().parents[2]
BY_PACKAGE = {package.removeprefix("remat_") for package in PACKAGES}
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in ROOT.glob("docs/api/*.md")
    if path.stem not in BY_PACKAGE
}
NAMES = Counter(re.findall(r"^::: (\S+)$", "\n".join(PAGES.values()), re.MULTILINE))


def test_each_name_is_there_and_on_one_page() -> None:
    """The site takes names from the sources, and says nothing of one that is on two pages."""
    assert [] == [name for name in NAMES if not resolves(name)]
    assert [] == [name for name, count in NAMES.items() if count > 1]


def test_what_users_import_is_on_a_page() -> None:
    """A user who has an import looks for its name here."""
    assert set() == {f"remat_facade.{name}" for name in remat_facade.__all__} - NAMES.keys()


def test_the_table_has_each_argument() -> None:
    """In the order of the alphabet."""
    own = inspect.signature(remat_facade.limit_memory).parameters.keys() - {"model", "options"}
    expected = {*own, *LimitKeywords.__annotations__, *OffmateKeywords.__annotations__}
    table = PAGES["index"].split("## Where is an argument?")[1]
    assert sorted(expected) == re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_every_page_is_in_the_navigation() -> None:
    """A page that is not is found by search alone."""
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    listed = re.findall(r"(?:: |- )([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(pages) == sorted(listed)
