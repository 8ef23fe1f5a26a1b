"""No test reads the wall clock to decide: a slow machine would fail it, and a quick one would hide a fault.

Clocks are handed in, work is counted, and a limit on waiting is `hang_limit` of `conftest.py`, which raises.
"""

import ast
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
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
    "time",
    "time_ns",
}
MODULES = {"time": CLOCKS, "timeit": {"default_timer"}, "datetime": {"now", "utcnow", "today"}}
ALLOWED = {
    "tests/helpers/forked.py": "limits how long a child process is waited for",
    "tests/helpers/ranks.py": "limits how long ranks are waited for",
    "tests/offmate/test_endings.py": "limits how long threads are waited for",
    "tests/capture/test_surroundings.py": "a model reads the clock, which planning must notice",
}


def clocks_read(tree: ast.AST) -> Iterator[int]:
    """Lines that name a clock of the modules, whatever name a module is imported by."""
    clocks: dict[str, set[str]] = {}  # by the name that stands for the module, or for `datetime.datetime`
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                clocks |= {each.asname or each.name: MODULES.get(each.name, set()) for each in names}
            case ast.ImportFrom(module="time" | "timeit" as module, names=names):
                if any(each.name in MODULES[module] for each in names):
                    yield node.lineno
            case ast.ImportFrom(module="datetime", names=names):
                clocks |= {each.asname or each.name: MODULES["datetime"] for each in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            module = ast.unparse(node.value).partition(".")[0]
            if node.attr in clocks.get(module, ()):
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
        ("import time as t\nbegan = t.monotonic()", [2]),
        ("from timeit import default_timer as timer", [1]),
        ("import datetime\nbegan = datetime.datetime.now()", [2]),
        ("from datetime import datetime\nbegan = datetime.now()", [2]),
        ("import time\ntime.sleep(1)\nclock.monotonic()", []),
    ],
)
def test_clocks_are_found(code: str, lines: list[int]) -> None:
    """By any name of their module; clocks that a test hands in do not count, nor does sleeping."""
    assert lines == list(clocks_read(ast.parse(code)))


@pytest.mark.parametrize("caught", [(), (TimeoutError,)])
def test_a_limit_holds_also_if_its_error_is_caught(
    caught: tuple[type[Exception], ...], hang_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    """Nothing waits here: the signal is raised at once."""
    with pytest.raises(TimeoutError, match="not done after 600 s"), hang_limit(600), suppress(*caught):
        signal.raise_signal(signal.SIGALRM)
