"""Each package installs and imports from its built wheel, with what it declares and nothing else."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"  # named in the same call, so that pip does not pick another build
NEEDS_TORCH = {"graph": False, "solvers": False, "executor": True, "offload": True, "facade": True}

# Imports every module of the package and loads every entry point; one that needs an extra says so.
PROBE = """
import importlib, importlib.metadata, importlib.resources, importlib.util, pkgutil, sys
distribution, package = sys.argv[1:]

def load(action, *args):
    try:
        action(*args)
    except ModuleNotFoundError as error:
        assert f'pip install "{distribution}[' in str(error), error

root = importlib.import_module(package)
for module in pkgutil.walk_packages(root.__path__, package + "."):
    if not module.name.endswith("__main__"):
        load(importlib.import_module, module.name)
for entry_point in importlib.metadata.distribution(distribution).entry_points:
    load(entry_point.load)
assert importlib.metadata.version(distribution) == root.__version__
assert (importlib.resources.files(package) / "py.typed").is_file()
print(importlib.util.find_spec("torch") is not None)
"""


def run(*command: str | Path) -> str:
    """Run a command away from the sources; its output, or a failure that shows it."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the five wheels."""
    folder = tmp_path_factory.mktemp("dist")
    packages = [ROOT / "packages" / name for name in NEEDS_TORCH]
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, *packages)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", NEEDS_TORCH)
def test_package_installs_and_imports_alone(name: str, dist: Path, tmp_path: Path) -> None:
    """A new environment with this package alone imports all of it; torch is there only if it is declared."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    wanted = [f"remat-{name}", *([TORCH] if NEEDS_TORCH[name] else [])]
    run(python, "-m", "pip", "install", "-q", "--find-links", dist, *wanted)

    run(python, "-m", "pip", "check")
    torch_is_installed = run(python, "-I", "-c", PROBE, f"remat-{name}", f"remat_{name}").strip()

    assert str(NEEDS_TORCH[name]) == torch_is_installed
