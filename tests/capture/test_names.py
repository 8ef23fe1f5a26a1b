"""Values and ops of a captured step have unique names, whatever the model calls its tensors."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from remat_executor import estimated_graph
from remat_executor.translation.unique_names import with_unique_names
from remat_executor.ways.registry import EXACT
from remat_graph import Graph, Roofline, Value, load_graph, save_graph, verify
from tests.helpers.acceptance import whole_step
from tests.helpers.models import CASES, ModelCase


class Centered(nn.Module):
    """Buffers and a parameter with the names that ops of the step have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mul", torch.ones(8))
        self.rng_native_dropout = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """A dropout, two products, and a mean that is written to a buffer."""
        y = nn.functional.dropout(self.linear(x), 0.5) * self.mul * self.rng_native_dropout
        mean = y.detach().mean(0)
        self.mean.copy_(mean)
        result: Tensor = (y - mean).square().mean()
        return result


def test_a_graph_whose_buffers_are_called_as_its_ops_can_be_saved_and_loaded(tmp_path: Path) -> None:
    graph = estimated_graph(Centered(), (torch.randn(4, 8),), {}, Roofline(), ways=EXACT)
    verify(graph)
    assert {"mean", "mean_2", "mul"} <= {value.name for value in graph.values}
    save_graph(graph, tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    assert (loaded.values, loaded.ops) == (graph.values, graph.ops)


def test_a_new_name_is_not_the_name_of_a_later_value() -> None:
    values = [Value(name=name, nbytes=1, external=True) for name in ("a", "a", "a_2", "a", "b")]
    made = with_unique_names(Graph(name="names", values=values, ops=()))
    assert [value.name for value in made.values] == ["a", "a_3", "a_2", "a_4", "b"]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.ci else pytest.mark.full) for c in CASES]
)
def test_the_graph_of_a_model_is_valid(case: ModelCase) -> None:
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    for ways in ((), EXACT):
        verify(estimated_graph(model, args, kwargs, Roofline(), ways=ways))
