"""User errors at the entry points: each gives one clear line and leaves the model unchanged."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat_facade
from remat_executor import PlannedModule, estimated_graph, step_graph
from remat_facade import (
    BadConfig,
    BadInput,
    BadModel,
    BadSample,
    BudgetAboveDevice,
    Hiremate,
    Offmate,
    Rockmate,
    from_config,
    generate_config,
    limit_memory,
    planned,
    save_config,
)
from remat_facade.entrypoints.inputs import as_call
from remat_graph import (
    BadBudget,
    BadFile,
    ForeignPlan,
    OverBudget,
    RematError,
    Roofline,
    resolve_budget,
    save_plan,
)
from remat_solvers import InfeasibleBudget, UnknownSolver


class Mlp(nn.Module):
    """A small model with dropout and a buffer that returns its loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 8)
        )

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """The mean square of the output."""
        return (self.layers(x) * scale).square().mean()


@pytest.fixture
def model() -> nn.Module:
    """The same model for every test."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mlp()


@pytest.fixture
def sample() -> Tensor:
    """A batch of the model."""
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, Any]:
    """Options that isolate a test: no search, and its own cache folder."""
    return {"solver": "noremat", "cache_dir": tmp_path / "cache"}


def fails(kind: type[RematError], build: Callable[[], object]) -> str:
    """The one-line error of building."""
    with pytest.raises(kind) as caught:
        build()
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "budget", [0, -1, "0", "-2GiB", "2 bananas", "", "nan", "-5%", "0%", True, None, 1.5, []]
)
def test_a_budget_that_means_nothing(budget: Any, model: nn.Module, sample: Tensor) -> None:
    """The error comes before any work and shows valid budgets."""
    assert '"40%"' in fails(BadBudget, lambda: Hiremate(model, sample, budget))


@pytest.mark.parametrize("budget", [2**60, "1000000TiB"])
def test_a_budget_above_the_device(budget: int | str, model: nn.Module, sample: Tensor) -> None:
    """The error names the device and its memory."""
    assert "cpu, which has" in fails(BudgetAboveDevice, lambda: Hiremate(model, sample, budget))


@pytest.mark.parametrize("reserve", [-1, "1MiB", True])
def test_a_reserve_that_means_nothing(reserve: Any, model: nn.Module, sample: Tensor) -> None:
    """A reserve is a number of bytes."""
    said = fails(BadBudget, lambda: Hiremate(model, sample, "40%", reserve_nbytes=reserve))
    assert "reserve_nbytes" in said


def test_a_reserve_that_leaves_nothing(model: nn.Module, sample: Tensor) -> None:
    """The reserve is the whole budget."""
    said = fails(BadBudget, lambda: Hiremate(model, sample, "1MiB", reserve_nbytes=2**20))
    assert "leaves nothing" in said


def test_an_infeasible_budget(model: nn.Module, sample: Tensor, tmp_path: Path) -> None:
    """The budget in the error works; the model and the random state are unchanged."""
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    stages: list[str] = []
    with pytest.raises(InfeasibleBudget) as caught:
        Hiremate(model, sample, 100, cache_dir=tmp_path, on_progress=stages.append)
    assert any(
        s.startswith("no schedule can fit 100 B: searching for the smallest budget") for s in stages
    ), stages
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())

    smallest = caught.value.smallest_nbytes
    planned = Hiremate(model, sample, smallest, cache_dir=tmp_path)
    assert planned.plan.peak_nbytes <= smallest
    share = f"{caught.value.smallest_percent}%"
    assert f' or "{share}" ({smallest} bytes)' in str(caught.value)
    assert resolve_budget(share, planned.graph) >= smallest

    (binding,) = [op for op in planned.graph.ops if op.name == caught.value.floor_op]
    assert binding.layer in dict(model.named_modules())
    assert f"where {binding.target} in " in str(caught.value)
    assert f"{binding.layer} ({binding.name}) needs" in str(caught.value)


def test_a_sample_of_another_kind(model: nn.Module, sample: Tensor) -> None:
    """A number, a string or None is not a sample."""
    for bad in (3, "batch", None, {1: sample}):
        fails(BadSample, lambda bad=bad: Hiremate(model, bad, "40%"))
    said = fails(BadSample, lambda: Hiremate(model, (16, 3, 32, 32), "40%"))
    assert "give torch.randn(16, 3, 32, 32)" in said
    fails(BadSample, lambda: Hiremate(model, {"x": sample}, "40%", sample_kwargs={"scale": 2.0}))
    fails(BadSample, lambda: Hiremate(model, sample, "40%", sample_kwargs=[sample]))


def test_a_sample_on_another_device(model: nn.Module, sample: Tensor) -> None:
    """The error names the path of the input in the sample."""
    said = fails(BadSample, lambda: Hiremate(model, {"x": sample.to("meta")}, "40%"))
    assert "meta" in said
    assert "'x'" in said


def test_what_is_no_model(sample: Tensor, model: nn.Module) -> None:
    """A function, a class, nothing to train, no memory, no shape yet."""
    assert "nn.Module" in fails(BadModel, lambda: Hiremate(torch.relu, sample, "40%"))
    assert "class" in fails(BadModel, lambda: Hiremate(Mlp, sample, "40%"))
    assert "meta" in fails(BadModel, lambda: Hiremate(Mlp().to("meta"), sample, "40%"))
    assert "shape" in fails(BadModel, lambda: Hiremate(nn.LazyLinear(4), sample, "40%"))
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert "trainable" in fails(BadModel, lambda: Hiremate(frozen, sample, "40%"))


def test_a_planned_model_is_not_planned_again(
    model: nn.Module, sample: Tensor, quick: dict[str, Any]
) -> None:
    """The error asks for the original."""
    planned = Hiremate(model, sample, "100%", **quick)
    assert "module" in fails(BadModel, lambda: Hiremate(planned, sample, "100%", **quick))


def test_moving_needs_the_class_that_moves(model: nn.Module, sample: Tensor) -> None:
    """Rockmate and its variants refuse a config of type offmate."""
    assert "use Offmate" in fails(BadConfig, lambda: Rockmate(model, sample, "40%", config="offmate"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("PureRotor", "rotor"),
        ("PureCheckmate", "checkmate"),
        ("PureRockmate", "rockmate"),
        ("PureHiremate", "hiremate"),
    ],
)
def test_a_pure_class_runs_its_method_alone(name: str, method: str, tmp_path: Path) -> None:
    """The plan names the method and keeps to its budget; a config of the type does the same."""
    chain = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
    entry, batch = getattr(remat_facade, name), torch.randn(256, 16)
    for module in (
        entry(chain, batch, "80%", cache_dir=tmp_path),
        from_config(chain, batch, "80%", method, cache_dir=tmp_path),
    ):
        assert module.plan.solver == method
        assert module.plan.peak_nbytes <= module.plan.budget_nbytes < module.plan.noremat_peak_nbytes


def test_choices_that_contradict_each_other(model: nn.Module, sample: Tensor) -> None:
    """A solver in addition to a config, or another method than the class runs."""
    config = generate_config("noremat")
    fails(BadConfig, lambda: Hiremate(model, sample, "40%", config=config, solver="noremat"))
    fails(BadConfig, lambda: Offmate(model, sample, "40%", config=config))
    fails(BadConfig, lambda: Hiremate(model, sample, "40%", seed=-1))
    fails(BadConfig, lambda: Hiremate(model, sample, "40%", solver="noremat", time_limit_s=-1.0))
    fails(UnknownSolver, lambda: Hiremate(model, sample, "40%", solver="noremt"))


def test_a_config_is_the_fourth_argument(
    model: nn.Module, sample: Tensor, quick: dict[str, Any], tmp_path: Path
) -> None:
    """It may be a config, a path, or a type's name."""
    config = generate_config("noremat")
    path = save_config(config, tmp_path / "config.yaml")
    for given in (config, path, str(path), "noremat"):
        planned = from_config(model, sample, "100%", given, cache_dir=quick["cache_dir"])
        assert isinstance(planned, Rockmate)
        assert planned.plan.solver == "noremat"
    assert "did you mean" in fails(BadConfig, lambda: from_config(model, sample, "100%", "noremt"))
    fails(BadFile, lambda: from_config(model, sample, "100%", tmp_path / "none.yaml"))
    fails(BadConfig, lambda: from_config(model, sample, "100%", 3))  # type: ignore[call-overload]


def test_a_saved_plan_is_used_again(
    model: nn.Module, sample: Tensor, quick: dict[str, Any], tmp_path: Path
) -> None:
    """A plan for another model or above the budget is refused."""
    made = Hiremate(model, sample, "100%", **quick).plan
    save_plan(made, tmp_path / "plan.json")
    again = Hiremate(model, sample, "100%", plan=tmp_path / "plan.json", **quick)
    assert made.schedule == again.plan.schedule

    said = fails(ForeignPlan, lambda: Hiremate(Mlp(16), sample, "100%", plan=made, **quick))
    assert "another graph" in said
    fails(OverBudget, lambda: Hiremate(model, sample, "50%", plan=made, **quick))
    said = fails(OverBudget, lambda: Hiremate(model, sample, "50%", plan=tmp_path / "plan.json", **quick))
    assert "plan.json peaks at" in said
    assert "leave plan= out" in said
    (tmp_path / "plan.json").write_text("{")
    fails(BadFile, lambda: Hiremate(model, sample, "100%", plan=tmp_path / "plan.json", **quick))


def test_a_limit_takes_the_plan_of_another_day(
    model: nn.Module, sample: Tensor, quick: dict[str, Any], tmp_path: Path
) -> None:
    """The README's lines: the plan of a step in a file; with the file nothing is searched."""
    file = tmp_path / "plan.json"
    limit_memory(model, "100%", **quick)
    model(sample).backward()
    first = planned(model)
    assert first is not None
    remat_facade.save_plan(first.plan, file)
    assert first.plan.schedule == remat_facade.load_plan(file).schedule
    limit_memory(model, "100%", plan=file, **quick | {"solver": "greedy"})
    model(sample).backward()
    second = planned(model)
    assert second is not None
    assert ("noremat", first.plan.schedule) == (second.plan.solver, second.plan.schedule)


def test_samples_of_every_kind_mean_the_same_call(
    model: nn.Module, sample: Tensor, quick: dict[str, Any]
) -> None:
    """A tensor, positional inputs and keyword inputs give the same loss."""
    losses = set()
    for given, named in (
        (sample, None),
        ((sample,), None),
        ([sample], {"scale": 1.0}),
        ({"x": sample}, None),
        ({"x": sample, "scale": 1.0}, None),
    ):
        planned = Hiremate(model, given, "100%", sample_kwargs=named, **quick)
        args, kwargs = as_call(given, named)
        torch.manual_seed(0)
        losses.add(planned(*args, **kwargs).item())
        assert planned.runs["planned"] == 1
    assert len(losses) == 1


@pytest.mark.parametrize("platform", ["h200-spec", Roofline, 3.0])
@pytest.mark.parametrize(
    "entry",
    [
        lambda model, x, platform: Hiremate(model, x, "40%", platform=platform),
        lambda model, x, platform: Offmate(model, x, "40%", platform=platform),
        lambda model, x, platform: step_graph(model, (x,), platform=platform),
        lambda model, x, platform: estimated_graph(model, (x,), {}, platform),
        lambda model, x, platform: PlannedModule(model, (x,), {}, lambda graph: None, platform=platform),
    ],
)
def test_a_platform_is_an_object(
    entry: Callable[..., object], platform: object, model: nn.Module, sample: Tensor
) -> None:
    """Not its name, which `get_platform` takes, and not its class."""
    assert "get_platform" in fails(BadInput, lambda: entry(model, sample, platform))
