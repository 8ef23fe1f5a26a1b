"""Names that users have in files, scripts and code: a rename inside the packages must not change them."""

import inspect
import json
import tomllib
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import typer
import yaml

import remat_facade
from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_facade.cli.app import app
from remat_facade.config.types import config_types
from remat_facade.entrypoints.options import CostOptions
from remat_facade.planning.method import Method
from remat_facade.planning.zoo import Zoo
from remat_facade.report.sweep_rows import sweep_csv
from remat_graph import (
    Lane,
    Links,
    Placement,
    Plan,
    Role,
    Roofline,
    load_graph,
    load_plan,
    load_platform,
    save_platform,
)
from remat_graph.serialization.graphs import graph_to_data
from remat_graph.serialization.plans import plan_to_data
from remat_graph.serialization.schedules import schedule_from_data, schedule_to_data
from tests.data.written_before import models

ROOT = Path(__file__).parents[2]
BEFORE = ROOT / "tests" / "data" / "written_before"

LINKS = {
    "to_host_nbytes_per_s",
    "to_device_nbytes_per_s",
    "to_host_duplex_nbytes_per_s",
    "to_device_duplex_nbytes_per_s",
    "host_nbytes_per_s",
}
SEAL = {"format", "version", "sha256"}


def keys(members: list[dict[str, Any]]) -> set[str]:
    """All keys of some objects."""
    return {key for member in members for key in member}


def test_the_keys_of_a_graph() -> None:
    """Written by today's code; the file holds each key at least once."""
    data = graph_to_data(load_graph(BEFORE / "graphs" / "every_key.json"))
    assert ("remat-graph", 1) == (data["format"], data["version"])
    assert {
        "format",
        "version",
        "name",
        "rounding_nbytes",
        "conditions",
        "values",
        "ops",
        "updates",
    } == set(data)
    assert {"name", "nbytes", "role", "external", "of", "replaces", "chunk_of", "home"} == keys(
        data["values"]
    )
    assert {"name", "target", "backward", "key", "rerun", "implementations"} == keys(data["ops"])
    implementations = [each for op in data["ops"] for each in op["implementations"]]
    assert {"inputs", "outputs", "time_s", "workspace_nbytes", "reuses"} == keys(implementations)
    assert {"param", "grad", "states", "device_time_s", "cpu_time_s", "workspace_nbytes"} == keys(
        data["updates"]
    )


@pytest.mark.parametrize(
    ("enum", "words"),
    [
        (
            Role,
            {
                "activation",
                "output",
                "dropped",
                "tangent",
                "param",
                "grad",
                "optimizer_state",
                "rng",
                "buffer",
            },
        ),
        (Placement, {"device", "host"}),
        (Lane, {"compute", "to_host", "to_device", "cpu_optimizer"}),
    ],
)
def test_the_words_of_a_graph_and_a_schedule(enum: type[StrEnum], words: set[str]) -> None:
    """Values that files hold."""
    assert words == {each.value for each in enum}


def test_the_keys_of_a_schedule() -> None:
    """And the words of its steps."""
    data = schedule_to_data(schedule_from_data(json.loads((BEFORE / "schedule.json").read_text())))
    assert {"boundary", "steps", "end"} == set(data)
    words = {"compute", "free", "deliver", "start", "wait", "free_host", "optimizer_step"}
    assert words == {step[0] for step in data["steps"]}


def test_the_keys_of_a_plan() -> None:
    """Of one that moves nothing, and of one with all that others leave out."""
    least = {
        "format",
        "version",
        "fingerprint",
        "graph_name",
        "budget_nbytes",
        "peak_nbytes",
        "live_peak_nbytes",
        "noremat_peak_nbytes",
        "gradient_nbytes",
        "time_s",
        "noremat_time_s",
        "recomputed_s",
        "lower_bound_s",
        "solver",
        "platform",
        "deadline_hit",
        "solver_stats",
        "versions",
        "schedule",
    }
    plain = plan_to_data(load_plan(BEFORE / "command" / "solve_plan.json"))
    assert ("remat-plan", 1) == (plain["format"], plain["version"])
    assert least == set(plain)
    data = plan_to_data(load_plan(BEFORE / "plans" / "links.json"))
    assert least | {"on_host", "host_peak_nbytes", "links", "periods"} == set(data)
    assert set(data["links"]) == LINKS


def test_the_statistics_of_plans(tmp_path: Path) -> None:
    """`solver_stats` of the portfolio and of what moves values; plan files hold them."""
    options = {"platform": Roofline(**models.RATES), "cache_dir": tmp_path, "zoo": False}
    ours = remat_facade.Hiremate(models.make_model(), models.make_batch(), models.BUDGET, **options)
    assert {"method", "moves", "rounds", "deadline", "planning_s"} == set(ours.plan.solver_stats)
    moving = remat_facade.Offmate(
        models.make_model(),
        models.make_batch(),
        models.TRAINING_BUDGET,
        links=Links(**models.LINKS),
        host_budget=models.HOST_BUDGET,
        **options,
    )
    assert {
        "tried",
        "deadline",
        "least_nbytes",
        "least_host_nbytes",
        "binds",
        "device_weights_nbytes",
        "device_gradients_nbytes",
        "device_states_nbytes",
        "host_weights_nbytes",
        "host_gradients_nbytes",
        "host_states_nbytes",
        "moved_activations_nbytes",
        "to_host_hidden_s",
        "to_host_exposed_s",
        "to_device_hidden_s",
        "to_device_exposed_s",
        "cpu_optimizer_hidden_s",
        "cpu_optimizer_exposed_s",
        "recomputed_s",
        "why",
        "planning_s",
        "host_budget_nbytes",
    } == set(moving.plan.solver_stats)
    moving.close()


def test_the_keys_of_a_platform(tmp_path: Path) -> None:
    """With everything that may be left out."""
    save_platform(load_platform(BEFORE / "platforms" / "links.json"), tmp_path / "platform.json")
    data = json.loads((tmp_path / "platform.json").read_text())
    assert ("remat-platform", 1) == (data["format"], data["version"])
    assert {"format", "version", "device", "date", "versions", "measurements", "links"} == set(data)
    assert {"flops", "read_nbytes", "written_nbytes", "time_s", "workspace_nbytes", "arithmetic"} == keys(
        list(data["measurements"].values())
    )
    assert set(data["links"]) == LINKS


def test_the_keys_of_the_cost_cache(tmp_path: Path) -> None:
    """A cost is seconds, bytes of workspace and bytes of outputs."""
    cache = CostCache(folder=tmp_path)
    cache.add({"an op": MeasuredCost(time_s=1e-3, workspace_nbytes=2, output_nbytes=3)})
    data = json.loads(cache.path.read_text())
    assert ("remat-costs", 2) == (data["format"], data["version"])
    assert SEAL | {"costs"} == set(data)
    assert {"an op": [1e-3, 2, 3]} == data["costs"]
    name = f"-1threads-torch{torch.__version__}.json"
    assert (True, True) == (cache.path.name.startswith("costs-v2-cpu-"), cache.path.name.endswith(name))


def test_the_keys_of_a_saved_plan(tmp_path: Path) -> None:
    """Of the file, and of what the plan depends on; its name is a hash of the latter."""
    graph = load_graph(BEFORE / "graphs" / "captured.json")
    plan = load_plan(BEFORE / "command" / "solve_plan.json", graph)
    Zoo(folder=tmp_path, times="a device").keep(graph, plan.budget_nbytes, Method(solver="greedy"), plan)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    assert path.name.startswith("plan-v2-")
    assert ("remat-zoo", 2) == (data["format"], data["version"])
    assert SEAL | {"key", "time_limit_s", "plan"} == set(data)
    parts = {
        "fingerprint",
        "rounding_nbytes",
        "budget_nbytes",
        "solver",
        "parameters",
        "times",
        "sources",
    }
    assert parts == set(data["key"])
    assert {"remat_graph", "remat_solvers", "highspy", "numba", "numpy", "remat-solvers"} == set(
        data["key"]["sources"]
    )


COMMON = {"seed", "time_limit_s"}
OF_A_STEP = {"ways", "outputs", "gradients", "prove_s"}
CONFIGS = {
    "auto": OF_A_STEP | {"gap"},
    "noremat": OF_A_STEP,
    "rotor": OF_A_STEP | {"stages", "slots"},
    "rockmate": OF_A_STEP | {"stages", "slots", "levels", "exact", "block_seconds", "backend"},
    "checkmate": OF_A_STEP | {"backend", "accounting"},
    "monet": OF_A_STEP | {"backend", "without"},
    "hilp": OF_A_STEP | {"segments", "leaf", "levels", "options", "leaf_seconds", "top_seconds", "backend"},
    "hiremate": OF_A_STEP
    | {"segments", "leaf", "exact", "slots", "levels", "leaf_seconds", "moves", "backend"},
    "offmate": {
        "host_budget",
        "optimizer",
        "optimizer_options",
        "optimizer_in_backward",
        "master_weights",
        "weights",
        "accumulation",
        "links",
    },
}


def test_the_types_of_configs() -> None:
    """None more or fewer."""
    assert set(CONFIGS) == set(config_types())


@pytest.mark.parametrize("type", list(CONFIGS))
def test_the_keys_of_a_config(type: str, tmp_path: Path) -> None:
    """As `save_config` writes them, and as keyword arguments."""
    made = remat_facade.generate_config(type)
    remat_facade.save_config(made, tmp_path / "config.yaml")
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert {"remat_config", "type"} | COMMON | CONFIGS[type] == set(data)
    assert (1, type) == (data["remat_config"], data["type"])
    assert COMMON | CONFIGS[type] == {field.name for field in attrs.fields(made.__class__)}


ROCKMATE = {
    "model",
    "sample",
    "budget",
    "sample_kwargs",
    "reserve_nbytes",
    "config",
    "solver",
    "seed",
    "time_limit_s",
    "cache_dir",
    "plan",
    "platform",
    "differentiate",
    "on_progress",
    "runtime",
    "ranks",
    "optimizer",
    "zoo",
    "max_plans",
    "buckets",
    "part_nbytes",
    "ways",
    "outputs",
    "gradients",
}
PUBLIC = {
    "Buckets": {"sizes", "pad", "dim", "cut"},
    "Config": COMMON,
    "Hiremate": ROCKMATE,
    "Offmate": ROCKMATE - {"solver", "plan", "runtime", "ranks", "ways", "outputs", "gradients"}
    | {
        "host_budget",
        "optimizer_in_backward",
        "master_weights",
        "weights",
        "accumulation",
        "machine",
        "pool",
        "links",
    },
    "PureCheckmate": ROCKMATE,
    "PureHiremate": ROCKMATE,
    "PureRockmate": ROCKMATE,
    "PureRotor": ROCKMATE,
    "Rockmate": ROCKMATE,
    "from_config": {"model", "sample", "budget", "config", "options"},
    "generate_config": {"type"},
    "limit_memory": {"model", "budget", "sample", "loss", "options"},
    "load_config": {"path"},
    "load_plan": {"path", "graph"},
    "planned": {"model"},
    "release": {"model"},
    "save_config": {"config", "path"},
    "save_plan": {"plan", "path"},
}


ERRORS = {
    "BadBudget",
    "BadConfig",
    "BadFile",
    "BadInput",
    "BadModel",
    "BadOption",
    "BadParameter",
    "BadSample",
    "BadWeights",
    "BudgetAboveDevice",
    "CannotPin",
    "CannotWrite",
    "CaptureError",
    "ForeignPlan",
    "HostPoolExhausted",
    "InfeasibleBudget",
    "LaneFailed",
    "MachineMisuse",
    "MethodNotAvailable",
    "NoRoom",
    "NotFound",
    "NothingLeft",
    "NothingToDifferentiate",
    "OffloadMisuse",
    "OverBudget",
    "StepOverBudget",
    "PlanNotKept",
    "PlanningInterrupted",
    "RankFailed",
    "RanksDiffer",
    "RefusedOptimizer",
    "RematError",
    "RematWarning",
    "SolverWarning",
    "TableTooLarge",
    "UnknownOptimizer",
    "UnknownSolver",
    "UnplannedUse",
    "UnsupportedTorch",
}


def test_the_public_names() -> None:
    """Of the package that users import: what they call, and what they catch."""
    assert set(PUBLIC) | ERRORS == set(remat_facade.__all__)


@pytest.mark.parametrize("name", list(PUBLIC))
def test_the_arguments_of_public_names(name: str) -> None:
    """By keyword."""
    assert PUBLIC[name] == set(inspect.signature(getattr(remat_facade, name)).parameters)


PLANNED = {
    "fragments_nbytes",
    "graph",
    "measurements",
    "module",
    "parts",
    "plan",
    "rehearsed_nbytes",
    "runs",
    "will_it_fit",
}


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Hiremate", PLANNED),
        (
            "Offmate",
            PLANNED
            | {
                "accumulating",
                "clip_grad_norm_",
                "close",
                "host",
                "optimizer",
                "optimizer_in_backward",
                "synchronize",
            },
        ),
    ],
)
def test_the_attributes_of_planned_modules(name: str, attributes: set[str]) -> None:
    """In addition to those of every `nn.Module`."""
    found = set(dir(getattr(remat_facade, name))) - set(dir(torch.nn.Module))
    assert attributes == {each for each in found if not each.startswith("_")}


def test_the_attributes_of_a_plan() -> None:
    """All that a user may read of `model.plan`."""
    assert {
        "budget_nbytes",
        "deadline_hit",
        "fingerprint",
        "from_schedule",
        "gap",
        "gradient_nbytes",
        "grads",
        "graph_name",
        "host_peak_nbytes",
        "issue_s",
        "launch_note",
        "layers",
        "links",
        "live_peak_nbytes",
        "lower_bound_overhead",
        "lower_bound_s",
        "noremat_issue_s",
        "noremat_peak_nbytes",
        "noremat_step_s",
        "noremat_time_s",
        "notes",
        "on_host",
        "overhead",
        "peak_nbytes",
        "periods",
        "platform",
        "recomputed_overhead",
        "recomputed_s",
        "rounding",
        "rounding_layers",
        "schedule",
        "solver",
        "solver_stats",
        "summary",
        "switched",
        "switched_s",
        "time_s",
        "versions",
        "waits_for_host",
        "ways",
    } == {name for name in dir(Plan) if not name.startswith("_")}


SOLVERS = {
    "noremat",
    "checkpoint_ap",
    "chen_sqrt",
    "chen_sqrt_linear",
    "chen_greedy",
    "chen_greedy_linear",
    "greedy",
    "griewank",
    "mincut",
    "interval_dp",
    "rotor",
    "pofo",
    "checkmate",
    "checkmate_lp",
    "monet",
    "moccasin",
    "hilp",
    "twremat",
    "rockmate",
    "hiremate",
    "search",
    "auto",
}
PLATFORMS = {"a100-spec", "flops", "h100-spec", "h200-spec", "roofline", "rtx4090-spec", "v100-spec"}
PLATFORMS |= {"c5.24xlarge-spec", "k80-spec", "c524xlarge", "p2xlarge", "p32xlarge"}
PROJECTS: dict[str, tuple[str, dict[str, set[str]], set[str], set[str]]] = {
    "graph": ("remat-graph", {"remat.platforms": PLATFORMS}, set(), set()),
    "solvers": (
        "remat-solvers",
        {"remat.command": {"solvers"}, "remat.solvers": SOLVERS},
        {"remat"},
        {"cpsat"},
    ),
    "executor": ("remat-executor", {}, set(), set()),
    "offload": ("remat-offload", {}, set(), {"weights"}),
    "facade": (
        "remat-facade",
        {
            "remat.command": {"facade"},
            "torch_dynamo_backends": {"remat"},
            "lightning.pytorch.callbacks_factory": {"remat"},
        },
        set(),
        {"demo", "accelerate", "axolotl", "lightning", "peft", "torchtitan", "transformers", "trl"},
    ),
}


@pytest.mark.parametrize("folder", list(PROJECTS))
def test_the_names_in_distributions(folder: str) -> None:
    """Name, entry points, commands and extras, in `pyproject.toml`; each entry point can be loaded."""
    project = tomllib.loads((ROOT / "packages" / folder / "pyproject.toml").read_text())["project"]
    points = project.get("entry-points", {})
    found = (
        project["name"],
        {group: set(names) for group, names in points.items()},
        set(project.get("scripts", ())),
        set(project.get("optional-dependencies", ())),
    )
    assert PROJECTS[folder] == found
    # Lightning is installed in the environment of the integrations alone; a test there loads its entry point.
    groups = [project.get("scripts", {}), *(points[name] for name in points if "lightning" not in name)]
    for target in (each for group in groups for each in group.values()):
        module, _, name = target.partition(":")
        assert hasattr(import_module(module), name), target


def test_there_are_five_distributions() -> None:
    """A sixth one would need a line above."""
    assert set(PROJECTS) == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}


SOLVE = {"--budget", "--solver", "--config", "--seed", "--time-limit", "--json"}
NAMED = {"--dtype", "target", "--input"}  # a model by MODULE:FACTORY or by its name
VERBS = {
    "demo": {"--model", "--budget", "--steps", "--outputs", "--out", "--json"},
    "plan": SOLVE
    | NAMED
    | {
        "--batch",
        "--ways",
        "--outputs",
        "--gradients",
        "--optimizer",
        "--device-memory",
        "--platform",
        "--zoo",
        "--no-zoo",
        "--out",
        "--plan-out",
        "--graph-out",
        "--prove",
    },
    "check": SOLVE | NAMED | {"--batch", "--ways", "--outputs", "--gradients", "--plan", "--steps"},
    "solve": SOLVE | {"graph", "--gradients", "--order-out", "--plan-out", "--out", "--prove"},
    "min-budget": {"graph", "--time-limit", "--gradients", "--json"},
    "sweep": NAMED
    | {"--batch", "--platform", "--ways", "--outputs", "--solvers", "--solver", "--budgets", "--points"}
    | {"--no", "--time-limit", "--csv", "--png", "--json"},
    "max-batch": NAMED
    | {
        "--budget",
        "--device-memory",
        "--solvers",
        "--solver",
        "--max-overhead",
        "--first",
        "--platform",
        "--optimizer",
        "--time-limit",
        "--ways",
        "--outputs",
        "--gradients",
        "--json",
    },
    "doctor": SOLVE | NAMED | {"--batch", "--platform", "--ways", "--outputs", "--gradients"},
    "config": {"type", "--out", "--json"},
    "show": {
        *("plan", "--graph", "--png", "--matrix", "--html", "--json"),
        *("--dataflow", "--snapshot", "--trace"),
    },
    "solvers": {"--json"},
    "zoo": {"name", "--plan-out", "--out", "--json"},
}


def test_the_command() -> None:
    """Its verbs, their arguments and options."""
    command: Any = typer.main.get_command(app)
    found = {
        verb: {word for parameter in each.params for word in (*parameter.opts, *parameter.secondary_opts)}
        for verb, each in command.commands.items()
    }
    assert found == VERBS


def test_the_columns_of_a_sweep() -> None:
    """The first line of `remat sweep --csv`."""
    assert "solver,budget_nbytes,overhead,lower_bound_overhead,peak_nbytes,wall_s\n" == sweep_csv({}, [])


@pytest.mark.parametrize("variable", ["REMAT_CACHE_DIR", "REMAT_NO_ZOO"])
def test_variables_of_the_environment(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where caches are, and whether plans are kept."""
    monkeypatch.delenv("REMAT_NO_ZOO", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    zoo = CostOptions().zoo(torch.device("cpu"))
    assert (variable == "REMAT_NO_ZOO") == (zoo is None)
    if zoo is not None:
        assert tmp_path / "plans" == zoo.folder
