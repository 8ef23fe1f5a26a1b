"""The examples without a trainer run with small sizes, and print what their docstrings promise."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from tests.helpers.models import import_torchvision

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TRAINERS = {"plain", "accelerated", "trainer", "offloaded", "with_lightning", "sft"}
"""Run by `test_examples`."""
OWN_ENVIRONMENTS = {"with_axolotl", "with_llamafactory"}
"""Run by `tests/integrations/test_own_environments`."""
UNDER_TORCHRUN = {"ddp", "fsdp2"}
"""Run by `tests/distributed`."""
CASES = {
    "quickstart": ((), ("losses are equal in every bit: True",)),
    "own_solver": (("tests/data/graphs/vgg16.json", "--others", "greedy"), ("segments: +", "greedy: +")),
    "diffusion": (
        ("--steps", "2", "--batch", "8", "--time-limit", "2"),
        ("within a budget of", "drew an image"),
    ),
    "offmate": (("--steps", "2"), ("losses are equal in every bit: True; weights: True",)),
    "huggingface": (("--steps", "2"), ("within a budget of", "saved and loaded: GPT2LMHeadModel")),
    "imagenet": (
        *(("--arch", "squeezenet1_1", "--batch-size", "8", "--steps", "2", "--epochs", "1"),),
        ("epoch 0: accuracy", "within a budget of"),
    ),
}
LONG = {"huggingface"}


def run(name: str, *arguments: str) -> str:
    """What an example prints that runs in this process, as if Python ran it."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.chdir(ROOT)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize(
    "notebook", sorted((EXAMPLES / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_the_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, from the first to the last, without a window for figures; one that imports pyplot draws."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    matplotlib.use("Agg")
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    assert bool(pyplot.get_fignums()) == ("plt" in names)
    pyplot.close("all")


def test_every_example_has_a_case() -> None:
    """Here, under torchrun, or in the tests of a trainer."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CASES} | UNDER_TORCHRUN
    scripts = {path.stem for path in (EXAMPLES / "trainers").glob("*.py") if "__main__" in path.read_text()}
    assert scripts == TRAINERS | OWN_ENVIRONMENTS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in CASES]
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")  # on a machine without a GPU
def test_the_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends, and says that the results are the original's or the plan is within its budget."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    if name in {"huggingface", "imagenet"}:
        import_torchvision()
    arguments, expected = CASES[name]
    said = run(name, *arguments) + caplog.text  # trainers log the plan
    assert [] == [part for part in expected if part not in said], said
