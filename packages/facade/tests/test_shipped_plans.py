"""The plans that come with the package: listed, written, and carried over to models of their structure."""

import json
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from remat_executor import estimated_graph
from remat_facade import limit_memory, planned
from remat_facade.cli.app import main
from remat_facade.planning.known_plans import carried
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.shipped_plans import SHIPPED, ShippedPlan, shipped_of, shipped_plans
from remat_facade.planning.zoo import Zoo
from remat_graph import (
    Grads,
    Graph,
    Plan,
    fingerprint,
    get_platform,
    load_graph,
    load_plan,
    save_plan,
    structure,
)
from remat_graph.testing.resized import resized

from .corpus import GRAPHS


def test_the_manifest_says_what_the_files_have() -> None:
    """Each plan has an entry and each entry a plan, with the same figures; all of them are small."""
    found = shipped_plans()
    assert {f"{each.name}.json" for each in found} | {"manifest.json"} == {p.name for p in SHIPPED.iterdir()}
    assert len(found) >= 6
    for each in found:
        plan = each.load()
        assert (plan.budget_nbytes, plan.peak_nbytes, plan.platform, plan.overhead) == (
            each.budget_nbytes,
            each.peak_nbytes,
            each.platform,
            each.overhead,
        )
        assert plan.peak_nbytes <= plan.budget_nbytes < plan.noremat_peak_nbytes == each.unplanned_nbytes
        assert 0.0 <= each.overhead - each.lower_bound_overhead < 0.2
        assert "by its data sheet, not measured" in each.platform
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 500_000


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists all, and writes the one that is named."""
    assert main(["zoo", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["plans"]
    assert [each["name"] for each in entries] == [each.name for each in shipped_plans()]
    assert main(["zoo"]) == 0
    shown = capsys.readouterr().out
    assert all(each["name"] in shown for each in entries)
    assert "nothing was measured" in " ".join(shown.split())
    name = entries[0]["name"]
    assert main(["zoo", name, "--out", str(tmp_path / "plan.json")]) == 0
    assert load_plan(tmp_path / "plan.json") == shipped_plans()[0].load()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["zoo", "alexnet"], "no plan 'alexnet': there are "), (["zoo", "--plan-out", "plan.json"], "name too")],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def shipped(folder: Path, graph: Graph, plan: Plan) -> None:
    """Make a folder as in the package, with one plan."""
    entry = ShippedPlan(
        name="one",
        model="a model",
        inputs="x",
        dtype="float32",
        loss="",
        budget="60%",
        budget_nbytes=plan.budget_nbytes,
        peak_nbytes=plan.peak_nbytes,
        unplanned_nbytes=plan.noremat_peak_nbytes,
        overhead=plan.overhead,
        lower_bound_overhead=plan.lower_bound_overhead,
        platform=plan.platform,
        structure=structure(graph),
        versions=plan.versions,
    )
    folder.mkdir()
    save_plan(plan, folder / "one.json")
    (folder / "manifest.json").write_text(json.dumps([attrs.asdict(entry)]))


def test_a_plan_is_carried_over_to_another_size(tmp_path: Path) -> None:
    """By the structure of the graph; not for steps that find their gradients present."""
    graph = load_graph(GRAPHS / "gpt2.json")
    other = resized(graph, 3)
    assert fingerprint(other) != fingerprint(graph)
    method = Method(solver="greedy")
    shipped(tmp_path / "shipped", graph, RecomputePlanner(budget="60%", method=method)(graph))
    zoo = Zoo(folder=tmp_path / "plans", times="a device", shipped=tmp_path / "shipped")
    planner = RecomputePlanner(budget="60%", method=Method(time_limit_s=5.0), zoo=zoo, carries_saved=True)
    assert carried(planner(other))
    present = planner.for_grads(Grads.PRESENT)
    assert [1, 0] == [len(zoo.of_step(other, each.saved_as(other))) for each in (planner, present)]
    assert shipped_of("no such structure", tmp_path / "shipped") == []


class WithLoss(nn.Module):
    """A classifier as the script that makes the plans has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return F.cross_entropy(self.model(images), target)


def test_a_limited_model_has_the_structure_of_its_estimate(tmp_path: Path) -> None:
    """A plan that was made from shapes alone is for the graph that `limit_memory` captures."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
        )

    with torch.device("meta"):
        images, target = torch.randn(16, 3, 8, 8), torch.zeros(16, dtype=torch.int64)
        estimated = estimated_graph(
            WithLoss(model()), (images,), {"target": target}, get_platform("v100"), device="cpu"
        )
    planned_model = model()
    limit_memory(planned_model, "100%", loss=F.cross_entropy, cache_dir=tmp_path, zoo=False)
    planned_model(torch.randn(4, 3, 8, 8), target=torch.zeros(4).long()).backward()
    found = planned(planned_model)
    assert found is not None
    assert structure(estimated) == structure(found.graph)
