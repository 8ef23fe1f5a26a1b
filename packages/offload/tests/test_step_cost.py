"""The cost of an update is measured on what an update does: chunks, states, and a master's two roundings."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat_offload.optimizer import step_cost
from remat_offload.optimizer.chunking import CHUNK_NUMEL
from remat_offload.optimizer.step_cost import update_cost

from .optimizers import Filled

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
    # Two of the whole create the states and measure the workspace; the last ones are of few elements.
    whole, again, *chunks = [each for each in optimizer.seen if each[1] > 2]
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
    of_the_whole = [numel for _, numel in optimizer.seen if numel == 4000]
    runs = len(of_the_whole) // 2 - 2
    assert copies.found.count(widened) == copies.found.count(rounded) == runs


def test_a_small_parameter_takes_as_long_as_its_issue() -> None:
    """Of many small parameters, elements alone would predict next to nothing."""
    optimizer = watched()
    cost = update_cost(optimizer, optimizer.param_groups[0], torch.float32, CPU, (1 << 20,), None)
    assert cost.s_per_element < 1e-6 < cost.issue_s
    assert cost.alone_s(2) == cost.issue_s
    many = 1 + int(cost.issue_s / cost.s_per_element)
    assert cost.alone_s(2 * many) == cost.s_per_element * 2 * many


@pytest.mark.parametrize("shape", [(7, 11), (5,), ()])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, Filled])
def test_other_states_and_shapes_are_stepped_too(kind: Any, shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = kind([parameter], lr=0.1)
    before: Tensor = parameter.detach().clone()
    cost = update_cost(optimizer, optimizer.param_groups[0], torch.float32, CPU, shape, torch.bfloat16)
    assert cost.s_per_element > 0
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_updates_are_measured_in_memory_of_their_kind(narrow: torch.dtype | None) -> None:
    """Tensors, states and masters, on several copies by turns: until its next turn each has left caches."""
    taken: list[Tensor] = []

    def host_memory(nbytes: int) -> Tensor:
        taken.append(torch.empty(nbytes, dtype=torch.uint8))
        return taken[-1]

    stepped: list[int] = []

    class Noted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            stepped.extend(p.data_ptr() for group in self.param_groups for p in group["params"])
            super().step(closure)

    numel = 1 << 12
    optimizer = Noted([torch.nn.Parameter(torch.zeros(3))], lr=1e-3)
    update_cost(optimizer, optimizer.param_groups[0], torch.float32, CPU, (numel,), narrow, host_memory)
    own = {block.data_ptr(): block.numel() for block in taken}
    turns = [address for address in stepped if own.get(address) == 4 * numel]
    assert len(set(turns)) == 8
    assert all(one != other for one, other in itertools.pairwise(turns))
    whole = [nbytes for nbytes in own.values() if nbytes >= 2 * numel]
    wide = [4 * numel] * 8
    narrowed = [2 * numel] * 16
    assert sorted(whole) == sorted(4 * wide if narrow is None else 3 * wide + narrowed)


def test_an_update_on_the_cpu_takes_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time is of one that nothing else has slowed down."""
    seconds = itertools.cycle([1.0, 3.0, 5.0])
    monkeypatch.setattr(step_cost, "_wall_s", lambda take: next(seconds))
    optimizer = watched()
    cost = update_cost(optimizer, optimizer.param_groups[0], torch.float32, CPU, (100,), None)
    assert (3.0, 0.03) == (cost.issue_s, cost.s_per_element)
