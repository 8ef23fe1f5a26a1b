"""What planning without a device costs to import: under a second, and no torch."""

import json
import statistics
import subprocess
import sys

import pytest

PROBE = """
import json, sys, time
start = time.perf_counter()
import {package}
print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))
"""


def import_in_new_process(package: str) -> tuple[float, set[str]]:
    """Seconds that the import takes, and every module it loads."""
    command = [sys.executable, "-c", PROBE.format(package=package)]
    seconds, modules = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seconds, set(modules)


@pytest.mark.parametrize("package", ["remat_graph", "remat_solvers"])
def test_import_is_quick(package: str) -> None:
    """The median of three imports, each in a process of its own, stays under a second."""
    runs = [import_in_new_process(package)[0] for _ in range(3)]
    assert statistics.median(runs) < 1.0, runs


@pytest.mark.parametrize("package", ["remat_graph", "remat_solvers"])
def test_import_pulls_in_no_torch(package: str) -> None:
    """Neither torch nor the tools that a solver imports when it first needs them are loaded."""
    _, modules = import_in_new_process(package)
    assert set() == modules & {"torch", "cvxpy", "numba", "highspy"}
