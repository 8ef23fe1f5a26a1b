"""Run a benchmark in a process of its own, so that its memory and its caches are those of a first run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_child(script: str, words: list[str], cache: str, variables: dict[str, str]) -> dict[str, Any]:
    """Run ``SCRIPT --child WORDS``, which prints an object as JSON in its last line.

    Args:
        script: path of the benchmark.
        words: arguments after ``--child``.
        cache: folder of measured costs and saved plans.
        variables: environment variables of the process, in addition to those of this one.

    Returns:
        The object.

    Raises:
        SystemExit: the process failed.
    """
    environment = {**os.environ, **variables, "REMAT_CACHE_DIR": cache}
    environment.pop("REMAT_NO_ZOO", None)  # plans must be saved
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, script, "--child", *words], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"the child {' '.join(words)} failed")
    return dict(json.loads(done.stdout.splitlines()[-1]))
