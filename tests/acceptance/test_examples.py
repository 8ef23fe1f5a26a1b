"""The examples for trainers: the same losses with the one line as without it, and a plan that is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(example: str, *arguments: str, cache: Path) -> tuple[list[str], str]:
    """The losses that an example prints, and all that it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.example", f"examples/trainers/{example}.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "REMAT_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("example", "others", "budget"),
    [
        ("plain", (), "60%"),
        ("accelerated", (), "60%"),
        ("accelerated", ("--prepared",), "60%"),
        ("trainer", (), "60%"),
        ("offloaded", (), "60%"),
        ("sft", (), "80MiB"),  # the loss's own buffer takes 63 MiB, with and without a plan
    ],
)
def test_one_line_changes_nothing_but_the_memory(
    example: str, others: tuple[str, ...], budget: str, tmp_path: Path
) -> None:
    expected, _ = run(example, cache=tmp_path)
    losses, said = run(example, *others, "--budget", budget, cache=tmp_path)
    assert len(losses) == 8
    assert losses == expected
    assert "within a budget of" in said
