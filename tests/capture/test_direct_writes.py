"""A call writes a buffer itself where nothing can tell when it does, and the numbers are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from torch import Tensor, nn, ones

from remat_executor import PlanFunction, PlannedModule
from remat_executor.runtime.mutations import written
from tests.helpers.bits import same_bits
from tests.helpers.planners import repeat_at_random, save_all


class Counting(nn.Module):
    """Layers with batch norms, and buffers that a function writes."""

    scale: Tensor

    def __init__(self, write: Callable[[Counting, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.layers = nn.Sequential()
        for _ in range(3):
            self.layers.extend((nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SELU()))
        self.register_buffer("scale", ones(4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, self.layers(x)).sum()


def nothing(model: Counting, x: Tensor) -> Tensor:
    return x


def by_a_number(model: Counting, x: Tensor) -> Tensor:
    model.scale.mul_(1.1)
    return x


def by_what_is_computed(model: Counting, x: Tensor) -> Tensor:
    model.scale.add_(x.detach().mean(0))
    return x


def read_after(model: Counting, x: Tensor) -> Tensor:
    model.scale.mul_(1.1)
    return x * model.scale


def read_before(model: Counting, x: Tensor) -> Tensor:
    x = x + model.scale
    model.scale.mul_(1.1)
    return x


def twice(model: Counting, x: Tensor) -> Tensor:
    model.scale.mul_(1.1).add_(1)
    return x


def by_itself(model: Counting, x: Tensor) -> Tensor:
    model.scale.mul_(model.scale)
    return x


def in_part(model: Counting, x: Tensor) -> Tensor:
    model.scale[:2].mul_(1.1)
    return x


def replaced(model: Counting, x: Tensor) -> Tensor:
    model.scale.copy_(x.detach()[0])
    return x


DIRECT = [nothing, by_a_number, by_what_is_computed]
COPIED = [read_after, read_before, twice, by_itself, in_part]


def trained(write: Callable[[Counting, Tensor], Tensor], planner: PlanFunction) -> PlannedModule:
    """The planned module, after four steps that gave eager's bits."""
    x = ones(3, 4).cumsum(0).sin()
    eager = Counting(write)
    model = copy.deepcopy(eager)
    module = PlannedModule(model, (x,), {}, planner)
    for _ in range(4):
        for each in (eager, module):
            each.zero_grad()
            each(x).backward()
        for name, value in eager.state_dict().items():
            assert same_bits(value, model.state_dict()[name]), name
        for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            assert same_bits(theirs.grad, ours.grad)
    return module


def copies(module: PlannedModule) -> int:
    return sum(op.target == "aten.copy_.default" for op in module.graph.ops)


@pytest.mark.parametrize("planner", [save_all, repeat_at_random(60)], ids=["once", "repeated"])
@pytest.mark.parametrize("write", [*DIRECT, *COPIED, replaced])
def test_buffers_become_what_they_become_in_eager(
    write: Callable[[Counting, Tensor], Tensor], planner: PlanFunction
) -> None:
    """Also where ops are repeated: nothing is added twice."""
    trained(write, planner)


@pytest.mark.parametrize("write", DIRECT)
def test_no_copy_is_needed(write: Callable[[Counting, Tensor], Tensor]) -> None:
    """The batches that each norm has seen are counted in place too."""
    module = trained(write, save_all)
    assert copies(module) == 0
    names = [value.name for value in module.graph.values]
    writes = [op for op in module.graph.ops if "num_batches_tracked" in names[op.first.outputs[0]]]
    assert len(writes) == 3
    assert all(op.rerun is None for op in writes)


@pytest.mark.parametrize("write", COPIED)
def test_what_else_reads_a_buffer_or_its_new_content_decides(
    write: Callable[[Counting, Tensor], Tensor],
) -> None:
    assert copies(trained(write, save_all)) == 1


def test_runtimes_see_what_is_written() -> None:
    """Compiled and recorded graphs must write it as well."""
    module = trained(by_a_number, save_all)
    (forward,) = module._remat.latest.program.forward.graphs
    values = [module.graph.values[forward.reads[i]].name for i in written(forward.module)]
    assert "scale" in values
    assert sum("num_batches_tracked" in name for name in values) == 3
