"""``torch.compile(model, backend="remat")``: exact, within the budget, for every shape that comes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, RematWarning, allocator_peak
from remat_facade import BadOption
from remat_facade.integrations.dynamo import remat
from remat_solvers import InfeasibleBudget
from tests.helpers.models import Block


class Network(nn.Module):
    """Blocks with dropout, a batch norm, two outputs; `broken` puts a graph break in the middle."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4, 0.1) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.broken = broken

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.broken and index == 0:
                torch._dynamo.graph_break()
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return x.square().mean(), x


def network(**options: Any) -> Network:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network(**options)


def batch(length: int = 24, size: int = 4) -> Tensor:
    """A batch of sequences."""
    return torch.randn(size, length, 32, generator=torch.Generator().manual_seed(length))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """What one test compiled is not the next one's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Compiles with a quick search and one cost cache for the module."""
    quick = {"time_limit_s": 1.0, "cache_dir": tmp_path_factory.mktemp("costs")}

    def compiled(model: nn.Module, budget: int | str, *, dynamic: bool | None = None, **options: Any) -> Any:
        options = quick | {"budget": budget} | options
        return torch.compile(model, backend="remat", dynamic=dynamic, options=options)

    return compiled


def step(call: Callable[[Tensor], Any], x: Tensor, parameters: list[Tensor], seed: int = 5) -> list[Tensor]:
    """Outputs, the gradient of the input and of the parameters, and the generator's end state."""
    x = x.clone().requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(seed)
    outputs = call(x)
    outputs[0].backward()
    assert x.grad is not None
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters)
    return [*(o.detach() for o in outputs), x.grad, *gradients, torch.get_rng_state()]


def peak_nbytes(call: Callable[[Tensor], Any]) -> int:
    """The allocator's peak of one step of `step`'s kind, gradients in."""
    x = batch().requires_grad_()

    def once() -> None:
        call(x)[0].backward()

    return allocator_peak(once).peak_nbytes


def same(model: nn.Module, original: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether one step of each gives the same bits, buffers included."""
    expected = step(original, x, list(original.parameters()))
    actual = step(call, x, list(model.parameters()))
    assert len(expected) == len(actual)
    pairs = [*zip(expected, actual, strict=True), *zip(original.buffers(), model.buffers(), strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


def test_it_is_found_by_name() -> None:
    """The entry point is there."""
    assert "remat" in torch.compiler.list_backends()


@pytest.mark.parametrize("budget", ["100%", "60%", "40%"])
def test_steps_are_exact_and_within_the_budget(budget: str, compiled: Callable[..., Any]) -> None:
    """Two steps bitwise as eager's, with dropout and buffers; the allocator stays within the budget."""
    told: list[str] = []
    model, original = network(), network()
    eager = peak_nbytes(original)
    original = network()
    call = compiled(model, budget, on_progress=told.append)
    assert same(model, original, call, batch())
    assert same(model, original, call, batch())
    model.zero_grad()
    found = peak_nbytes(call)
    assert found <= eager
    (planning,) = {line for line in told if " ops in " in line}
    amount, unit = planning.rpartition(" ops in ")[2].split()
    assert found <= 1.01 * float(amount) * {"KiB": 2**10, "MiB": 2**20}[unit]


def test_a_budget_in_bytes_holds(compiled: Callable[..., Any]) -> None:
    """The smallest budget that the error names works, and the allocator stays within it."""
    with pytest.raises(InfeasibleBudget) as caught:
        compiled(network(), 1)(batch().requires_grad_())
    torch.compiler.reset()
    model = network()
    call = compiled(model, caught.value.smallest_nbytes)
    assert same(model, network(), call, batch())
    model.zero_grad()
    found = peak_nbytes(call)
    assert found <= caught.value.smallest_nbytes


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_that_change(dynamic: bool | None, compiled: Callable[..., Any]) -> None:
    """Each size is planned when it comes, also inside one graph with symbolic sizes."""
    model, original = network(), network()
    call = compiled(model, "60%", dynamic=dynamic)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(same(model, original, call, batch(length)) for length in (24, 16, 20, 24))
    assert any("planning again" in str(w.message) for w in caught)
    assert {w.category for w in caught} == {RematWarning}


def test_without_gradients_the_graph_runs_as_it_is(compiled: Callable[..., Any]) -> None:
    """Nothing is planned, not even at a budget that nothing fits."""
    model, original = network().eval(), network().eval()
    call = compiled(model, 1)
    with torch.no_grad():
        assert torch.equal(original(batch())[1], call(batch())[1])


def test_a_frozen_model_runs_as_it_is(compiled: Callable[..., Any]) -> None:
    """With gradients on and nothing that requires one."""
    model = network().eval().requires_grad_(False)
    call = compiled(model, 1)
    assert torch.equal(model(batch())[1], call(batch())[1])


def test_graph_breaks_are_told(compiled: Callable[..., Any]) -> None:
    """Several graphs in one step: exact still, and one warning that the budget is for each."""
    model, original = network(broken=True), network()
    call = compiled(model, "80%")
    with pytest.warns(RematWarning, match="compiled into several graphs, and each keeps") as caught:
        assert same(model, original, call, batch())
    assert len([w for w in caught if "several graphs" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(model, original, call, batch())


class Sorted(nn.Module):
    """Between two breaks, a piece that returns nothing to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x).tanh()
        torch._dynamo.graph_break()
        best = hidden.argmax(-1)
        torch._dynamo.graph_break()
        return hidden * 2, best


@pytest.mark.filterwarnings("ignore:the model is compiled into several graphs")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks for it
def test_a_piece_with_nothing_to_differentiate_runs_as_it_is(compiled: Callable[..., Any]) -> None:
    """Beside pieces that are planned, at every call."""
    model, x = Sorted(), torch.randn(16, 8)
    call = compiled(model, "100%")
    wanted, best = model(x)
    for _ in range(2):
        found, found_best = call(x)
        assert torch.equal(wanted, found)
        assert torch.equal(best, found_best)
        found.sum().backward()


def test_another_runtime(compiled: Callable[..., Any]) -> None:
    """Options reach the planned module; what it refuses is one line at the first call."""
    with pytest.raises(BadInput, match="needs a CUDA device"):
        compiled(network(), "60%", runtime="cudagraph")(batch())


def test_outputs_that_are_dropped(compiled: Callable[..., Any]) -> None:
    """The option is that of `Rockmate`: exact, and within a budget that kept outputs exceed."""
    model, original = network(), network()
    call = compiled(model, "60%", outputs="dropped")
    x = batch()
    for one in (call, original):
        torch.manual_seed(5)
        one(x)[0].backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    torch.manual_seed(5)
    held = call(x)
    with pytest.warns(RematWarning, match="are still held when the backward begins"):
        held[0].backward()


def test_gradients_that_are_present_are_refused(compiled: Callable[..., Any]) -> None:
    """Parameters are inputs of Dynamo's graphs, so the option would do nothing. Other words are one line."""
    with pytest.raises(BadOption, match=r"'gradients' \"present\" does nothing here: Dynamo passes"):
        compiled(network(), "60%", gradients="present")(batch())
    with pytest.raises(BadInput, match="gradients is 'old', not one of 'auto', 'new', 'present'"):
        compiled(network(), "60%", gradients="old")(batch())
    with pytest.raises(BadInput, match="outputs is 'gone', not one of 'kept', 'dropped'"):
        compiled(network(), "60%", outputs="gone")(batch())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (None, "'budget' is missing"),
        ({"runtime": "eager"}, "'budget' is missing"),
        ({"budget": "1GiB", "bugdet": 3}, "'bugdet' is not known; known are buckets, budget, "),
        ({"budget": "1GiB", "sample": 3}, "'sample' is not known"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any] | None, text: str) -> None:
    """One clear line, not wrapped into an error of Dynamo's."""
    call = torch.compile(network(), backend="remat", options=options)
    with pytest.raises(BadOption) as caught:
        call(batch())
    assert text in str(caught.value)
    assert text.startswith(f"'{caught.value.option}' ")
    assert "\n" not in str(caught.value)


def test_the_mode_is_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs that take a backend and a mode from their users; or the environment has it."""
    call = torch.compile(network(), backend="remat", mode="1000B")
    with pytest.raises(InfeasibleBudget, match="budget 1000 B is too small"):
        call(batch())
    monkeypatch.setenv("REMAT_BUDGET", "1000B")
    call = torch.compile(network(), backend="remat")
    with pytest.raises(InfeasibleBudget, match="budget 1000 B is too small"):
        call(batch())
    for mode in ("1MiB", "auto"):
        model = network()
        call = torch.compile(model, backend="remat", mode=mode)
        assert same(model, network(), call, batch())


def test_a_mode_that_is_no_budget() -> None:
    """The other modes are Inductor's. Torch refuses a mode beside options, and so does the backend."""
    call = torch.compile(network(), backend="remat", mode="reduce-overhead")
    with pytest.raises(BadOption, match="'mode' is the budget, as in mode=\"2GiB\": "):
        call(batch())
    call = torch.compile(network(), backend="remat", mode="40")
    with pytest.raises(BadOption, match=r"'mode' is the budget.*has no unit, so it would be 40 B"):
        call(batch())
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    both = remat(graph, [], mode="1GiB", options={"budget": "1GiB"})
    with pytest.raises(BadOption, match="'mode' is a budget, and the options have one: give either"):
        both(torch.ones(2, 2))


def test_what_it_compiles_stays_the_users(compiled: Callable[..., Any]) -> None:
    """Training with an optimizer, and a copy of the model, go on as without a plan."""
    model, original = network(), network()
    call = compiled(model, "60%")
    for module, forward in ((model, call), (original, original)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for seed in range(3):
            step(forward, batch(), list(module.parameters()), seed)
            optimizer.step()
    states = (copy.deepcopy(model).state_dict(), original.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
