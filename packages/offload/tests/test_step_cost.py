"""The cost of an update is measured on what an update does: chunks, states, and a master's two roundings."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat_offload.optimizer.chunking import CHUNK_NUMEL
from remat_offload.optimizer.step_cost import update_cost

CPU = torch.device("cpu")


class Copies(TorchDispatchMode):
    """Records the dtypes and elements of copies from one dtype to another."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.dtype, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            self.found.append((args[1].dtype, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


class Watched(torch.optim.AdamW):
    """Records what it steps."""

    seen: list[tuple[torch.dtype, int]]

    def step(self, closure: Any = None) -> None:
        self.seen += [(p.dtype, p.numel()) for group in self.param_groups for p in group["params"]]
        super().step(closure)


def watched() -> Watched:
    optimizer = Watched([torch.nn.Parameter(torch.zeros(3))], lr=1e-3)
    optimizer.seen = []
    return optimizer


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_a_large_parameter_is_stepped_in_chunks(narrow: torch.dtype | None) -> None:
    optimizer = watched()
    numel = CHUNK_NUMEL + 64
    cost = update_cost(optimizer, optimizer.param_groups[0], torch.float32, CPU, (numel,), narrow)
    whole, again, *chunks = optimizer.seen  # two of the whole create the states and measure the workspace
    assert whole == again == (torch.float32, numel)
    assert set(chunks) == {(torch.float32, CHUNK_NUMEL), (torch.float32, 64)}
    assert cost.s_per_element > 0
    assert not optimizer.state


def test_a_master_is_widened_and_rounded_as_in_an_update() -> None:
    optimizer = watched()
    group = optimizer.param_groups[0]
    with Copies() as copies:
        update_cost(optimizer, group, torch.float32, CPU, (4, 1000), None)
    assert not copies.found
    with Copies() as copies:
        update_cost(optimizer, group, torch.float32, CPU, (4, 1000), torch.bfloat16)
    widened = (torch.bfloat16, torch.float32, 4000)
    rounded = (torch.float32, torch.bfloat16, 4000)
    runs = len(optimizer.seen) // 2 - 2
    assert copies.found.count(widened) == copies.found.count(rounded) == runs


@pytest.mark.parametrize("shape", [(7, 11), (5,), ()])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_states_and_shapes_are_stepped_too(kind: Any, shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = kind([parameter], lr=0.1)
    before: Tensor = parameter.detach().clone()
    cost = update_cost(optimizer, optimizer.param_groups[0], torch.float32, CPU, shape, torch.bfloat16)
    assert cost.s_per_element > 0
    assert torch.equal(parameter, before)
