"""No test reads the wall clock to decide: a slow machine would fail it, and a quick one would hide a fault.

Clocks are handed in, work is counted, and a limit on waiting is `hang_limit` of `conftest.py`, which raises.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = {
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "thread_time",
    "time_ns",
}
ALLOWED = {
    "tests/helpers/forked.py": "limits how long a child process is waited for",
    "tests/helpers/ranks.py": "limits how long ranks are waited for",
    "tests/offmate/test_endings.py": "limits how long threads are waited for",
    "tests/capture/test_surroundings.py": "a model reads the clock, which planning must notice",
}


def clocks_read(tree: ast.AST) -> Iterator[int]:
    """Lines that name a clock of the module `time`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in {*CLOCKS, "time"}:
                yield node.lineno
            case ast.ImportFrom(module="time", names=names):
                if any(alias.name in {*CLOCKS, "time"} for alias in names):
                    yield node.lineno


def test_no_test_reads_the_wall_clock() -> None:
    """Those that do are listed, each with its reason."""
    paths = [ROOT / "conftest.py", *ROOT.glob("tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if "data" not in path.parts and list(clocks_read(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import time\nassert time.monotonic() - began < 10", [2]),
        ("from time import perf_counter", [1]),
        ("import time\nbegan = time.time()", [2]),
        ("import time\ntime.sleep(1)\nclock.monotonic()", []),
    ],
)
def test_clocks_are_found(code: str, lines: list[int]) -> None:
    """However they are named; handed-in clocks and sleeps are not meant."""
    assert lines == list(clocks_read(ast.parse(code)))
