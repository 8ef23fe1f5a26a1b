"""Capture with torch's cache of inferred results sees the storages that it sees without."""

import pytest
import torch
from torch import Tensor, nn

from remat_executor import torch_private
from remat_executor.capture import capture
from remat_executor.stepgraph import check_input
from remat_executor.translate import translate
from remat_graph import Graph


class Recurrent(nn.Module):
    """An LSTM: two of its gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


class Sliced(nn.Module):
    """Writes into a part of a tensor: the op that stands for it copies the whole storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.linear(x)
        part = whole[:, 1:3]
        part.mul_(2)
        once, again = whole.exp(), whole.exp()
        return (once * again).t()[1:].sum() + whole.split(2, 1)[1].mean()


def graph_of(module: nn.Module) -> Graph:
    tensors = check_input(module, (torch.ones(3, 4),), {})
    return translate(capture(module, tensors), tensors, name="").graph


@pytest.mark.parametrize("kind", [Recurrent, Sliced])
def test_the_graph_is_that_of_a_capture_without_the_cache(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second time, when the cache knows the ops."""
    module = kind()
    first, second = graph_of(module), graph_of(module)
    monkeypatch.setattr(torch_private, "_is_remembered_whole", lambda func: False)
    expected = graph_of(module)
    assert (expected.values, expected.ops) == (first.values, first.ops)
    assert (expected.values, expected.ops) == (second.values, second.ops)


def test_what_the_cache_remembers_whole() -> None:
    """One tensor that shows all of its storage; not what has several outputs or copies another's storage."""
    aten = torch.ops.aten
    whole = [aten.mm.default, aten.relu.default, aten.view.default]
    not_whole = [
        aten.native_dropout.default,
        aten.split.Tensor,
        aten.slice_scatter.default,
        aten.copy.default,
    ]
    assert [torch_private._is_remembered_whole(op) for op in whole] == [True] * 3
    assert [torch_private._is_remembered_whole(op) for op in not_whole] == [False] * 4
