"""The demo's comparison on small models: it reports every violated promise."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from remat_facade import BadConfig
from remat_facade.cli.app import main
from remat_facade.demo import run
from remat_facade.demo.run import Demo, run_demo
from remat_facade.demo.tasks import Task, get_task, gpt2, resnet
from remat_graph import load_graph, load_plan

STEPS = 4
FILES = {"memory.png", "report.html", "plan.json", "graph.json"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a new cache folder."""
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))


def small_gpt2() -> Task:
    """Two layers."""
    return gpt2(layers=2, width=32, batch=4, length=64)


def small_resnet() -> Task:
    """Small images, yet large enough that activations outweigh the gradients."""
    return resnet(batch=8, size=64)


@pytest.mark.parametrize("make", [small_gpt2, pytest.param(small_resnet, marks=pytest.mark.full)])
def test_both_trainings_are_the_same_within_the_budget(make: Callable[[], Task], tmp_path: Path) -> None:
    """Losses and weights are bit-identical, both peaks within the budget, all steps planned, files exist."""
    demo = run_demo(make(), "60%", steps=STEPS, out=tmp_path / "out")
    assert demo.problems == ()
    assert demo.unplanned.losses == demo.planned.losses
    assert STEPS == len(demo.planned.losses) == len(set(demo.planned.losses))
    assert demo.planned.allocator_nbytes <= demo.plan.budget_nbytes < demo.plan.noremat_peak_nbytes
    assert demo.plan.recomputed_s > 0
    assert (
        FILES == {path.name for path in demo.written} == {path.name for path in (tmp_path / "out").iterdir()}
    )
    load_plan(tmp_path / "out" / "plan.json", load_graph(tmp_path / "out" / "graph.json"))


def test_the_demo_drops_outputs_if_it_says_so(tmp_path: Path) -> None:
    """Its steps hold the loss alone, so no warning is given and the smaller budget holds."""
    demo = run_demo(small_gpt2(), "60%", steps=STEPS, out=tmp_path / "out", outputs="dropped")
    assert demo.problems == ()
    assert demo.graph.dropped


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A comparison without problems."""
    return run_demo(small_gpt2(), "100%", steps=STEPS, out=tmp_path_factory.mktemp("demo"))


def test_a_difference_is_said(demo: Demo) -> None:
    """Another loss, more memory than the budget, other weights, a step without a plan: each is a problem."""
    assert demo.problems == ()
    planned, budget = demo.planned, demo.plan.budget_nbytes
    for broken, said in (
        (attrs.evolve(demo, same_weights=False), "weights differ"),
        (attrs.evolve(demo, fell_through=2), "2 steps ran without a plan"),
    ):
        assert [said in problem for problem in broken.problems] == [True]
    for name, value, said in (
        ("losses", [*planned.losses[:2], 0.0, *planned.losses[3:]], "from step 3 on"),
        ("meter_nbytes", budget + 1, "1 above the budget"),
        ("allocator_nbytes", budget + 5, "5 above the budget"),
    ):
        kept = getattr(planned, name)
        setattr(planned, name, value)
        try:
            (problem,) = demo.problems
            assert said in problem
            tables = [cell for table in demo.tables for row in table.rows for cell in row]
            assert ("NO" in tables) == (name == "losses")
        finally:
            setattr(planned, name, kept)


def test_a_demo_is_one_object(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--json`: both runs, whether they are the same, and the files."""
    path = tmp_path / "plan.json"
    monkeypatch.setattr(run, "run_demo", lambda *_, **__: attrs.evolve(demo, written=(path,)))
    assert main(["demo", "--json", "--out", str(tmp_path / "out")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["holds"], shown["problems"], shown["wrote"]) == (True, [], [str(path)])
    assert shown["unplanned"]["losses"] == shown["planned"]["losses"]
    assert shown["planned"]["allocator_nbytes"] <= shown["plan"]["budget_nbytes"]


def test_an_infeasible_demo_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong budget gives one line."""
    assert main(["demo", "--budget", "2 bananas", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "bananas" in err


def test_an_unknown_task_is_named() -> None:
    """The error lists the known tasks."""
    with pytest.raises(BadConfig, match="gpt2 or resnet"):
        get_task("bert")
