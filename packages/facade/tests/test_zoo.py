"""Saved plans are loaded for the same step, budget and method, and for nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_facade import Hiremate, PlanNotKept
from remat_facade.planning.known_plans import SAVED
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.planning.zoo import Zoo
from remat_graph import Graph, Plan, load_graph, noremat_peak_nbytes
from remat_graph.platforms.base import with_times
from remat_graph.serialization.json_reader import write_sealed
from remat_solvers import InfeasibleBudget

from .corpus import GRAPHS


@pytest.fixture
def graph() -> Graph:
    """A training step with something to recompute."""
    return load_graph(GRAPHS / "gpt2.json")


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    """An empty folder of plans."""
    return Zoo(folder=tmp_path / "plans", times="a device")


def planner(zoo: Zoo | None, **options: Any) -> RecomputePlanner:
    """Plans quickly, at 60 %."""
    method = Method(solver=options.pop("solver", "greedy"), **options)
    return RecomputePlanner(budget="60%", method=method, zoo=zoo)


def saved(plan: Any) -> bool:
    """Whether a plan was loaded from the zoo."""
    return bool(plan.solver_stats.get(SAVED, False))


def test_a_plan_is_found_again(graph: Graph, zoo: Zoo) -> None:
    """Schedule and numbers are equal, also in a zoo of another process; names do not matter."""
    made = planner(zoo)(graph)
    found = planner(Zoo(folder=zoo.folder, times=zoo.times))(attrs.evolve(graph, name="another"))
    assert (saved(made), saved(found)) == (False, True)
    assert (made.schedule, made.peak_nbytes, made.lower_bound_s) == (
        found.schedule,
        found.peak_nbytes,
        found.lower_bound_s,
    )
    assert not saved(planner(None)(graph))


def test_the_plan_not_used_for_the_longest_makes_room(
    graph: Graph, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a plan counts as use."""
    monkeypatch.setattr("remat_facade.planning.zoo.MOST_PLANS", 2)
    plans = {name: attrs.evolve(planner(zoo), budget=name) for name in ("60%", "70%", "80%")}
    for i, name in enumerate(("60%", "70%")):
        plans[name](graph)
        for path in zoo.folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 100 + i,) * 2)
    assert saved(plans["60%"](graph))
    plans["80%"](graph)
    assert len(list(zoo.folder.iterdir())) == 2
    assert [saved(plans[name](graph)) for name in ("60%", "80%", "70%")] == [True, True, False]


@pytest.mark.parametrize(
    "change", ["budget", "solver", "parameters", "times", "graph", "sources", "conditions"]
)
def test_what_a_plan_depends_on(change: str, graph: Graph, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these keys has its own plan, and the first one is kept."""
    first = planner(zoo, solver="rotor", parameters={"slots": 50})
    first(graph)
    if change == "budget":
        other = attrs.evolve(first, budget="70%")
    elif change == "solver":
        other = planner(zoo)
    elif change == "parameters":
        other = planner(zoo, solver="rotor", parameters={"slots": 51})
    elif change == "times":
        other = attrs.evolve(first, zoo=Zoo(folder=zoo.folder, times="another device"))
    else:
        other = first
    different = graph
    if change == "graph":
        values = (attrs.evolve(graph.values[0], nbytes=graph.values[0].nbytes + 512), *graph.values[1:])
        different = attrs.evolve(graph, values=values)
    elif change == "conditions":
        different = attrs.evolve(graph, conditions=(*graph.conditions, ("autocast", "on")))
    with monkeypatch.context() as patch:
        if change == "sources":
            patch.setattr("remat_facade.planning.zoo._digest", lambda package: "edited")
        assert not saved(other(different))
        assert saved(other(different))
    assert saved(first(graph))


def test_an_edited_solver_finds_no_plan_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of the sources, because an edit does not change the version."""
    from remat_facade.planning.zoo import _digest

    package = tmp_path / "some_solvers"
    package.mkdir()
    (package / "__init__.py").write_text("version = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = _digest("some_solvers")
    assert before == _digest("some_solvers")
    (package / "__init__.py").write_text("version = 1  # edited\n")
    assert before != _digest("some_solvers")


def test_longer_limits_solve_anew(graph: Graph, zoo: Zoo) -> None:
    """A plan of a stopped search is valid for the same limit and shorter ones; a longer limit replaces it."""
    method = Method(solver="search", time_limit_s=1e-3)
    plan = planner(None, solver="greedy")(graph)
    zoo.keep(graph, plan.budget_nbytes, method, attrs.evolve(plan, deadline_hit=True))

    def found(limit_s: float | None) -> bool:
        return zoo.find(graph, plan.budget_nbytes, attrs.evolve(method, time_limit_s=limit_s)) is not None

    assert [found(limit) for limit in (1e-3, 1e-4, 1.0, None)] == [True, True, False, False]
    zoo.keep(graph, plan.budget_nbytes, method, plan)  # the clock did not cut in
    assert found(None)


def test_a_budget_that_an_error_named_works_at_once(graph: Graph, zoo: Zoo) -> None:
    """And any larger one: the schedule of the smallest peak is kept. Without it there is no time for one."""

    def within(budget_nbytes: int, zoo: Zoo | None, limit_s: float | None) -> Plan:
        method = Method(time_limit_s=limit_s)
        return RecomputePlanner(budget=budget_nbytes, method=method, zoo=zoo)(graph)

    with pytest.raises(InfeasibleBudget) as caught:
        within(1, zoo, 2.0)
    smallest_nbytes = caught.value.smallest_nbytes
    for budget_nbytes in (smallest_nbytes, smallest_nbytes + 1):
        assert within(budget_nbytes, zoo, 1e-6).peak_nbytes <= budget_nbytes
        with pytest.raises(InfeasibleBudget):
            within(budget_nbytes, None, 1e-6)


def test_a_plan_is_judged_on_the_graph_at_hand(graph: Graph, zoo: Zoo) -> None:
    """A plan is valid with other times if it is about as good, but not with workspaces above the budget."""
    first = attrs.evolve(planner(zoo), budget=int(0.7 * noremat_peak_nbytes(graph)))
    plan = first(graph)
    twice = {
        (i, k): 2 * way.time_s for i, op in enumerate(graph.ops) for k, way in enumerate(op.implementations)
    }
    slower = first(with_times(graph, twice))
    assert saved(slower)
    assert slower.time_s == pytest.approx(2 * plan.time_s)
    repeated = {op for op in plan.schedule.order if plan.schedule.order.count(op) > 1}
    dear = {(i, k): 50 * s for (i, k), s in twice.items() if i in repeated}
    plan = first(with_times(graph, twice | dear))
    assert not saved(plan)

    free = first.budget_for(graph) - plan.peak_nbytes
    ops = [
        attrs.evolve(
            op,
            implementations=tuple(
                attrs.evolve(way, workspace_nbytes=way.workspace_nbytes + free + 1)
                for way in op.implementations
            ),
        )
        for op in graph.ops
    ]
    heavier = attrs.evolve(graph, ops=tuple(ops))
    again = first(heavier)
    assert not saved(again)
    assert again.peak_nbytes <= again.budget_nbytes


@pytest.mark.filterwarnings("default::remat_facade.errors.PlanNotKept")
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": "remat-zoo"}', "\xff\xfe", '{"format": "remat-zoo", "version": 99}'],
)
def test_a_file_that_is_none_of_ours(content: str, graph: Graph, zoo: Zoo) -> None:
    """One warning, a new plan, and a valid file in its place."""
    planner(zoo)(graph)
    (file,) = zoo.folder.iterdir()
    file.write_text(content, encoding="latin-1")
    fresh = Zoo(folder=zoo.folder, times=zoo.times)
    with pytest.warns(PlanNotKept, match="planned again") as caught:
        assert not saved(planner(fresh)(graph))
    assert len(caught) == 1
    assert saved(planner(zoo)(graph))


@pytest.mark.parametrize("lie", ["key", "schedule", "fingerprint"])
def test_a_file_that_lies(lie: str, graph: Graph, zoo: Zoo) -> None:
    """A plan of another step under this name, or an invalid schedule, is not used."""
    planner(zoo)(graph)
    (file,) = zoo.folder.iterdir()
    data = json.loads(file.read_text())
    if lie == "key":
        data["key"]["budget_nbytes"] += 1
    elif lie == "schedule":
        data["plan"]["schedule"]["steps"].reverse()
    else:
        data["plan"]["fingerprint"] = "remat1:other"
    del data["sha256"]
    write_sealed(data, file)
    with pytest.warns(PlanNotKept, match=file.name):
        assert not saved(planner(zoo)(graph))


def test_a_file_that_was_edited(graph: Graph, zoo: Zoo) -> None:
    """A file that was edited, in its lower bound for example, is not used."""
    planner(zoo)(graph)
    (file,) = zoo.folder.iterdir()
    data = json.loads(file.read_text())
    data["plan"]["lower_bound_s"] = 0.0
    file.write_text(json.dumps(data))
    with pytest.warns(PlanNotKept, match="was edited or damaged"):
        assert not saved(planner(zoo)(graph))


@pytest.mark.skipif(os.name != "posix", reason="modes are posix")
def test_the_files_are_the_users_alone(graph: Graph, zoo: Zoo) -> None:
    """Files are readable by their owner only."""
    planner(zoo)(graph)
    assert [0o600] == [path.stat().st_mode & 0o777 for path in zoo.folder.iterdir()]


def test_a_folder_that_cannot_be_looked_into(graph: Graph, tmp_path: Path) -> None:
    """A file name that is too long for the system is no error."""
    planner(Zoo(folder=tmp_path / ("n" * 300) / "plans", times=""))(graph)  # a warning would be an error


def test_a_folder_that_cannot_be_written(graph: Graph, tmp_path: Path) -> None:
    """One warning says what to set, and the plan is made nevertheless."""
    (tmp_path / "plans").write_text("mine")
    zoo = Zoo(folder=tmp_path / "plans", times="")
    with pytest.warns(PlanNotKept, match="REMAT_CACHE_DIR"):
        planner(zoo)(graph)
    planner(zoo)(graph)  # a second warning would be an error
    assert (tmp_path / "plans").read_text() == "mine"


def test_where_costs_cannot_be_written_either(graph: Graph, tmp_path: Path) -> None:
    """The cost cache warns once for both."""
    (tmp_path / "file").write_text("mine")
    planner(Zoo(folder=tmp_path / "file" / "plans", times=""))(graph)  # a warning would be an error


class Net(nn.Module):
    """A few layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_an_entry_point_keeps_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are next to the costs; zoo=False and the environment disable them."""
    x = torch.randn(64, 32)

    def plan(**options: Any) -> Any:
        return Hiremate(Net(), x, "50%", cache_dir=tmp_path, **options).plan

    assert not saved(plan(zoo=False))
    assert not (tmp_path / "plans").exists()
    monkeypatch.setenv("REMAT_NO_ZOO", "1")
    assert not saved(plan())
    assert not (tmp_path / "plans").exists()
    monkeypatch.delenv("REMAT_NO_ZOO")
    made, found = plan(), plan()
    assert (saved(made), saved(found)) == (False, True)
    assert made.schedule == found.schedule
    assert not saved(plan(zoo=False))


SECOND = f"""
import sys, torch
from remat_facade import Hiremate
import remat_executor.costs.measure as measuring
from {__name__} import Net
def refuse(*_):
    raise AssertionError("measured although the cost is known")
measuring._measure_one = refuse
plan = Hiremate(Net(), torch.randn(64, 32), "50%", cache_dir=sys.argv[1]).plan
print(plan.solver_stats["saved"], plan.lower_bound_s > 0, "numba" in sys.modules)
"""


def test_a_second_process_neither_measures_nor_solves(tmp_path: Path) -> None:
    """A loaded plan needs no compiled solvers."""
    Hiremate(Net(), torch.randn(64, 32), "50%", cache_dir=tmp_path)
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})"
    words = [sys.executable, "-c", threads + SECOND, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "False"]


def test_a_saved_plan_is_not_searched_for_again_to_raise_its_bound(graph: Graph, zoo: Zoo) -> None:
    """The schedule stays; a new plan is saved with its raised bound."""
    made = planner(zoo)(graph)
    raised = planner(zoo, prove_s=2.0)(graph)
    assert saved(raised)
    assert raised.schedule == made.schedule
    assert raised.lower_bound_s > made.lower_bound_s
    other = Zoo(folder=zoo.folder / "other", times=zoo.times)
    first = planner(other, prove_s=2.0)(graph)
    assert (first.schedule, planner(other)(graph).lower_bound_s) == (made.schedule, first.lower_bound_s)
    assert first.lower_bound_s > made.lower_bound_s
