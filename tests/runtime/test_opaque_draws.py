"""Draws become opaque operators of a compiler, whatever they return: tensors, numbers, lists."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat_executor import PlannedModule
from remat_executor.generator_state import replay
from remat_executor.runtime.opaque_ops import Opaque
from remat_executor.runtime.registry import runtime_factory
from tests.helpers.planners import repeat_at_random
from tests.helpers.residual import normal
from tests.helpers.steps import step

aten = torch.ops.aten


def opaque(target: Any, *arguments: Any, tensors: int = 0) -> Opaque:
    """A lowered graph that calls an operator on its first tensors, and repeats that from its last tensor."""
    graph = Graph()
    given = graph.placeholder("tensors")
    *reads, state = [graph.call_function(operator.getitem, (given, i)) for i in range(tensors + 1)]
    first = graph.call_function(target, (*reads, *arguments))
    again = graph.call_function(replay, (state, "cuda:0", target, *reads, *arguments))
    graph.output([graph.call_function(operator.getitem, (made, 0)) for made in (first, again)])
    return Opaque(GraphModule({}, graph))


def results(target: Any) -> list[str]:
    """The types that an operator returns."""
    return [str(returned.type) for returned in target._schema.returns]


def test_every_operator_that_draws() -> None:
    """Each functional operator of torch that is tagged as random returns the same types when it is opaque."""
    packets = {getattr(aten, name.partition("::")[2].partition(".")[0]) for name in _names("aten")}
    targets = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    targets.remove(getattr(aten.random, "from"))  # fx cannot print it
    random = [t for t in targets if torch.Tag.nondeterministic_seeded in t.tags and not t._schema.is_mutable]
    assert aten._scaled_dot_product_flash_attention.default in random
    assert len(random) >= 50  # 79 in torch 2.13
    for target in random:
        # A dropout of 0 is the default of attention kernels, and such a call draws nothing.
        names = [argument.name for argument in target._schema.arguments]
        dropout = (None,) * names.index("dropout_p") + (0.1,) if "dropout_p" in names else ()
        made = opaque(target, *dropout)
        (drawn,), (again,) = made.with_token.values(), made.pure.values()
        assert results(drawn) == [*results(target), "Tensor"], target
        assert results(again) == results(target), target


def _names(namespace: str) -> list[str]:
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return [name for name in names if name.startswith(f"{namespace}::")]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_of_cuda(dropout: float) -> None:
    """It returns two lengths as numbers, and is traced again with them; without dropout it is not opaque."""
    flash = aten._scaled_dot_product_flash_attention.default
    made = opaque(flash, dropout, True, tensors=3)
    assert made.ordered == (dropout > 0)
    with FakeTensorMode():
        tensors = [torch.empty(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        tensors += [torch.empty(16, dtype=torch.uint8), *([torch.empty(1)] if made.ordered else [])]
    traced = make_fx(torch.func.functionalize(made.flat, remove="mutations"), tracing_mode="fake")(*tensors)
    calls = [n for n in traced.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert [node.meta["val"][4:6] for node in calls] == 2 * [(512, 512)]
    assert [node.target is flash for node in calls] == [dropout == 0.0, False]


@torch.library.custom_op("remat_tests::counted_noise", mutates_args=())
def counted_noise(x: Tensor) -> tuple[Tensor, int]:
    """Draws, and returns a number too."""
    return torch.rand_like(x), x.shape[-1]


@torch.library.custom_op("remat_tests::listed_noise", mutates_args=())
def listed_noise(x: Tensor) -> list[Tensor]:
    """Draws twice, and returns a list."""
    return [torch.rand_like(x), torch.rand_like(x[0])]


counted_noise.register_fake(lambda x: (torch.empty_like(x), x.shape[-1]))
listed_noise.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x[0])])


class Noisy(nn.Module):
    """Layers with noise by operators of the user's, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2)
            (wide, narrow), (other, width) = listed_noise(x.detach()), counted_noise(x.detach())
            x = x * wide + narrow * other / width
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_repeat_is_compiled(tmp_path: Path) -> None:
    """Without a warning, it draws what the first run drew, and the generator ends where eager's does."""
    torch.manual_seed(0)
    model, x = Noisy(), normal(16, 8)
    step(model, x)
    eager, state = [p.grad for p in model.parameters()], torch.get_rng_state()
    runtime = runtime_factory("inductor", torch.device("cpu"))
    planned = PlannedModule(model, (x,), {}, repeat_at_random(30), cache_dir=tmp_path, runtime=runtime)
    for name in ("counted_noise", "listed_noise"):
        draws = {i for i, op in enumerate(planned.graph.ops) if name in op.key}
        assert any(planned.plan.schedule.order.count(i) > 1 for i in draws), name
    step(planned, x)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close([p.grad for p in model.parameters()], eager)
