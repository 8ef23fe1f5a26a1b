"""Operators that a user registers are planned: those that draw, and those that are one op."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from remat_executor import PlannedModule
from tests.helpers.own_operators import Opaque
from tests.helpers.planners import repeat_at_random
from tests.helpers.residual import normal
from tests.helpers.steps import assert_planned_step, pair, step


@torch.library.custom_op("remat_tests::drop", mutates_args=())
def drop(x: Tensor) -> Tensor:
    """Draws without a word of it in its schema."""
    return (torch.rand_like(x) > 0.5).to(x.dtype)


@torch.library.custom_op("remat_tests::drop_", mutates_args=["x"])
def drop_(x: Tensor) -> None:
    """The same in place."""
    x.mul_(torch.rand_like(x) > 0.5)


@torch.library.custom_op("remat_tests::draws", mutates_args=())
def draws(x: Tensor) -> list[Tensor]:
    """Two draws in a list."""
    return [torch.rand_like(x), torch.rand_like(x[0])]


drop.register_fake(torch.empty_like)


draws.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x[0])])


def _in_place(x: Tensor) -> Tensor:
    copied = x.clone()
    drop_(copied)
    return copied


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "result": drop,
    "in place": _in_place,
    "list": lambda x: torch.add(*draws(x)),
}


class Noisy(nn.Module):
    """Blocks that draw by an operator of the user's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
            x = x * NOISES[self.kind](x.detach())
        return x


@pytest.mark.parametrize("kind", NOISES)
def test_an_operator_of_the_users_that_draws(kind: str, tmp_path: Path) -> None:
    """Recomputed it draws the same numbers, and the generator ends where eager leaves it."""
    model, x = Noisy(kind), normal(512, 8)
    original = copy.deepcopy(model)
    planned = PlannedModule(model, (x,), {}, repeat_at_random(80), cache_dir=tmp_path)
    operators = {i for i, op in enumerate(planned.graph.ops) if "remat_tests" in op.key}
    assert any(planned.plan.schedule.order.count(i) > 1 for i in operators)
    states = []
    for module in (original, planned):
        step(module, x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert_planned_step(original, planned, x)


@pytest.mark.parametrize("operator", ["smooth", "ripple"])
def test_an_operator_of_the_users_is_one_op(operator: str, tmp_path: Path) -> None:
    """Forward and backward, each measured as a whole."""
    _, planned = pair(Opaque(operator), tmp_path, normal(4, 8))
    found = [op for op in planned.graph.ops if op.target == f"remat_tests.{operator}.default"]
    assert [op.backward for op in found] == [False, True]
    assert all(op.first.time_s > 0 for op in found)
