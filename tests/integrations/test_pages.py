"""The pages on trainers: each complete script runs as it stands and reports a plan within its budget."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from remat_graph import parse_nbytes

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    page.stem: block
    for page in sorted(ROOT.glob("docs/trainers/*.md"))
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if "# the one line" in block
}
EXTRA = {"lightning": "lightning", "timm": "timm", "others": "diffusers"}
"""What only the environment `integrations` has."""


def test_each_page_but_those_without_python_has_a_script() -> None:
    pages = {page.stem for page in ROOT.glob("docs/trainers/*.md")}
    assert set(SCRIPTS) == pages - {"axolotl", "torchtitan"}


@pytest.mark.parametrize("page", SCRIPTS)
def test_the_script_of_the_page_runs(page: str, tmp_path: Path) -> None:
    if page in EXTRA and find_spec(EXTRA[page]) is None:
        pytest.skip(f"{EXTRA[page]} is in the environment `integrations` only")
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[page], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.example", str(script)],
        cwd=ROOT,
        env={**os.environ, "REMAT_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    peak, budget = re.findall(r"peak (\S+ \w+) within a budget of (\S+ \w+)", said)[-1]
    assert 0 < parse_nbytes(peak) <= parse_nbytes(budget)
