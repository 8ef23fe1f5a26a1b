"""What planning without a device costs to import: attrs and our own modules, and nothing else.

Seconds depend on the machine, so the modules are counted; an import of these takes a fraction of a second.
"""

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys
before = set(sys.modules)
import {package}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
NEEDED = {"attr", "attrs", "remat_graph"}


def import_in_new_process(package: str) -> set[str]:
    """Every module that the import loads."""
    command = [sys.executable, "-c", PROBE.format(package=package)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("package", ["remat_graph", "remat_solvers"])
def test_import_is_quick(package: str) -> None:
    """Few modules are loaded: 202 where this was written."""
    assert len(import_in_new_process(package)) < 300


@pytest.mark.parametrize("package", ["remat_graph", "remat_solvers"])
def test_import_pulls_in_no_torch(package: str) -> None:
    """Neither torch nor the tools that a solver imports when it first needs them are loaded."""
    loaded = {module.partition(".")[0] for module in import_in_new_process(package)}
    assert NEEDED | {package} == loaded - sys.stdlib_module_names
