"""Ways that round differently: only where they are asked for, and named op by op in the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, PlannedModule, step_graph
from remat_executor.capture.captured import Captured
from remat_executor.ways import registry
from remat_executor.ways.substitution import Change, Substitution
from remat_facade import BadConfig, Hiremate, generate_config, load_config, save_config
from remat_facade.planning.method import choose_method
from remat_facade.report.table import rounding_table
from remat_graph import ForeignPlan, Graph, Plan, Roofline, fingerprint, load_plan, save_plan, specialize
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.switches.rounding import without_rounding
from tests.helpers.planners import all_switched, save_all

aten = torch.ops.aten


def nearly_tanh(x: Tensor) -> Tensor:
    """Tanh with another last bit."""
    return torch.tanh(x) * (1 + 2**-20)


def nearly(captured: Captured) -> Iterator[Substitution]:
    """A way for each tanh; its kernel counts as nothing, so a plan with a choice takes it."""
    for node in captured.graph_module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        change = Change(node=node, kernel=nearly_tanh, reads=(node.all_input_nodes[0],), counts_as=())
        yield Substitution(family="nearly", changes=(change,), exact=False)


class EntryPoint:
    """Another package's family."""

    def load(self) -> Any:
        """As an entry point gives it."""
        return nearly


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint()])


def model(layers: int = 1) -> nn.Module:
    """Layers with a tanh each."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(8, 8), nn.Tanh())))


X = torch.linspace(-1, 1, 256).view(32, 8)


def options(tmp_path: Path) -> dict[str, Any]:
    """Of a plan that measures nothing."""
    return {"cache_dir": tmp_path, "platform": Roofline()}


def inexact(graph: Graph) -> set[str]:
    """The switches of a graph that round."""
    return {other.switch for op in graph.ops for other in op.alternatives if not other.exact}


def test_a_way_that_loses_bits_is_never_offered_without_being_asked_for(tmp_path: Path) -> None:
    """Not even if a family that is installed finds it: no graph of the default has its switch."""
    assert {"nearly.tanh", "nearly.tanh_1"} == inexact(step_graph(model(2), (X,), ways=[nearly]))
    assert not inexact(step_graph(model(), (X,)))
    assert not inexact(PlannedModule(model(), (X,), {}, save_all).graph)
    for ways in ({}, {"ways": "exact"}, {"ways": "none"}, {"config": generate_config("auto")}):
        planned = Hiremate(model(), X, "1MiB", **ways, **options(tmp_path))
        assert not inexact(planned.graph)
        assert planned.plan.rounding == ()
        assert "rounding" not in planned.plan.summary()
    asked = Hiremate(model(), X, "1MiB", ways="rounding", **options(tmp_path))
    assert inexact(asked.graph)


def test_every_family_of_the_default_is_exact_even_if_it_finds_others() -> None:
    """The default classes of families are filtered, whatever they yield."""
    assert registry.families() == tuple(map(registry.ExactOnly, (*registry.EXACT, nearly)))
    assert registry.rounding_families() == (*registry.EXACT, nearly, *registry.ROUNDING)


def test_the_plan_names_every_op_that_rounds(tmp_path: Path) -> None:
    """In its fields and its file, by layer in its summary and its table; a run differs from eager's."""
    planned = PlannedModule(model(2), (X,), {}, all_switched(), ways=[nearly])
    plan = planned.plan
    assert (("tanh", "nearly"), ("tanh_1", "nearly")) == plan.rounding
    assert "not bit-identical, within rounding: nearly (2): 1 in [1], 1 in [3]" in plan.summary()
    assert (("nearly", "[1]", "1", "tanh"), ("nearly", "[3]", "1", "tanh")) == rounding_table(plan).rows
    save_plan(plan, tmp_path / "plan.json")
    assert plan == load_plan(tmp_path / "plan.json")
    found, wanted = planned(X), model(2)(X)
    assert not torch.equal(wanted, found)
    assert torch.allclose(wanted, found, atol=1e-5)


def test_a_plan_that_rounds_is_refused_where_only_exact_ways_are_allowed(tmp_path: Path) -> None:
    """With one line that says what to do; where rounding is allowed it loads."""
    path = tmp_path / "plan.json"
    save_plan(Hiremate(model(), X, "1MiB", ways="rounding", **options(tmp_path)).plan, path)
    for ways in ("exact", "none", None):
        with pytest.raises(ForeignPlan) as caught:
            Hiremate(model(), X, "1MiB", plan=path, ways=ways, **options(tmp_path))
        said = "ways that round differently, nearly (1), and this graph has only exact ones: plan again"
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    again = Hiremate(model(), X, "1MiB", plan=path, ways="rounding", **options(tmp_path))
    assert (("tanh", "nearly"),) == again.plan.rounding


def test_an_exact_plan_serves_where_rounding_is_allowed(tmp_path: Path) -> None:
    """The ways that round come last, so its numbers of implementations stay valid."""
    path = tmp_path / "plan.json"
    exact = Hiremate(model(), X, "1MiB", **options(tmp_path))
    save_plan(exact.plan, path)
    loaded = Hiremate(model(), X, "1MiB", plan=path, ways="rounding", **options(tmp_path))
    assert loaded.plan.rounding == ()
    assert torch.equal(model()(X), loaded(X))
    assert fingerprint(exact.graph) == fingerprint(without_rounding(loaded.graph))
    assert without_rounding(exact.graph) is exact.graph


def test_the_saved_plans_of_both_classes_are_kept_apart(tmp_path: Path) -> None:
    """A second process that asks for exact ways is not served the plan that rounds."""
    for _ in range(2):
        assert Hiremate(model(), X, "1MiB", ways="rounding", **options(tmp_path)).plan.rounding
        assert not Hiremate(model(), X, "1MiB", **options(tmp_path)).plan.rounding


def test_configs_have_the_option(tmp_path: Path) -> None:
    """Written, read, overruled by the keyword, and refused if unknown."""
    config = generate_config("auto").with_(ways="rounding")
    path = save_config(config, tmp_path / "config.yaml")
    assert config == load_config(path)
    assert Hiremate(model(), X, "1MiB", config=path, **options(tmp_path)).plan.rounding
    overruled = Hiremate(model(), X, "1MiB", config=path, ways="exact", **options(tmp_path))
    assert not overruled.plan.rounding
    assert ("exact", "rounding", "none") == tuple(
        choose_method("auto", None, "griewank", 0, None, ways).ways for ways in (None, "rounding", "none")
    )
    with pytest.raises(BadConfig, match='ways: expected "exact", "rounding" or "none", got'):
        generate_config("auto").with_(ways="fast")
    with pytest.raises(BadInput, match="ways is 'fast', not one of 'exact', 'rounding', 'none'"):
        Hiremate(model(), X, "1MiB", ways="fast", **options(tmp_path))


def test_a_file_with_a_wrong_list_of_rounding_ops_is_refused() -> None:
    """As a bad file, in one line."""
    graph = step_graph(model(), (X,), ways=[nearly])
    plan = all_switched()(graph)
    data = plan_to_data(plan)
    assert plan == plan_from_data(data, graph=graph)
    for wrong in ([["tanh"]], "tanh", [["tanh", 3]], [["a", "b", "c"]]):
        with pytest.raises(Exception, match=r"rounding") as caught:
            plan_from_data({**data, "rounding": wrong})
        assert "\n" not in str(caught.value)


def test_a_switch_that_is_off_rounds_nothing() -> None:
    """The plan of the graph with a choice, all off."""
    graph = step_graph(model(2), (X,), ways=[nearly])
    plan: Plan = save_all(graph)
    assert plan.rounding == ()
    on = specialize(graph, ["nearly.tanh"])
    one = Plan.from_schedule(
        graph,
        on.restore(save_all(on.graph).schedule),
        budget_nbytes=1 << 40,
        lower_bound_s=0.0,
        solver="tester",
    )
    assert (("tanh", "nearly"),) == one.rounding
