"""Capture with torch's cache of inferred results sees the storages that it sees without."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

from remat_executor.capture.joint_graph import capture
from remat_executor.module.input_checks import check_input
from remat_executor.torch_private import fake_tensors
from remat_executor.translation.translate import translate
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
    kind: type[nn.Module],
) -> None:
    """Also the second time, when the cache knows the ops."""
    module = kind()
    first, second = graph_of(module), graph_of(module)
    with dynamo_config.patch(fake_tensor_cache_enabled=False):
        expected = graph_of(module)
    assert (expected.values, expected.ops) == (first.values, first.ops)
    assert (expected.values, expected.ops) == (second.values, second.ops)


def test_what_the_cache_remembers_whole() -> None:
    """Tensors that each show all of a storage of their own, and views; not what copies or keeps another's."""
    aten = torch.ops.aten
    x, y, mask = torch.ones(4, 6), torch.ones(4, 6), torch.ones(4, 6, dtype=torch.bool)
    narrow, twice = torch.empty(6, 6)[1:5], torch.ones(4, 6)
    remembered = {
        (aten.mm.default, torch.ones(4, 4)): True,
        (aten.relu.default, torch.ones(4, 6).t()): True,
        (aten.native_dropout.default, (torch.ones(4, 6), mask)): True,
        (aten.view.default, x[1:]): True,
        (aten.relu_.default, x): True,
        (aten.native_batch_norm.default, (torch.ones(4, 6), x)): True,
        (aten._unsafe_view.default, x.view(6, 4)): False,
        (aten.view.default, torch.ones(6, 4)): False,
        (aten.native_batch_norm.default, (torch.ones(4, 6), x.view(24))): False,
        (aten.relu.out, y.view(24)): False,
        (aten.to_sparse.default, x.to_sparse()): False,
        (aten.sort.default, (torch.empty(0), None)): True,
        (aten.split.Tensor, tuple(x.split(2))): False,
        (aten._thnn_fused_lstm_cell_backward.default, (twice, twice)): False,
        (aten.clone.default, narrow): False,
        (aten.clone.default, torch.empty(6, 6)[:4]): False,
        (aten.slice_scatter.default, torch.ones(4, 6)): False,
        (aten.copy.default, torch.ones(4, 6)): False,
    }
    for (op, result), expected in remembered.items():
        assert fake_tensors._is_remembered_whole(op, (x,), {"out": y}, result) is expected, op


class Untouchable(dict[Any, Any]):
    """A cache that nobody may read or fill."""

    def get(self, key: Any, default: Any = None) -> Any:
        raise AssertionError("read")

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("read")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("filled")


def test_what_others_left_in_the_cache_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own traces may have remembered results with storages that they do not have."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    planted = Untouchable()
    monkeypatch.setattr(FakeTensorMode, "cache", planted)  # as other traces in the process would
    with FakeTensorMode() as mode, pytest.raises(AssertionError, match="read"):
        mode.from_tensor(torch.ones(2)).exp()
    assert graph_of(Sliced()).ops
    assert FakeTensorMode.cache is planted
