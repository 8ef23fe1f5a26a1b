"""The pages on trainers: each complete script runs as it stands and reports a plan within its budget."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from remat_graph import parse_nbytes
from tests.helpers.example import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    f"{page.stem}-{number}": block
    for page in sorted(ROOT.glob("docs/trainers/*.md"))
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    if "# the one line" in block
}
EXTRA = ("lightning", "timm", "diffusers", "ignite", "fastai", "torchtitan")
"""Pages on what only the environment `integrations` has."""
LONG = {"accelerate-1", "peft-1", "transformers-1", "trl-1", "trl-2"}
"""Run by `hatch run integrations` and `hatch run test-all`; the others show the same ways in."""


def test_each_page_but_those_of_other_environments_has_a_script() -> None:
    pages = {page.stem for page in ROOT.glob("docs/trainers/*.md")}
    assert LONG <= set(SCRIPTS)
    assert {name.partition("-")[0] for name in SCRIPTS} == pages - {"axolotl", "llamafactory"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in SCRIPTS]
)
def test_the_script_of_the_page_runs(name: str, tmp_path: Path) -> None:
    tool = name.partition("-")[0]
    if tool in EXTRA and find_spec(tool) is None:
        pytest.skip(f"{tool} is in the environment `integrations` only")
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name], encoding="utf-8")
    done = run_script(str(script), cache=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    peak, budget = re.findall(r"peak (\S+ \w+) within a budget of (\S+ \w+)", said)[-1]
    assert 0 < parse_nbytes(peak) <= parse_nbytes(budget)
