"""Errors of a way that rounds, against float64, beside those of the captured calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat_executor import PlanFunction, PlannedModule
from remat_executor.ways.substitution import Family
from remat_graph import Graph, Plan, Schedule, specialize
from tests.helpers.planners import all_switched

MOST = 1.5
"""A way's largest error, as a multiple of the captured calls' own."""
TANGENT = 0.37
"""No power of two: a product with it rounds."""
DRAWS = 40
UNIT = 2**-23
"""In the last place of a float32 number, as losses are."""


class LanguageLoss(nn.Module):
    """The loss of a language model, without its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """As the library computes it, which is in float32; in float64 for the reference."""
        if next(self.model.parameters()).dtype is torch.float64:
            logits = self.model(input_ids=ids).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def results(
    module: Callable[..., Tensor], parameters: Sequence[Tensor], inputs: Sequence[Any], tangent: float
) -> list[Tensor]:
    """Loss and gradients, in float64."""
    for parameter in parameters:
        parameter.grad = None
    loss = module(*inputs)
    (loss * tangent).backward()
    grads = [p.grad for p in parameters if p.grad is not None]
    return [loss.detach().double(), *(g.double() for g in grads)]


def relative(found: Tensor, wanted: Tensor) -> float:
    """The norm of the error as a share of the norm."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-300))


def drawn(inputs: Sequence[Any]) -> list[Any]:
    """Other inputs of the same shapes."""
    return [
        torch.randn_like(x) if x.is_floating_point() else x.flatten()[torch.randperm(x.numel())].view_as(x)
        for x in inputs
    ]


@attrs.frozen(kw_only=True)
class Errors:
    """Norms of errors over several inputs, the loss's first and then each gradient's.

    Attributes:
        eager: of the captured calls.
        ours: with the ways on.
        norms: of the exact results.
        module: the step with the ways.
    """

    eager: tuple[float, ...]
    ours: tuple[float, ...]
    norms: tuple[float, ...]
    module: PlannedModule

    def check(self) -> None:
        """Each of our errors is at most `MOST` times eager's; the loss's, or a unit in its last place."""
        allowed = [MOST * error for error in self.eager]
        allowed[0] = max(allowed[0], UNIT * self.norms[0])
        assert all(one <= most for one, most in zip(self.ours, allowed, strict=True)), (self.eager, self.ours)


def errors(
    model: nn.Module,
    inputs: Sequence[Any],
    ways: Sequence[Family],
    seed: int | None = None,
    planner: PlanFunction | None = None,
    draws: int = DRAWS,
) -> Errors:
    """Errors of the loss and each gradient of a step.

    The reference is the same step in float64, with the same numbers as parameters and inputs. There are
    several inputs, so that an error is no matter of luck.
    """
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    module = PlannedModule(copy.deepcopy(model), tuple(inputs), {}, planner or all_switched(seed), ways=ways)
    squares: list[list[list[float]]] = [[], [], []]
    for _ in range(draws):
        inputs = drawn(inputs)
        doubled = [x.double() if x.is_floating_point() else x for x in inputs]
        wanted = results(exact, list(exact.parameters()), doubled, TANGENT)
        squares[2].append([float(each.detach().norm()) ** 2 for each in wanted])
        for place, each in enumerate((plain, module)):
            found = results(each, list(each.parameters()), inputs, TANGENT)
            pairs = zip(found, wanted, strict=True)
            squares[place].append([float((a - b).detach().norm()) ** 2 for a, b in pairs])
    eager, ours, norms = (tuple(sum(column) ** 0.5 for column in zip(*each, strict=True)) for each in squares)
    return Errors(eager=eager, ours=ours, norms=norms, module=module)


def repeated(graph: Graph) -> Plan:
    """All switches on, and every activation repeated at the end of the forward."""
    decided = specialize(graph, graph.switches)
    ops = range(len(decided.graph.ops))
    forward = [i for i in ops if not decided.graph.ops[i].backward]
    again = [i for i in forward if decided.graph.ops[i].rerun not in (None, 0)]
    again = [i for i in again if graph.ops[decided.ops[i]].alternatives]
    order = [*forward, *again, *(i for i in ops if decided.graph.ops[i].backward)]
    schedule = decided.restore(Schedule.from_order(decided.graph, order))
    return Plan.from_schedule(graph, schedule, budget_nbytes=1 << 50, lower_bound_s=0.0, solver="tester")
