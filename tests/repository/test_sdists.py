"""The tests of each package run from its own sdist: nothing of them is left behind in the repository."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("graph", "solvers", "executor", "offload", "facade")
QUICK = {  # what is run here; all are collected, and all run in the test marked `full`
    "graph": ["test_corpus_files.py", "test_units.py"],
    "solvers": ["test_registry.py"],
    "executor": ["test_rank_errors.py", "test_eager_runtime.py"],
    "offload": ["test_chunking.py"],
    "facade": ["test_report.py"],
}

COLLECT_ALL_RUN_SOME = """
import sys
import pytest
import {package} as package

class Some:
    def pytest_collection_modifyitems(self, config, items):
        self.found = sorted({{item.path.name for item in items}})
        some = [item for item in items if item.path.name in {quick}]
        items[:] = [item for item in some if not {{"full", "cuda"}} & {{*item.keywords}}]
        assert {{item.path.name for item in items}} == {{*{quick}}}

some = Some()
status = pytest.main(["-q", "-m", "", "tests"], [some])
print(package.__file__)
print(*some.found)
sys.exit(status)
"""
"""One process, since most of the time is in imports."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each package with what its sdist holds."""
    built, folders = tmp_path_factory.mktemp("sdists"), {}
    for name in PACKAGES:
        words = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(built / name)]
        done = subprocess.run(words, cwd=ROOT / "packages" / name, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (sdist,) = (built / name).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(built, filter="data")
        folders[name] = built / sdist.name.removesuffix(".tar.gz")
    return folders


def run(folders: dict[str, Path], name: str, *words: str) -> str:
    """Run Python in an unpacked sdist, with its sources and those of the other sdists alone."""
    sources = [folders[name], *(folders[other] for other in PACKAGES if other != name)]
    path = os.pathsep.join(str(folder / "src") for folder in sources)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folders[name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_tests_are_collected_and_some_run(name: str, unpacked: dict[str, Path]) -> None:
    """As many as the repository has, of the sdist's own sources."""
    files = {path.name for path in (ROOT / "packages" / name / "tests").glob("test_*.py")}
    script = COLLECT_ALL_RUN_SOME.format(package=f"remat_{name}", quick=QUICK[name])
    where, found = run(unpacked, name, "-c", script).splitlines()[-2:]
    assert where.startswith(str(unpacked[name]))
    assert files == set(found.split())


@pytest.mark.full
@pytest.mark.parametrize("name", PACKAGES)
def test_all_tests_run(name: str, unpacked: dict[str, Path]) -> None:
    """All of the CI cut."""
    run(unpacked, name, "-m", "pytest", "-q")
