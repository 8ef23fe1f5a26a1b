"""The sources keep to the limits of the house."""

import ast
import re
from pathlib import Path

import pytest

from tests.repository.house import (
    ALLOWED,
    MOST,
    WORDS,
    Word,
    changes_before_try,
    main,
    private_words,
    texts,
    unmerged,
    written,
)


def test_every_number_is_within_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """Circles, contracts, long files and functions, duplicates, private words: one line each, status 0."""
    status = main()
    out = capsys.readouterr().out
    assert 0 == status, out
    assert all(name in out for name in MOST)


def words_in(text: str, path: Path) -> list[str]:
    """The names of the private words in a file with that text, each as often as it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [word.name for word, places in private_words([path]).items() for _ in places]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("settled = at_home(graph, on_host)", "home"),
        ("    weights that are at home on the host", "home"),
        ("from order_frontier import Ladder", "ladder, rung"),
        ('"""Each rung is an order."""', "ladder, rung"),
        ("class Trip:", "trip"),
        ("def _floor(kin: Reachability) -> int:", "kin"),
        ("snapshot = manager.look_at(called)", "look_at"),
        ("land(param)", "take off, land"),
        ("parameter.let_lie()", "take back, let lie"),
        ('f"it is made again: {name}"', "made again"),
        ("# Measured anew.", "anew"),
        ("| Beside the plan | 3 |", "beside"),
        ("The caller is told.", "tell"),
        ("which is said once.", "said"),
        ("the backward hands its gradients over in parts", "hand over"),
        ("whoever reads a parameter waits", "whoever"),
        ("the planner is asked again", "ask again"),
        ("the optimizer works as ever", "as it is"),
        ("raise BadBudget('the budget means nothing')", "means nothing"),
        ("at most so many ops", "so many"),
        ("equal to the bit", "to the bit"),
        ("updates that are under way", "in flight"),
        ("the signal is put off", "put off"),
        ("values that are dear to compute", "dear"),
        ("mend its cause", "mend"),
        ("scratch bytes of an operator", "scratch"),
        ("a budget that leaves room for it", "room"),
    ],
)
def test_a_planted_word_is_found(text: str, name: str, tmp_path: Path) -> None:
    """In code, comments, docstrings, messages and Markdown."""
    path = tmp_path / "remat_executor" / "module" / "planted.py"
    assert name in words_in(text, path)
    assert 2 * words_in(text, path).count(name) == words_in(f"{text}\n{text}\n", path).count(name)


@pytest.mark.parametrize(
    ("text", "folder", "name"),
    [
        ("class Attempt:", "remat_solvers/offload", "attempt"),
        ("for gap in gaps:", "remat_solvers/transfers", "gap"),
        ("style: Style", "remat_solvers/offload", "style"),
        ("def probe(optimizer):", "remat_offload/optimizer", "probe"),
        ("def cut(module):", "remat_executor/lowering", "cut"),
    ],
)
def test_a_word_of_one_place(text: str, folder: str, name: str, tmp_path: Path) -> None:
    """It means something else in other packages."""
    assert name in words_in(text, tmp_path / folder / "planted.py")
    assert name not in words_in(text, tmp_path / "remat_facade" / "planted.py")


@pytest.mark.parametrize(
    "text",
    [
        'value = Value(name="w", nbytes=4, placement=Placement.HOST)',
        'data["home"], data["settled"]',
        "model.rehearsed_nbytes",
        "evicted to make room for the output",
        "python benchmarks/scratch.py --json benchmarks/results/scratch.json",
        "a random walk; os.walk(folder)",
        "fake tensors cannot tell them apart",
        "as soon as it is there",
        "one round trip to the device",
        "Training a model within a budget",
        "zoo lane boundary referee Ticket StepHandler Plan.on_host",
        "a new plan; the homepage; a ladle; alongside; scratched",
    ],
)
def test_words_with_a_standard_meaning(text: str, tmp_path: Path) -> None:
    """They do not count, nor do names that stay."""
    assert [] == words_in(text, tmp_path / "remat_executor" / "module" / "plain.py")


def test_where_words_are_looked_for() -> None:
    """Sources of all packages, their READMEs, the documentation; not tests, which may quote."""
    paths = {path.as_posix() for path in written()}
    for part in ("/README.md", "/CONTRIBUTING.md", "/docs/architecture.md", "/packages/solvers/README.md"):
        assert any(path.endswith(part) for path in paths), part
    for package in ("graph", "solvers", "executor", "offload", "facade"):
        assert any(f"/remat_{package}/" in path for path in paths), package
    assert not any("/tests/" in path for path in paths)


def test_the_words_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The most frequent first, with counts, the word to use instead, and places."""
    path = tmp_path / "planted.md"
    path.write_text("whoever reads it\nmade anew,\nand anew\n")
    monkeypatch.setattr("tests.repository.house.written", lambda: [path])
    assert 0 == main(["--words"])
    assert [
        "   2 anew: again",
        *(f"         {path}:{line}" for line in (2, 3)),
        "   1 whoever: the planner, the caller",
        f"         {path}:1",
    ] == capsys.readouterr().out.splitlines()


def test_every_word_says_what_to_use_and_every_exception_why() -> None:
    """Expressions that compile, names without repeats."""
    assert len(WORDS) == len({word.name for word in WORDS})
    for word in WORDS:
        assert isinstance(word, Word)
        assert word.instead
        assert re.compile(word.pattern).search("") is None
    for _, part, reason in ALLOWED:
        assert reason
        assert re.compile(part).search("") is None


def test_markers_of_a_merge_are_found(tmp_path: Path) -> None:
    """Those of both sides, and no underlined title; the README is among the files that are read."""
    path = tmp_path / "page.md"
    path.write_text("Title\n=======\n\n<<<<<<< HEAD\none\n=======\ntwo\n>>>>>>> 02f5935f\n")
    assert ["page.md:4", "page.md:8"] == unmerged([path])
    assert {"README.md", "house.py", "hatch.toml"} <= {each.name for each in texts()}


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("torch.set_num_threads(1)", [1]),
        ("torch.backend.flag = True", [1]),
        ("for one in several:\n    one.kernels[key] = 1", [2]),
        ("with other():\n    owner.depth += 1\n    try:\n        yield\n    finally:\n        undo()", [2]),
        ("owner.depth += 1\nwith other():\n    try:\n        yield\n    finally:\n        undo()", [1]),
        ("with other():\n    owner.depth += 1", [2]),
        ("if known:\n    owner.depth += 1\n    try:\n        yield\n    finally:\n        undo()", [2]),
        ("threads = torch.get_num_threads()\nfound: list[int] = []", []),
        ("def see(frame):\n    found.append(frame)\n    owner.seen = True", []),
    ],
)
def test_changes_before_their_try_are_found(before: str, lines: list[int]) -> None:
    """Calls for an effect and what is stored outside; neither reads nor functions that run later."""
    body = ast.parse(
        f"{before}\ntry:\n    owner.flag = True\n    yield\nfinally:\n    owner.flag = False"
    ).body
    assert set(lines) == set(changes_before_try(body))


def test_a_try_that_undoes_nothing() -> None:
    """It has no `finally`, so what comes before it stays as it is."""
    assert [] == list(
        changes_before_try(ast.parse("owner.check()\ntry:\n    yield\nexcept E:\n    raise").body)
    )
