"""Plans run by Inductor: the same numbers within rounding, the same recomputations, within the budget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from remat_executor import (
    BadInput,
    MemoryMeter,
    PlannedModule,
    RematWarning,
    StepOverBudget,
    allocator_peak,
)
from remat_executor.lowering.runtime_protocol import GraphFunction, GraphInterface
from remat_executor.runtime.inductor import Inductor
from remat_executor.runtime.registry import RuntimeFactory, runtime_factory
from remat_facade import Hiremate
from remat_facade.planning.method import Method
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, Plan, resolve_budget
from tests.helpers.models import Block
from tests.helpers.planners import save_all

# Inductor imports a module of torch's own that torch has deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated. "
    "Please switch to `torch.compile` or `torch.export`.:DeprecationWarning:torch.jit._script"
)

FULL = pytest.mark.full  # a compiler takes seconds for each part

# The same operators in another order of rounding: fp32 keeps about 7 digits, a deep net loses two or three.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Blocks(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self, dropout: float = 0.0, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Convs(nn.Module):
    """Convolutions, train-mode batch norms, in-place activations."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), *[(16, 16)] * (depth - 1)):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(inplace=True)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images).mean((2, 3))).square().mean()


SMALL: dict[type[nn.Module], dict[str, Any]] = {Blocks: {}, Convs: {"depth": 4}}
"""Where each part is compiled."""


def built(kind: type[nn.Module], **options: Any) -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(**options)


def sample(kind: type[nn.Module]) -> Tensor:
    """A batch for one of the two."""
    generator = torch.Generator().manual_seed(1)
    if kind is Convs:
        return torch.randn(8, 3, 16, 16, generator=generator)
    return torch.randint(0, 64, (8, 32), generator=generator)


def step(module: nn.Module, batch: Tensor, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one step; both buffers and generator go on."""
    module.zero_grad()
    torch.manual_seed(seed)
    loss = module(batch)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A quick search, and one cost cache for the module."""
    return {"time_limit_s": 2.0, "cache_dir": tmp_path_factory.mktemp("costs")}


@pytest.fixture(scope="module")
def references() -> dict[type[nn.Module], Any]:
    """Models after one unplanned step, with what it gave."""
    return {}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """What one test compiled with Dynamo is not the next one's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run_by(
    runtime: RuntimeFactory, model: nn.Module, batch: Tensor, budget: int | str, options: dict[str, Any]
) -> PlannedModule:
    """`Hiremate` with a runtime that is handed in."""
    method = Method(time_limit_s=options["time_limit_s"])
    planner = RecomputePlanner(budget=budget, method=method)
    return PlannedModule(model, (batch,), {}, planner, runtime=runtime, cache_dir=options["cache_dir"])


def within(planned: PlannedModule, budget: int | str) -> bool:
    """Whether a step needs no more than the user's budget, and exactly the peak that was measured."""
    batch = sample(type(planned.module))
    planned.zero_grad()
    record = allocator_peak(lambda: planned(batch).backward())
    return planned.rehearsed_nbytes == record.peak_nbytes <= resolve_budget(budget, planned.graph)


@pytest.mark.parametrize("budget", [pytest.param("100%", marks=FULL), "60%", pytest.param("40%", marks=FULL)])
@pytest.mark.parametrize("kind", [pytest.param(Blocks, marks=FULL), Convs])
def test_inductor_keeps_to_the_budget(
    kind: type[nn.Module], budget: str, options: dict[str, Any], references: dict[type[nn.Module], Any]
) -> None:
    """The allocator stays within; loss, gradients, buffers are the unplanned model's.

    Blocks against `torch.compile`, which takes as long as everything else here; convolutions against eager.
    """
    batch = sample(kind)
    if kind not in references:
        references[kind] = built(kind, **SMALL[kind])
        call = torch.compile(references[kind]) if kind is Blocks else references[kind]
        references[kind].found = step(call, batch)
    loss, gradients = references[kind].found
    planned = Hiremate(built(kind, **SMALL[kind]), batch, budget, runtime="inductor", **options)
    found_loss, found = step(planned, batch)
    torch.testing.assert_close(loss, found_loss, **CLOSE)
    torch.testing.assert_close(gradients, found, **CLOSE)
    torch.testing.assert_close(list(references[kind].buffers()), list(planned.buffers()), **CLOSE)
    assert within(planned, budget)
    assert planned.runs == {"planned": 2}


def test_recomputations_survive_the_compiler(options: dict[str, Any]) -> None:
    """Compiled parts do as many FLOPs in products as the plan says, more than the step without a plan.

    Dropout is on: its numbers are eager's, first and again, and the generator ends where eager's does.
    """
    batch = sample(Blocks)
    original = built(Blocks, dropout=0.2, depth=1)
    with MemoryMeter(original) as unplanned:
        loss, gradients = step(original, batch)
    state = torch.get_rng_state()
    eager = Hiremate(built(Blocks, dropout=0.2, depth=1), batch, "50%", **options)
    with MemoryMeter(eager) as planned:
        step(eager, batch)
    compiled = Hiremate(
        built(Blocks, dropout=0.2, depth=1),
        batch,
        2 * eager.plan.budget_nbytes,
        plan=eager.plan,
        runtime="inductor",
    )
    with MemoryMeter(compiled) as meter:
        found_loss, found = step(compiled, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert compiled.plan.schedule == eager.plan.schedule
    assert unplanned.flops < planned.flops == meter.flops
    torch.testing.assert_close(loss, found_loss, **CLOSE)
    torch.testing.assert_close(gradients, found, **CLOSE)


def test_no_piece_holds_an_op_and_its_repeat(options: dict[str, Any]) -> None:
    """What is compiled at once computes nothing twice; run uncompiled it is exact, at the plan's peak."""
    seen: list[GraphModule] = []

    def keep(module: GraphModule, tensors: list[Tensor]) -> GraphFunction:
        seen.append(module)
        return module.forward

    model, batch = built(Convs), sample(Convs)
    loss, gradients = step(model, batch)
    planned = run_by(lambda: Inductor(keep), built(Convs), batch, "40%", options)
    found_loss, found = step(planned, batch)
    assert torch.equal(loss, found_loss)
    assert all(map(torch.equal, gradients, found))
    assert all(map(torch.equal, model.buffers(), planned.buffers()))
    assert planned.rehearsed_nbytes == planned.plan.peak_nbytes
    assert planned.plan.schedule != save_all(planned.graph).schedule
    # Convolutions of one piece differ in what they read; a repeat would read the same.
    convolution = torch.ops.aten.convolution.default
    repeats = 0
    for module in {id(m): m for m in seen}.values():
        reads = [n.args[:2] for n in module.graph.find_nodes(op="call_function", target=convolution)]
        assert len(reads) == len(set(reads))
        repeats += len(reads)
    assert repeats > 8


class _Hungry:
    """Inductor with a number of bytes held in each part, as a compiler might."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, module: GraphModule, interface: GraphInterface) -> GraphFunction:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            scratch = torch.empty(self.nbytes, dtype=torch.uint8)
            results = list(module.forward(tensors))
            del scratch
            return results

        return run


def test_a_runtime_that_takes_more_is_planned_tighter(options: dict[str, Any]) -> None:
    """The plan leaves a margin for what the runtime needs, and the step is exact and within the budget."""
    batch = sample(Blocks)
    model = built(Blocks, dropout=0.2)
    loss, gradients = step(model, batch)
    plain = Hiremate(built(Blocks, dropout=0.2), batch, "60%", **options)
    planned = run_by(lambda: _Hungry(50_000), built(Blocks, dropout=0.2), batch, "60%", options)
    assert planned.plan.peak_nbytes <= plain.plan.budget_nbytes - 50_000
    found_loss, found = step(planned, batch)
    assert torch.equal(loss, found_loss)
    assert all(map(torch.equal, gradients, found))
    assert within(planned, "60%")


def test_a_runtime_that_takes_far_too_much(options: dict[str, Any]) -> None:
    """One line that names its peak and an advised budget, which is enough; also without a margin planner."""
    batch = sample(Blocks)

    def hungry() -> _Hungry:
        return _Hungry(1 << 20)

    with pytest.raises(StepOverBudget, match=r'needs .* of a budget of .*runtime="eager"') as caught:
        run_by(hungry, built(Blocks), batch, "60%", options)
    assert caught.value.peak_nbytes > caught.value.budget_nbytes
    advised_nbytes = caught.value.advised_nbytes
    assert f"({advised_nbytes} bytes)" in str(caught.value)
    advised = run_by(hungry, built(Blocks), batch, advised_nbytes, options)
    step(advised, batch)
    assert within(advised, advised_nbytes)

    def exactly(graph: Graph) -> Plan:
        plan = save_all(graph)
        return attrs.evolve(plan, budget_nbytes=plan.peak_nbytes)

    cache = options["cache_dir"]
    with pytest.raises(StepOverBudget):
        PlannedModule(built(Blocks), (batch,), {}, exactly, runtime=hungry, cache_dir=cache)


def test_measuring_the_peak_changes_nothing(options: dict[str, Any]) -> None:
    """Buffers, gradients, hooks and the generator are as before a module is built."""
    model = built(Convs)
    fired: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(fired.append)
        parameter.register_post_accumulate_grad_hook(fired.append)
    buffers = [b.clone() for b in model.buffers()]
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    run_by(lambda: _Hungry(0), model, sample(Convs), "80%", options)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers()))
    assert versions == [t._version for t in (*model.parameters(), *model.buffers())]
    assert all(p.grad is None for p in model.parameters())
    assert fired == []


def test_a_fresh_process_takes_everything_apart() -> None:
    """Torch takes max pooling apart with a module of its own that only a first compilation imports."""
    code = (
        "import torch\n"
        "from torch.fx.experimental.proxy_tensor import make_fx\n"
        "from remat_executor.torch_private.inductor import inductor_decompositions\n"
        "table = inductor_decompositions()\n"
        "pool = lambda x: torch.max_pool2d(x, 3)\n"
        "traced = make_fx(pool, table, tracing_mode='fake')(torch.ones(1, 1, 6, 6))\n"
        "assert traced(torch.ones(1, 1, 6, 6)).shape == (1, 1, 2, 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_part_that_cannot_be_compiled_runs_uncompiled(options: dict[str, Any]) -> None:
    """With one warning, and then exactly as planned."""

    def fails(module: GraphModule, tensors: list[Tensor]) -> GraphFunction:
        raise NotImplementedError("no such kernel")

    batch, model = sample(Blocks), built(Blocks)
    loss, gradients = step(model, batch)
    with pytest.warns(RematWarning, match="no such kernel.*uncompiled") as caught:
        planned = run_by(lambda: Inductor(fails), built(Blocks), batch, "60%", options)
    assert [warning.filename for warning in caught] == [__file__]
    found_loss, found = step(planned, batch)
    assert torch.equal(loss, found_loss)
    assert all(map(torch.equal, gradients, found))


def test_a_runtime_that_is_not_there(options: dict[str, Any]) -> None:
    """One clear line before any work: an unknown name, no CUDA device, no compiler."""
    batch, model = sample(Blocks), built(Blocks)
    for unknown in ("tensorrt", None, 3):
        with pytest.raises(BadInput, match="not one of 'eager', 'inductor', 'cudagraph'"):
            Hiremate(model, batch, "60%", runtime=unknown, **options)
    with pytest.raises(BadInput, match='needs a CUDA device, and the model is on cpu; use runtime="eager"'):
        Hiremate(model, batch, "60%", runtime="cudagraph", **options)
    with pytest.raises(BadInput, match="needs a C\\+\\+ compiler"):
        runtime_factory("inductor", torch.device("cpu"), missing=lambda device_type: "a C++ compiler")
