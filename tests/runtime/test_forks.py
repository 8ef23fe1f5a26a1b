"""A process that is forked beside a planned module ends, and never waits for what its parent alone has."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forked import DONE, HUNG, REFUSED

ROOT = Path(__file__).resolve().parents[2]


def ends(kind: str, folder: Path) -> dict[tuple[str, str], tuple[int, str]]:
    """For each state of a step and each thing that a child does: how it ends, and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.forked", kind, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    found, said = {}, ""
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"(.*)\|(.*)\|(-?\d+)", line):
            found[match[1], match[2]] = int(match[3]), said
            said = ""
        else:
            said += line
    return found


def test_children_of_what_computes(tmp_path: Path) -> None:
    """They end as they like, and go on as plain torch's do."""
    found = ends("hiremate", tmp_path)
    assert {DONE} == {status for status, _ in found.values()}
    assert 8 == len(found)


def test_children_of_what_moves(tmp_path: Path) -> None:
    """They end; lanes are their parent's, so what needs one is refused in one line, whatever is under way."""
    found = ends("offmate", tmp_path)
    assert HUNG not in {status for status, _ in found.values()}
    assert {DONE, REFUSED} == {status for status, _ in found.values()}
    for (_, act), (status, said) in found.items():
        if act in ("exit", "let go"):
            assert DONE == status
        if act in ("forward", "step"):
            assert REFUSED == status
        if status == REFUSED:
            assert "belongs to the process that made it" in said
    assert DONE == found["built", "state_dict"][0]


WAITING = {  # what may wait, and where: whatever is new here must be shown not to wait for what is dead
    "Event": {
        "remat_offload/copy_lanes/threaded.py",  # the waiter checks that the thread of the job is alive
        "remat_offload/engine/accumulation.py",  # has a limit
    },
    "Lock": {"remat_executor/inspection/read_recorder.py"},  # nobody waits: who does not get it goes on
    "Thread": {"remat_offload/copy_lanes/threaded.py"},
    "ThreadPoolExecutor": {
        "remat_solvers/running/parallel.py"
    },  # a fork in it does the work of the threads itself
    "wait": {"remat_solvers/running/parallel.py"},  # for those threads, by the process that began them
    "SimpleQueue": {"remat_offload/copy_lanes/threaded.py"},  # its lane's thread alone waits for it
    "RLock": {"remat_executor/fork_lock.py", "remat_offload/copy_lanes/threaded.py"},
    "Popen": {"remat_solvers/running/subprocess_json.py"},  # looked at until a limit, and killed
    "select": {"remat_graph/serialization/pipes.py"},  # for somebody to open a pipe's other end, with a limit
}
MAKERS = {"threading", "queue", "multiprocessing", "subprocess", "concurrent", "asyncio", "signal", "select"}
HARMLESS = {"current_thread", "get_ident", "local", "main_thread", "PIPE", "TimeoutExpired"} | {
    "SIGINT",
    "default_int_handler",
    "getsignal",
    "raise_signal",
    "signal",
    "valid_signals",
}


@functools.cache
def sources() -> dict[str, ast.Module]:
    paths = (ROOT / "packages").glob("*/src/**/*.py")
    return {str(path).split("/src/")[1]: ast.parse(path.read_text()) for path in paths}


def called(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_whatever_can_wait_is_known() -> None:
    """Locks, threads, events, queues and processes are made where they are known, and nowhere else."""
    found: dict[str, set[str]] = {}
    for path, tree in sources().items():
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MAKERS
            for alias in node.names
        }
        for call in called(tree):
            match call.func:
                case ast.Name(id=name) if name in imported:
                    found.setdefault(name, set()).add(path)
        whole = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                    module in MAKERS & whole and name not in HARMLESS
                ):
                    found.setdefault(name, set()).add(path)
    assert found == WAITING


@pytest.mark.parametrize(
    ("path", "method", "places"),
    [
        ("remat_offload/copy_lanes/threaded.py", "self._ended.wait", 1),
        ("remat_offload/copy_lanes/threaded.py", "thread.through.wait", 1),
        ("remat_offload/copy_lanes/threaded.py", "thread.join", 1),
        ("remat_executor/fork_lock.py", "self._lock.acquire", 1),
        ("remat_solvers/running/subprocess_json.py", "process.communicate", 1),
        ("remat_graph/serialization/pipes.py", "select.select", 1),
        ("remat_solvers/running/parallel.py", "wait", 1),
        ("remat_offload/engine/accumulation.py", "added.wait", 1),
    ],
)
def test_every_wait_has_a_limit(path: str, method: str, places: int) -> None:
    """What is waited for is looked after, or given up after a time, which is a constant or at most one."""
    calls = [call for call in called(sources()[path]) if ast.unparse(call.func) == method]
    assert places == len(calls)
    for call in calls:
        named = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        limit = named[0] if named else call.args[-1]
        assert re.fullmatch(r"[A-Z_]+_S|min\(\w+, [A-Z_]+_S\)", ast.unparse(limit))
