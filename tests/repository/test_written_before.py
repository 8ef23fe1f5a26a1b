"""Files that the code before the reorganisation wrote (`tests/data/written_before/README.md`) still serve."""

import csv
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import yaml

from remat_executor import step_graph
from remat_executor.costs.cache import CostCache
from remat_executor.translation import translate
from remat_facade import Hiremate, Offmate, load_config, save_config
from remat_facade.cli.app import main
from remat_facade.config.types import config_types
from remat_facade.planning.known_plans import SAVED, SOLVING_S
from remat_graph import (
    Graph,
    Links,
    OpCost,
    Plan,
    Roofline,
    fingerprint,
    load_graph,
    load_order,
    load_plan,
    load_platform,
    noremat_peak_nbytes,
    save_graph,
    save_plan,
    save_platform,
)
from remat_graph.serialization.graphs import graph_to_data
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.serialization.schedules import schedule_from_data, schedule_to_data
from remat_solvers.offload.solver import Offload
from remat_solvers.portfolio.auto import Auto
from tests.data.written_before import models

FOLDER = Path(__file__).parents[1] / "data" / "written_before"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
GRAPHS = ["graphs/captured.json", "graphs/corpus.json", "graphs/every_key.json", "graphs/training.json"]
PLANS = ["plans/on_host.json", "plans/links.json", "command/solve_plan.json", "command/plan_plan.json"]
GRAPH_OF = {
    "command/solve_plan.json": "graphs/captured.json",
    "command/plan_plan.json": "command/plan_graph.json",
}
PLATFORM = Roofline(**models.RATES)


def read(name: str) -> Any:
    """The JSON of a file."""
    return json.loads((FOLDER / name).read_text())


def digest(text: str) -> str:
    """A hash as `write.py` takes it."""
    return hashlib.sha256(text.encode()).hexdigest()


def figures_of_graph(graph: Graph) -> dict[str, Any]:
    """What `write.py` wrote of a graph."""
    return {
        "fingerprint": fingerprint(graph),
        "name": graph.name,
        "values": len(graph.values),
        "ops": len(graph.ops),
        "updates": len(graph.updates),
        "nbytes": sum(value.nbytes for value in graph.values),
        "time_s": graph.time_s,
        "conditions": [list(pair) for pair in graph.conditions],
        "rounding_nbytes": graph.rounding_nbytes,
        "noremat_peak_nbytes": None if graph.updates else noremat_peak_nbytes(graph),
    }


def bandwidths(links: Links) -> dict[str, Any]:
    """What links were before the time to start a copy was added, which files without it leave at 0."""
    found = attrs.asdict(links)
    assert found.pop("start_s") == 0.0
    return found


def figures_of_plan(plan: Plan) -> dict[str, Any]:
    """What `write.py` wrote of a plan."""
    names = (
        "fingerprint graph_name budget_nbytes peak_nbytes live_peak_nbytes host_peak_nbytes "
        "noremat_peak_nbytes gradient_nbytes time_s noremat_time_s recomputed_s lower_bound_s overhead "
        "solver platform deadline_hit periods"
    )
    return {name: getattr(plan, name) for name in names.split()} | {
        "on_host": list(plan.on_host),
        "stats": sorted(plan.solver_stats),
        "links": None if plan.links is None else bandwidths(plan.links),
        "steps": len(plan.schedule.steps),
        "order_sha256": digest(repr(tuple(plan.schedule.order))),
        "steps_sha256": digest(json.dumps(schedule_to_data(plan.schedule))),
    }


def test_every_file_is_looked_at() -> None:
    """A file of another kind, added later, needs a test here."""
    kinds = {"graphs", "plans", "platforms", "configs", "cache", "command"}
    others = {"README.md", "write.py", "models.py", "expected.json", "schedule.json", "checkpoint.pt"}
    assert kinds | others == {path.name for path in FOLDER.iterdir() if path.name != "__pycache__"}
    named = {name for name in EXPECTED if not name.startswith("cache/")}
    configs = {f"configs/{path.name}" for path in (FOLDER / "configs").iterdir()}
    platforms = {f"platforms/{path.name}" for path in (FOLDER / "platforms").iterdir()}
    assert named == {*GRAPHS, *PLANS, "command/plan_graph.json", *configs, *platforms}


@pytest.mark.parametrize("name", [*GRAPHS, "command/plan_graph.json"])
def test_graphs(name: str, tmp_path: Path) -> None:
    """The same figures, and the same JSON when it is written again."""
    graph = load_graph(FOLDER / name)
    assert EXPECTED[name] == figures_of_graph(graph)
    if name != "graphs/corpus.json":
        save_graph(graph, tmp_path / "graph.json")
        assert (FOLDER / name).read_text() == (tmp_path / "graph.json").read_text()
    save_graph(graph, tmp_path / "again.json")
    assert EXPECTED[name] == figures_of_graph(load_graph(tmp_path / "again.json"))


def test_what_the_keys_of_a_graph_mean() -> None:
    """Each key of the format lands in its field."""
    graph = load_graph(FOLDER / "graphs" / "every_key.json")
    weight, state, buffer = graph.values[1], graph.values[2], graph.values[10]
    assert ("device", "weights", "param", False) == (
        weight.placement,
        weight.chunk_of,
        weight.role,
        weight.external,
    )
    assert ("host", 1, "optimizer_state") == (state.placement, state.of, state.role)
    assert (9, True, "buffer") == (buffer.replaces, buffer.external, buffer.role)
    draw, drop, relu = graph.ops[:3]
    assert (None, 1, "drop(10)", False) == (draw.rerun, drop.rerun, drop.key, drop.backward)
    assert (32, 2e-6) == (drop.first.workspace_nbytes, drop.first.time_s)
    assert 3e-6 == drop.implementations[1].time_s
    assert (((5, 4),), (4,), (5,)) == (relu.first.reuses, relu.first.inputs, relu.first.outputs)
    assert graph.ops[-1].backward
    (update,) = graph.updates
    assert (1, 8, (2,)) == (update.param, update.grad, update.states)
    assert (1e-6, 1e-5, 16) == (update.device_time_s, update.cpu_time_s, update.workspace_nbytes)


def test_a_schedule_with_every_step() -> None:
    """The same steps, boundary and end."""
    data = read("schedule.json")
    schedule = schedule_from_data(data, graph=load_graph(FOLDER / "graphs" / "every_key.json"))
    assert data == schedule_to_data(schedule)
    assert (13, 9, 11) == (len(schedule.steps), schedule.boundary, schedule.end)


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, tmp_path: Path) -> None:
    """The same figures, and the same JSON when it is written again."""
    plan = load_plan(FOLDER / name)
    assert EXPECTED[name] == figures_of_plan(plan)
    save_plan(plan, tmp_path / "plan.json")
    assert (FOLDER / name).read_text() == (tmp_path / "plan.json").read_text()
    assert plan.versions["torch" if name != "command/solve_plan.json" else "remat-graph"]


@pytest.mark.parametrize("name", ["plans/on_host.json", *GRAPH_OF])
def test_plans_on_their_graphs(name: str) -> None:
    """The referee gives the figures that it gave."""
    graph = load_graph(FOLDER / GRAPH_OF.get(name, "graphs/training.json"))
    assert EXPECTED[name] == figures_of_plan(load_plan(FOLDER / name, graph))


@pytest.mark.parametrize("name", ["platforms/plain.json", "platforms/links.json"])
def test_platforms(name: str, tmp_path: Path) -> None:
    """The same times, measured and fitted, and the same JSON when it is written again."""
    platform = load_platform(FOLDER / name)
    probe = OpCost(flops=5e8, read_nbytes=1 << 20, written_nbytes=1 << 20, key="aten.mm(c)")
    keys = ("aten.mm(a)", "again: aten.add(b)")
    found = {
        "name": platform.name,
        "rates": list(platform.rates),
        "known_s": [platform.time_s(platform.measurements[key].cost) for key in keys],
        "fitted_s": platform.time_s(probe),
        "keys": sorted(platform.measurements),
        "links": None if platform.links is None else bandwidths(platform.links),
    }
    assert EXPECTED[name] == found
    assert ("bf16", "") == tuple(platform.measurements[key].cost.arithmetic for key in keys)
    save_platform(platform, tmp_path / "platform.json")
    assert (FOLDER / name).read_text() == (tmp_path / "platform.json").read_text()


LATER_TYPES = {"monet"}  # of configs, of which nobody has a file from before
# And what they are in a file that lacks them.
LATER_FIELDS = {"ways": "exact", "outputs": "kept", "gradients": "auto", "prove_s": 0.0}
TYPES_THEN = [type for type in config_types() if type not in LATER_TYPES]


@pytest.mark.parametrize("kind", ["default", "changed"])
@pytest.mark.parametrize("type", TYPES_THEN)
def test_configs(type: str, kind: str, tmp_path: Path) -> None:
    """Every field as it was, later ones by their defaults, and the same YAML when it is written again."""
    path = FOLDER / "configs" / f"{type}_{kind}.yaml"
    config = load_config(path)
    own = {field.name: getattr(config, field.name) for field in attrs.fields(config.__class__)}
    assert type == config.type
    later = {name: value for name, value in LATER_FIELDS.items() if name in own}
    assert EXPECTED[f"configs/{path.name}"] | later == json.loads(json.dumps(own))
    save_config(config, tmp_path / "config.yaml")
    assert yaml.safe_load(path.read_text()) | later == yaml.safe_load((tmp_path / "config.yaml").read_text())


def test_every_type_of_config_was_written() -> None:
    """Two files for each type."""
    names = {f"{type}_{kind}.yaml" for type in TYPES_THEN for kind in ("default", "changed")}
    assert names == {path.name for path in (FOLDER / "configs").iterdir()}


def test_what_the_command_wrote() -> None:
    """An order, a config and a table of a sweep; its graph and plans are above."""
    graph = load_graph(FOLDER / "graphs" / "captured.json")
    order = load_order(FOLDER / "command" / "solve_order.json", graph)
    assert EXPECTED["command/solve_plan.json"]["order_sha256"] == digest(repr(order))
    assert load_config(FOLDER / "configs" / "offmate_default.yaml") == load_config(
        FOLDER / "command" / "config.yaml"
    )


def test_the_command_writes_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same order, plan and columns, from the same graph; no figure that the clock gives."""
    graph = str(FOLDER / "graphs" / "captured.json")
    out = {name: tmp_path / name for name in ("plan.json", "order.json", "sweep.csv")}
    solve = ["solve", graph, "--budget", "70%", "--solver", "greedy"]
    assert 0 == main([*solve, "--plan-out", str(out["plan.json"]), "--order-out", str(out["order.json"])]), (
        capsys.readouterr()
    )
    assert read("command/solve_order.json") == json.loads(out["order.json"].read_text())
    before, now = read("command/solve_plan.json"), json.loads(out["plan.json"].read_text())
    for plan in (before, now):
        del plan["solver_stats"]["planning_s"], plan["versions"]
    assert before == now
    sweep = ["sweep", graph, "--budgets", "75%,100%", "--solvers", "greedy", "--csv", str(out["sweep.csv"])]
    assert 0 == main(sweep), capsys.readouterr()
    tables = []
    for path in (FOLDER / "command" / "sweep.csv", out["sweep.csv"]):
        with path.open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
    for row, earlier in zip(*reversed(tables), strict=True):
        del row["wall_s"], earlier["wall_s"]
        bound, least = (float(each.pop("lower_bound_overhead")) for each in (row, earlier))
        assert row == earlier
        assert least - 1e-9 <= bound <= float(row["overhead"])  # a better bound may come


# What follows captures the model of `models.py` again, which gives the same graph with the same torch alone.
same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != "2.13.0", reason="another torch may capture other operators"
)


def captured(folder: Path, autocast: bool = False) -> Graph:
    """The model's step with times of the platform."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return step_graph(models.make_model(), (), models.make_batch(), platform=PLATFORM, cache_dir=folder)


LATER = (torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default)


@pytest.fixture
def forms_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without direct writes, and the in-place forms that came later and that the model's graph has."""
    of_now = translate._Translator.reusable

    def of_then(translator: Any, node: Any, outputs: tuple[int, ...]) -> Any:
        return {} if node.target in LATER else of_now(translator, node, outputs)

    monkeypatch.setattr(translate._Translator, "reusable", of_then)
    monkeypatch.setattr(translate, "direct_writes", lambda *_: {})


def comparable(data: Any) -> dict[str, Any]:
    """The data of a graph's file without what no saved plan is looked for by.

    Names of layers are later, and workspaces are measured: they depend on the processor.
    """
    found: dict[str, Any] = json.loads(json.dumps(data))
    for op in found["ops"]:
        op.pop("layer", None)
        for run in op["implementations"]:
            run.pop("workspace_nbytes", None)
    return found


@same_torch
def test_later_forms_are_all_that_a_capture_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was saved for a graph without them is not found, and the step is planned again.

    So is the step of a model with batch norms: now they count their batches in place.
    """
    assert len(captured(tmp_path, True).ops) < len(read("graphs/captured.json")["ops"])
    monkeypatch.setattr(translate, "direct_writes", lambda *_: {})
    before = comparable(read("graphs/captured.json"))
    now = comparable(graph_to_data(captured(tmp_path, True)))
    changed = [i for i, pair in enumerate(zip(before["ops"], now["ops"], strict=True)) if pair[0] != pair[1]]
    assert [now["ops"][i]["target"] for i in changed] == [str(target) for target in LATER]
    for i in changed:
        assert now["ops"][i]["implementations"][0].pop("reuses")
    assert before == now


@same_torch
@pytest.mark.usefixtures("forms_of_then")
def test_a_capture_gives_the_graph_that_it_gave(tmp_path: Path) -> None:
    """Values, ops, keys, conditions, times: a saved plan is looked for by all of it."""
    before = comparable(read("graphs/captured.json"))
    now = comparable(graph_to_data(captured(tmp_path, autocast=True)))
    assert EXPECTED["graphs/captured.json"]["fingerprint"] == fingerprint(captured(tmp_path, autocast=True))
    assert before == now


@same_torch
def test_measured_costs_are_found(tmp_path: Path) -> None:
    """Every op's cost is in the file, under the key that it has today, and the file under its name."""
    (file,) = (FOLDER / "cache").glob("costs-*.json")
    cache = CostCache(folder=tmp_path)
    assert file.name.split("-")[:3] == cache.path.name.split("-")[:3] == ["costs", "v2", "cpu"]
    assert file.stem.split("-")[-2] == cache.path.stem.split("-")[-2] == "1threads"
    shutil.copy(file, cache.path)
    recorded: dict[str, list[Any]] = EXPECTED[f"cache/{file.name}"]["costs"]
    found = cache.get(recorded)
    assert recorded == {key: list(attrs.astuple(cost)[:3]) for key, cost in found.items()}
    assert {0.0} == {cost.issue_s for cost in found.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_graph(models.make_model(), (), models.make_batch(), cache_dir=tmp_path)
    assert sorted(recorded) == sorted(json.loads(cache.path.read_text())["costs"])  # none was added
    assert file.read_text() == cache.path.read_text()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder with the plans of the old code, and solvers that must not run.

    The key of a saved plan has a hash of the sources of the solvers, so a user's model is planned again after
    every change of a solver. Here `_sources` returns what the old code recorded, so that a plan is found if
    and only if every other part of its key and the name of its file are unchanged.
    """
    shutil.copytree(FOLDER / "cache" / "plans", tmp_path / "plans")
    keys = [json.loads(path.read_text())["key"] for path in (tmp_path / "plans").iterdir()]
    sources = {key["solver"]: key["sources"] for key in keys}
    monkeypatch.setattr("remat_facade.planning.zoo._sources", lambda solver: sources[solver])

    def refuse(*_: Any) -> Any:
        pytest.fail("a plan is made although there is one")

    for solver in (Auto, Offload):
        monkeypatch.setattr(solver, "solve", refuse)
    yield tmp_path
    assert len(keys) == len(list((tmp_path / "plans").iterdir()))  # no plan was kept under another key


def check_found(plan: Plan, name: str) -> None:
    """A plan is the saved one, with its notes."""
    assert plan.solver_stats[SAVED] is True
    expected = dict(EXPECTED[f"cache/{name}"])
    notes = expected.pop("notes")
    found = figures_of_plan(plan) | {"stats": sorted(set(plan.solver_stats) - {SAVED, SOLVING_S})}
    for times in ("time_s", "lower_bound_s"):  # of the optimizer, measured here
        if name == "Offmate":
            del expected[times], found[times]
    assert expected == found
    if name == "Offmate":
        assert notes == list(plan.notes)


@same_torch
@pytest.mark.usefixtures("forms_of_then")
def test_the_plan_of_a_hiremate_is_found(cache: Path) -> None:
    """By its graph, budget, solver and platform; nothing is solved."""
    ours = Hiremate(
        models.make_model(), models.make_batch(), models.BUDGET, platform=PLATFORM, cache_dir=cache
    )
    check_found(ours.plan, "Hiremate")


@same_torch
@pytest.mark.usefixtures("forms_of_then")
def test_the_plan_of_an_offmate_is_found(cache: Path) -> None:
    """The same, its host budget and optimizer too; then a checkpoint of before is loaded and trained on."""
    model = models.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = Offmate(
        model,
        models.make_batch(),
        models.TRAINING_BUDGET,
        links=Links(**models.LINKS),
        host_budget=models.HOST_BUDGET,
        optimizer=optimizer,
        platform=PLATFORM,
        cache_dir=cache,
    )
    check_found(ours.plan, "Offmate")
    checkpoint = torch.load(FOLDER / "checkpoint.pt", weights_only=True)
    ours.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert list(checkpoint["model"]) == list(ours.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(checkpoint["model"][name], tensor), name
    states = optimizer.state_dict()
    assert checkpoint["optimizer"]["param_groups"] == states["param_groups"]
    for index, state in checkpoint["optimizer"]["state"].items():
        for key, tensor in state.items():
            assert torch.equal(tensor, states["state"][index][key]), (index, key)
    ours(**models.make_batch()).backward()
    optimizer.step()
    assert torch.isfinite(ours.state_dict()["head.weight"]).all()
    ours.close()


@pytest.mark.parametrize("name", ["Hiremate", "Offmate"])
def test_saved_plans_are_read_whole(name: str) -> None:
    """A saved plan is the same JSON when it is written again; the fixture `cache` covers its key."""
    solver = {"Hiremate": "auto", "Offmate": "offload"}[name]
    (data,) = [
        data
        for path in (FOLDER / "cache" / "plans").iterdir()
        if (data := json.loads(path.read_text()))["key"]["solver"] == solver
    ]
    assert data["plan"] == json.loads(json.dumps(plan_to_data(plan_from_data(data["plan"]))))
