"""What is compiled before a clock starts is all that searches run."""

from __future__ import annotations

import subprocess
import sys

from remat_graph import verify
from remat_solvers.switching.compiled import _step

SCRIPT = """
import importlib, pkgutil
import remat_solvers.kernels as kernels
from remat_graph import noremat_peak_nbytes
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import Problem, are_loops_compiled, compile_loops, get_solver, min_budget, solve_switches

def versions():
    names = [each.name for each in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"remat_solvers.kernels.{name}") for name in names]
    entries = {
        f"{module.__name__}.{name}": loop
        for module in modules
        for name, loop in vars(module).items()
        if hasattr(loop, "py_func") and loop.py_func.__module__ == module.__name__ and loop.stats.cache_path
    }
    return {name: len(loop.signatures) for name, loop in entries.items()}

assert set(versions().values()) == {0}
compile_loops()
assert are_loops_compiled()
before = versions()
assert len(before) > 5
for seed in range(3):
    graph = with_random_switches(random_graph(seed, 12), seed, 6)
    found = min_budget(graph)
    middle = (found.nbytes + noremat_peak_nbytes(graph)) // 2
    solve_switches(get_solver("auto", moves=200), Problem(graph, middle))
after = versions()
assert set(before.values()) == {1}, before
assert after == before, (before, after)
"""


def test_each_loop_is_compiled_once() -> None:
    """In a process of its own: for one kind of arguments, and searches bring no other."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def test_the_tiny_step_is_valid() -> None:
    """With one switch."""
    graph = _step()
    verify(graph)
    assert graph.switches == ("other.0",)
