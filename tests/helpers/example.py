"""Run an example as its reader would: ``python -m tests.helpers.example SCRIPT [ARGUMENT...]``.

The tests' torchvision has none of its operators, which other packages need when they import it, and their
torchaudio may lack its extension, and torchtitan the package triton.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.helpers.models.imports import import_torchaudio, import_torchtitan, import_torchvision

ROOT = Path(__file__).resolve().parents[2]


def run(example: str, *arguments: str, cache: Path) -> tuple[list[str], str]:
    """The losses that an example for trainers prints, and all that it says."""
    done = run_script(f"examples/trainers/{example}.py", *arguments, cache=cache)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")], done.stdout + done.stderr


def run_script(script: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, on one thread, as all tests are: see conftest.py."""
    settings = {"REMAT_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}
    settings |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}  # nothing leaves the machine
    return subprocess.run(
        [sys.executable, "-m", "tests.helpers.example", script, *arguments],
        cwd=ROOT,
        env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


if __name__ == "__main__":
    if find_spec("torchvision") is not None:
        import_torchvision()
    if find_spec("torchaudio") is not None:
        import_torchaudio()
    import_torchtitan()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as if Python ran it
    runpy.run_path(sys.argv[0], run_name="__main__")
