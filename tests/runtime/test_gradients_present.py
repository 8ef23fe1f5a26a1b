"""Two plans of one step: for new gradients, and for gradients that are added to an existing `.grad`."""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, MemoryMeter, PlannedModule, allocator_peak
from remat_facade import Hiremate, generate_config, limit_memory, planned, save_config
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import (
    Grads,
    Graph,
    Plan,
    fingerprint,
    get_platform,
    load_plan,
    noremat_peak_nbytes,
    save_plan,
)
from remat_solvers import InfeasibleBudget
from tests.helpers.planners import save_all


class Deep(nn.Module):
    """Blocks whose parameters take more than their activations; one is used twice, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.norm = nn.LayerNorm(48)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.norm(torch.nn.functional.gelu(block(x)).sin())
        return self.first(self.frozen(x)).square().mean()


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def sample() -> Tensor:
    return torch.randn(24, 48, generator=torch.Generator().manual_seed(1))


QUICK = Method(parameters={"moves": 3000})
PLANS: dict[tuple[object, ...], Plan] = {}


@attrs.define(kw_only=True)
class Remembering(RecomputePlanner):
    """Plans each graph once for all tests of this file."""

    method: Method = QUICK

    def __call__(self, graph: Graph) -> Plan:
        key = fingerprint(graph), self.budget, self.grads
        if key not in PLANS:
            PLANS[key] = super().__call__(graph)
        return PLANS[key]


def planner(budget: int | str = "100%") -> Remembering:
    return Remembering(budget=budget)


@functools.cache
def graph() -> Graph:
    return PlannedModule(deep(), (sample(),), {}, planner(), platform=get_platform("flops")).graph


def gradient_nbytes() -> int:
    return sum(graph().values[g].nbytes for g in graph().gradients)


def tight_nbytes() -> int:
    """Less than new gradients take alone."""
    return gradient_nbytes() * 15 // 16


def safe_nbytes() -> int:
    """A budget that a plan with new gradients keeps to by recomputing, and one without need not."""
    return gradient_nbytes() + (noremat_peak_nbytes(graph()) - gradient_nbytes()) // 5


def module(budget: int | str, **options: Any) -> PlannedModule:
    return PlannedModule(deep(), (sample(),), {}, planner(budget), platform=get_platform("flops"), **options)


def add_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def peaks(model: PlannedModule) -> tuple[int, int]:
    """Of one step each, by the meter and by the allocator."""
    x = sample()
    gc.collect()
    with MemoryMeter(model, x) as meter:
        model(x).backward()
    return meter.peak_nbytes, allocator_peak(lambda: model(x).backward()).peak_nbytes


def test_a_budget_below_the_gradients_works_where_they_are_there() -> None:
    """New gradients alone would take more; peaks are those of the plan to the byte."""
    for budget in (tight_nbytes(), safe_nbytes()):
        model, eager = module(budget, gradients="present"), deep()
        assert model.plan.grads is Grads.PRESENT
        for each in (model, eager):
            add_gradients(each)
        metered_nbytes, allocated_nbytes = peaks(model)
        for _ in range(2):
            eager(sample()).backward()
        assert metered_nbytes == model.plan.live_peak_nbytes <= budget
        assert allocated_nbytes == model.plan.peak_nbytes <= budget
        assert_same_gradients(model, eager)


def test_each_call_gets_the_plan_for_what_it_finds() -> None:
    """None, all, some: the third has the plan of the first; both keep to the budget."""
    budget = safe_nbytes()
    model, eager = module(budget, gradients="present"), deep()
    x = sample()
    states = []
    for found in ("none", "all", "some", "all", "none", "all"):
        for each in (model, eager):
            each.zero_grad()
            if found != "none":
                add_gradients(each)
            if found == "some":
                each.norm.bias.grad = None
        with MemoryMeter(model, x) as meter:
            model(x).backward()
        eager(x).backward()
        assert_same_gradients(model, eager)
        assert meter.peak_nbytes <= budget
        states.append(model.plan.grads)
    new, present = Grads.NEW, Grads.PRESENT
    assert states == [new, present, new, present, new, present]
    assert model.runs["replanned"] == 0


def test_accumulation_over_micro_batches() -> None:
    """The first finds none; the sum is eager's in every bit."""
    model, eager = module(safe_nbytes(), gradients="present"), deep()
    for _ in range(2):
        for each in (model, eager):
            each.zero_grad()
        grads = []
        for scale in (1.0, 0.5, 0.25):
            x = scale * sample()
            model(x).backward()
            eager(x).backward()
            grads.append(model.plan.grads)
        assert grads == [Grads.NEW, Grads.PRESENT, Grads.PRESENT]
        assert_same_gradients(model, eager)


def test_gradients_that_are_freed_before_the_backward_make_room_for_new_ones() -> None:
    """`loss = model(x); optimizer.zero_grad(); loss.backward()` keeps to the budget as well."""
    budget = tight_nbytes()
    model, x = module(budget, gradients="present"), sample()
    add_gradients(model)
    before = [parameter.grad for parameter in model.parameters()]  # what the meter has to see being freed
    with MemoryMeter(model, x) as meter:
        meter_baseline = sum(g.nbytes for g in before if g is not None)
        loss = model(x)
        before.clear()
        model.zero_grad()
        loss.backward()
    assert model.plan.grads is Grads.PRESENT
    # The meter does not subtract the tensors that existed before, and that are gone.
    assert meter.peak_nbytes <= budget + meter_baseline
    eager = deep()
    eager(x).backward()
    assert_same_gradients(model, eager)


def test_a_call_without_gradients_needs_a_plan_of_its_own() -> None:
    """If there is none within the budget, the error says what the caller can do."""
    model = module(tight_nbytes(), gradients="present")
    with pytest.raises(InfeasibleBudget) as caught:
        model(sample())
    assert gradient_nbytes() < caught.value.smallest_nbytes <= safe_nbytes()
    assert "give each one, as in p.grad = torch.zeros_like(p)" in caught.value.__notes__[0]
    add_gradients(model)
    model(sample()).backward()
    assert model.runs["planned"] == 1


def test_one_plan_serves_both_where_it_fits_both() -> None:
    """With an ample budget, nothing is planned twice."""
    asked = []

    @attrs.define(kw_only=True)
    class Counting(Remembering):
        def __call__(self, graph: Graph) -> Plan:
            asked.append(self.grads)
            return super().__call__(graph)

    given = Counting(budget="200%")
    model = PlannedModule(deep(), (sample(),), {}, given, gradients="present")
    for prepare in (nn.Module.zero_grad, add_gradients, nn.Module.zero_grad):
        prepare(model)
        model(sample()).backward()
    assert asked == [Grads.PRESENT]


@attrs.define(kw_only=True)
class Slow(Remembering):
    """A planner that says how long it took."""

    took_s: float = 0.0

    def planning_s(self, plan: Plan) -> float:
        return self.took_s


def test_auto_plans_again_when_recomputation_has_taken_as_long() -> None:
    """Before that, one plan serves both; the other plan is then used where gradients are found."""
    platform = get_platform("flops")
    budget = safe_nbytes()
    first = PlannedModule(deep(), (sample(),), {}, planner(budget), platform=platform).plan
    lost_s = first.overhead * first.noremat_time_s
    assert first.overhead > 0.01
    given = Slow(budget=budget, took_s=2.5 * lost_s)
    model, eager = PlannedModule(deep(), (sample(),), {}, given, platform=platform), deep()
    for each in (model, eager):
        add_gradients(each)
    grads = []
    for _ in range(5):
        for each in (model, eager):
            each(sample()).backward()
        grads.append(model.plan.grads)
    assert grads == [Grads.NEW] * 2 + [Grads.PRESENT] * 3
    assert model.plan.overhead < first.overhead
    assert_same_gradients(model, eager)
    model.zero_grad()
    model(sample()).backward()
    assert model.plan.grads is Grads.NEW
    assert copy.deepcopy(model).plan.grads is Grads.NEW


@pytest.mark.parametrize(
    ("budget", "options"), [("200%", {}), ("least", {"gradients": "new"})], ids=["nothing to gain", "new"]
)
def test_no_second_plan_is_made_in_vain(budget: str, options: dict[str, Any]) -> None:
    """Where nothing is recomputed, and where the caller does not want it."""
    nbytes = safe_nbytes() if budget == "least" else budget
    given = Slow(budget=nbytes, took_s=0.0)
    model = PlannedModule(deep(), (sample(),), {}, given, **options)
    add_gradients(model)
    model(sample()).backward()
    assert model.plan.grads is Grads.NEW


class Middle(nn.Module):
    """A part of a model: the gradient of its input goes on to what made it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(x)).sin())


def test_gradients_of_inputs_stay_counted() -> None:
    """They have no `.grad` to be added to."""
    torch.manual_seed(0)
    model = Middle()
    x = torch.randn(64, 48, requires_grad=True)
    part = PlannedModule(copy.deepcopy(model), (x,), {}, planner(), gradients="present")
    assert part.plan.grads is Grads.PRESENT
    add_gradients(part)
    add_gradients(model)
    tangent = torch.randn(64, 48)
    hidden = x * 2
    with MemoryMeter(part, x, hidden, tangent) as meter:
        part(hidden).backward(tangent)
    (model(x * 2)).backward(tangent)
    assert_same_gradients(part, model)
    assert meter.peak_nbytes <= part.plan.live_peak_nbytes + x.nbytes  # the gradient of x itself
    frozen = copy.deepcopy(model).requires_grad_(False)
    alone = PlannedModule(frozen, (x,), {}, planner(), gradients="present")
    alone(x).backward(tangent)
    assert alone.runs["planned"] == 1


def test_the_option_of_the_entry_points(tmp_path: Path) -> None:
    """A percentage means the same; plans are saved with their state; wrong words and runtimes are refused."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "platform": get_platform("flops")}
    new, present = (
        Hiremate(deep(), sample(), "60%", gradients=state, **options) for state in ("new", "present")
    )
    assert new.plan.budget_nbytes == present.plan.budget_nbytes
    assert present.plan.time_s <= new.plan.time_s
    assert "for steps that find a .grad for every parameter" in present.plan.summary()
    assert "for steps that find" not in new.plan.summary()
    again = Hiremate(deep(), sample(), "60%", gradients="present", **options)
    assert again.plan.solver_stats["saved"]
    assert again.plan.grads is Grads.PRESENT
    save_plan(present.plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json", present.graph).grads is Grads.PRESENT
    given = Hiremate(deep(), sample(), "60%", gradients="present", plan=tmp_path / "plan.json", **options)
    assert given.plan.schedule == present.plan.schedule
    with pytest.raises(BadInput, match=r'the plan is for gradients="present", and calls .* "auto"'):
        Hiremate(deep(), sample(), "60%", plan=tmp_path / "plan.json", **options)
    with pytest.raises(BadInput, match="gradients is 'old', not one of 'auto', 'new', 'present'"):
        limit_memory(deep(), "60%", gradients="old")
    with pytest.raises(BadInput, match='gradients="present" needs plans that run eagerly'):
        Hiremate(deep(), sample(), "60%", gradients="present", runtime="inductor", **options)
    with pytest.raises(BadInput, match="cannot plan for gradients that are present"):
        PlannedModule(deep(), (sample(),), {}, save_all, gradients="present")


def test_a_config_has_the_option(tmp_path: Path) -> None:
    """Of a file; the keyword overrules it, and a runtime that cannot have it is refused as before."""
    options: dict[str, Any] = {"cache_dir": tmp_path, "platform": get_platform("flops"), "zoo": False}
    path = save_config(generate_config("noremat").with_(gradients="present"), tmp_path / "config.yaml")
    assert Hiremate(deep(), sample(), "100%", config=path, **options).plan.grads is Grads.PRESENT
    new = Hiremate(deep(), sample(), "100%", config=path, gradients="auto", **options)
    assert new.plan.grads is Grads.NEW
    with pytest.raises(BadInput, match='gradients="present" needs plans that run eagerly'):
        limit_memory(deep(), "100%", config=path, runtime="inductor")


def test_auto_asks_for_no_other_plan_where_no_parameter_has_a_gradient() -> None:
    """All gradients of the step are those of inputs, as in each graph of Dynamo's."""
    given = Slow(budget="24KiB")
    x = torch.randn(40, 48, requires_grad=True)
    model = PlannedModule(Bends(), (x,), {}, given, platform=get_platform("roofline"))
    assert model.plan.overhead > 0.01
    model(x).sum().backward()
    assert not model._remat.gradients.others


class Bends(nn.Module):
    """Operators without parameters, of which each saves its input."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin()
        return x.square().sum()


def test_in_place_a_model_trains_with_gradients_that_stay(tmp_path: Path) -> None:
    """`zero_grad(set_to_none=False)`, below the bytes of new gradients."""
    budget = noremat_peak_nbytes(graph()) * 3 // 5
    assert budget < safe_nbytes() * 21 // 20
    options: dict[str, Any] = {"cache_dir": tmp_path, "platform": get_platform("flops"), "zoo": False}
    model, eager = limit_memory(deep(), budget, gradients="present", **options), deep()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    for each in (model, eager):
        add_gradients(each)
    for step in range(3):
        for each, optimizer in zip((model, eager), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            each(sample() + step).backward()
            optimizer.step()
    found = planned(model)
    assert found is not None
    assert found.plan.grads is Grads.PRESENT
    assert found.runs["planned"] == 3
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)
