"""An output that the loss does not use: its zeros are checked with one wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat_facade import Offmate
from remat_graph import Placement
from tests.helpers.offmates import offmate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
WIDTH = 32


class TwoOutputs(nn.Module):
    """Both outputs depend on every layer but the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square(), x.exp()


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value, each of which waits for the device of the tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_one_wait_where_gradients_move(device: str, tmp_path: Path) -> None:
    """However many parts the backward has; once for the host, once for the device."""
    model = TwoOutputs().to(device)
    x = torch.ones(4, WIDTH, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ours: Offmate = offmate(model, x, "24KiB", optimizer=optimizer, cache_dir=tmp_path, part_nbytes=0)
    assert sum(v.placement is Placement.HOST for v in ours.graph.values) > 2
    assert ours.parts > 4
    reads = Reads()
    loss = ours(x)[0].sum()
    with reads:
        loss.backward()
    assert device == "cuda" or reads.count == 1  # autograd's thread of a GPU does not see the mode
    expected = TwoOutputs().to(device)
    expected(x)[0].sum().backward()
    grads = [p.grad.to("cpu") for p in expected.parameters() if p.grad is not None]
    found = [p.grad.to("cpu") for p in ours.module.parameters() if p.grad is not None]
    assert all(map(torch.equal, grads, found))
    ours.close()
