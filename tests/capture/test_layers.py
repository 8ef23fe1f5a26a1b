"""Every op of a captured step knows the submodule that it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from remat_executor import estimated_graph, step_graph
from remat_facade import limit_memory, planned
from remat_facade.integrations.dynamo import remat
from remat_graph import Graph, Role, Roofline, fingerprint
from tests.helpers.models import get_case

SEEN_BOTH_WAYS = frozenset(
    {"addmm", "mm", "bmm", "convolution", "embedding", "native_layer_norm", "relu", "gelu", "tanh"}
    | {"max_pool2d_with_indices", "_log_softmax", "sigmoid", "hardtanh"}
)
"""Operators that eager runs as capture records them."""


class Oracle(TorchDispatchMode):
    """Counts operators by the submodule that runs them, which hooks tell."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = [""]
        self.found: Counter[tuple[str, str]] = Counter()
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
                module.register_forward_hook(lambda *_: self.left())

    def left(self) -> None:
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[short(str(func)), self.running[-1]] += 1
        return func(*args, **(kwargs or {}))


def short(target: str) -> str:
    """The operator's name; in-place operators have that of the others."""
    return target.split(".")[1].rstrip("_") if target.startswith("aten.") else target


def graph_of(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    return step_graph(model, args, kwargs, platform=Roofline())


def forward_layers(graph: Graph) -> list[tuple[str, str]]:
    return [(short(op.target), op.layer) for op in graph.ops if not op.backward]


@pytest.mark.parametrize(
    "name", ["gpt2", "t5", "resnet18", "unet_dropout", "lstm", "checkpointed", "shared_layer"]
)
def test_the_forward_is_as_hooks_see_it(name: str) -> None:
    """Each operator as often in each layer as in eager."""
    case = get_case(name)
    args, kwargs = case.sample(0)
    graph = graph_of(case.build(), *args, **kwargs)
    model = case.build()
    with Oracle(model) as oracle:
        model(*args, **kwargs)
    expected = Counter({key: count for key, count in oracle.found.items() if key[0] in SEEN_BOTH_WAYS})
    found = Counter(key for key in forward_layers(graph) if key[0] in SEEN_BOTH_WAYS)
    assert len(expected) >= 3
    assert expected == found


@pytest.mark.parametrize("name", ["llama", "resnet18", "unet_dropout"])
def test_gradients_are_made_in_the_layers_of_their_parameters(name: str) -> None:
    """Where a parameter belongs to one submodule, whose call is the only one that reads it."""
    case = get_case(name)
    args, kwargs = case.sample(0)
    graph = graph_of(case.build(), *args, **kwargs)
    checked = 0
    for value in graph.gradients:
        owner, maker = graph.values[value].of, graph.producer[value]
        assert owner is not None
        assert maker is not None
        assert graph.values[owner].name.rpartition(".")[0] == graph.ops[maker].layer
        checked += 1
    assert checked == sum(value.role is Role.GRAD for value in graph.values) > 20


class Own(torch.autograd.Function):
    """A sine with a backward in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(x)


class Caller(nn.Module):
    """Nested containers, a module used twice and by two names, a direct call of `forward`, bare functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
        self.twice = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.alias = self.twice["a"]
        self.own = Sine()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alias(F.relu(self.alias(self.stem(x))))
        x = checkpoint(self.own, x, use_reentrant=False)
        return torch.exp(self.norm.forward(x)).sum()


def test_shared_submodules_containers_and_functions() -> None:
    """A module with two names has its first; what no submodule's call runs belongs to the model."""
    graph = graph_of(Caller(), torch.randn(3, 4))
    expected = [("addmm", "stem.0"), ("tanh", "stem.1.0"), ("addmm", "stem.1.1"), ("addmm", "twice.a")]
    expected += [("relu", ""), ("addmm", "twice.a"), ("sin", "own")]
    assert expected == forward_layers(graph)[:7]
    assert {""} == {layer for _, layer in forward_layers(graph)[7:]}
    backward = [(short(op.target), op.layer) for op in graph.ops if op.backward]
    assert ("cos", "own") in backward
    assert ("tanh_backward", "stem.1.0") in backward
    assert ("threshold_backward", "") in backward
    assert 2 == sum(
        key == ("add", "twice.a") for key in backward
    )  # of both uses: the weight's and the bias's


def test_a_sum_of_tangents() -> None:
    """Two outputs pass their tangents on unchanged: no layer makes a gradient before they are added."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return y + x, y + 1

    graph = graph_of(Twice(), torch.randn(3, 4))
    backward = [(short(op.target), op.layer) for op in graph.ops if op.backward]
    assert [("add", ""), ("mm", "first"), ("sum", "first")] == backward


def test_a_model_that_raises_inside_and_goes_on() -> None:
    """The layers after an exception are right."""

    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(x.shape)

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.refuses, self.last = Refuses(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.refuses(x)
            except ValueError:
                return self.last(x.exp()).sum()

    graph = graph_of(Tries(), torch.randn(3, 4))
    assert [("exp", ""), ("addmm", "last"), ("sum", "")] == forward_layers(graph)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_submodule_is_one_layer() -> None:
    """Its operators have its name."""
    scripted: nn.Module = torch.jit.script(nn.Sequential(nn.GELU(), nn.Tanh()))
    graph = graph_of(nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 4)), torch.randn(3, 4))
    assert [("addmm", "0"), ("gelu", "1"), ("tanh", "1"), ("addmm", "2")] == forward_layers(graph)


def test_names_change_no_fingerprint() -> None:
    """Two models whose submodules have other names may share a plan."""
    one = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    other = nn.Sequential()
    for name, layer in zip(("a", "b", "c"), one, strict=True):
        other.add_module(name, layer)
    x = torch.randn(3, 4)
    graphs = [graph_of(model, x) for model in (one, other)]
    assert ["0", "1", "2"] == list(dict.fromkeys(layer for _, layer in forward_layers(graphs[0])))
    assert ["a", "b", "c"] == list(dict.fromkeys(layer for _, layer in forward_layers(graphs[1])))
    assert fingerprint(graphs[0]) == fingerprint(graphs[1])


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What one test compiled is not the next one's."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_has_the_layers_of_the_original() -> None:
    """Dynamo's graph has no submodules, but knows where its nodes come from."""
    found: list[Graph] = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        run = remat(graph, inputs, options={"budget": "100%"})

        def spy(*args: Any) -> Any:
            result = run(*args)
            found.append(run.planned.graph)  # type: ignore[attr-defined]
            return result

        return spy

    case = get_case("gpt2")
    args, kwargs = case.sample(0)
    model = case.build()
    model.loss_type = "ForCausalLM"  # or it logs a warning, where Dynamo stops
    torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs).loss.backward()
    original = graph_of(case.build(), *args, **kwargs)
    chosen = [[key for key in forward_layers(g) if key[0] in SEEN_BOTH_WAYS] for g in (original, found[0])]
    assert chosen[0] == chosen[1]
    layers = [{op.layer for op in graph.ops if op.backward} for graph in (original, found[0])]
    assert layers[0] == layers[1]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
def test_a_compiled_function_inside_a_layer() -> None:
    """Capture goes on, and the layers around it are right."""

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.function = torch.compile(torch.relu, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.function(self.first(x))).sum()

    graph = graph_of(Compiled(), torch.randn(3, 4))
    assert [("addmm", "first"), ("relu", ""), ("addmm", "last"), ("sum", "")] == forward_layers(graph)


def test_an_estimate_knows_layers_too() -> None:
    """Captured for a device that is not here."""
    graph = estimated_graph(Caller(), (torch.randn(3, 4),), {}, Roofline())
    assert {"stem.0", "stem.1.0", "twice.a", "own"} <= {op.layer for op in graph.ops}


def test_the_summary_names_the_layers() -> None:
    """Of a planned model, blocks folded."""
    case = get_case("gpt2")
    args, kwargs = case.sample(0)
    model = case.build()
    limit_memory(model, "40%")
    model(*args, **kwargs).loss.backward()
    (line,) = [line for line in planned(model).plan.summary().splitlines() if "recomputed in" in line]
    assert "transformer.h.*" in line
