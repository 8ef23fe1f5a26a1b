"""Solvers of other packages: found by name, run by the portfolio, and harmless when they fail."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from .corpus import GRAPHS

SOLVERS = '''
import time
from remat_solvers import judge

class Saves:
    """Returns greedy's result under another name."""
    name = "saves"
    def solve(self, problem, deadline=None):
        from remat_solvers.methods.greedy import Greedy
        return Greedy().solve(problem, deadline)

class Crashes:
    name = "crashes"
    def solve(self, problem, deadline=None):
        raise RuntimeError("out of order")

class Hangs:
    name = "hangs"
    def solve(self, problem, deadline=None):
        while True:
            time.sleep(1)

class Lies:
    """Claims the unplanned order, which does not fit."""
    name = "lies"
    def solve(self, problem, deadline=None):
        import types
        return types.SimpleNamespace(order=tuple(range(len(problem.graph.ops))))

class Babbles:
    name = "babbles"
    def solve(self, problem, deadline=None):
        import types
        return types.SimpleNamespace(order=(10**9,))
'''

PROGRAM = """
import json, sys, warnings
from remat_graph.serialization.graphs import load_graph
from remat_graph import noremat_peak_nbytes
from remat_solvers import Problem, get_solver, solver_names
from remat_solvers.portfolio import isolated
isolated.START_S = float(sys.argv[3])
graph = load_graph(sys.argv[1])
problem = Problem(graph, int(0.7 * noremat_peak_nbytes(graph)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    guests = tuple(sys.argv[2].split(","))
    solution = get_solver("auto", moves=2000, guests=guests, guest_seconds=1.0, gap=0.0).solve(problem)
alone = get_solver(guests[0]).solve(problem).overhead if guests[0] == "saves" else None
print(json.dumps({
    "names": list(solver_names()), "fits": solution.peak_nbytes <= problem.budget_nbytes,
    "overhead": solution.overhead, "alone": alone, "warnings": [str(w.message) for w in caught],
}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with solvers, as an installer would leave it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "strange_solvers.py").write_text(textwrap.dedent(SOLVERS))
    info = folder / "strange_solvers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-solvers\nVersion: 1.0\n")
    points = "\n".join(
        f"{name} = strange_solvers:{name.capitalize()}"
        for name in ("saves", "crashes", "hangs", "lies", "babbles")
    )
    (info / "entry_points.txt").write_text(f"[remat.solvers]\n{points}\n")
    return folder


def run(package: Path, guests: str, start_s: float = 20.0) -> dict[str, Any]:
    """Solve vgg16 at 70 % with guests in a fresh process that has the package."""
    import json
    import os

    graph = GRAPHS / "vgg16.json"
    path = os.pathsep.join([str(package), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(graph), guests, str(start_s)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_a_solver_of_another_package(package: Path) -> None:
    """It has a name, and the portfolio's result is no worse than its own."""
    found = run(package, "saves")
    assert "saves" in found["names"]
    assert found["warnings"] == []
    assert found["fits"]
    assert found["overhead"] <= found["alone"]


@pytest.mark.parametrize(
    ("guest", "text", "start_s"),
    [
        ("crashes", "'crashes' crashed: RuntimeError: out of order", 20.0),
        ("hangs", "'hangs' did not end within", 2.0),
        ("lies", "'lies' returned a schedule above the budget", 20.0),
        ("babbles", "'babbles' returned an invalid order of ops", 20.0),
    ],
)
def test_a_solver_that_fails_is_skipped(package: Path, guest: str, text: str, start_s: float) -> None:
    """A warning names the failure, and the portfolio still returns a result."""
    found = run(package, guest, start_s)
    assert found["fits"]
    (warning,) = found["warnings"]
    assert text in warning
