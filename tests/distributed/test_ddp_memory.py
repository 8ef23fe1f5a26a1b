"""What DistributedDataParallel holds by itself, in addition to the plan that runs inside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from remat_executor import PlannedModule
from remat_graph import Graph, Plan
from tests.helpers.acceptance import Comparison, broken_rules, compare
from tests.helpers.models import CASES
from tests.helpers.planners import repeat_at_random
from tests.helpers.ranks import Ranks

BUCKET_MB = 0.01  # small enough for several


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """One process is enough: what it holds does not depend on the others."""
    with Ranks(1) as started:
        yield started


def without_margin(seed: int) -> Callable[[Graph], Plan]:
    """Plans with 40 repeats, whose budget is the predicted peak."""

    def plan(graph: Graph) -> Plan:
        made = repeat_at_random(40, seed)(graph)
        return attrs.evolve(made, budget_nbytes=made.peak_nbytes)

    return plan


def compared(name: str, seed: int, around: Callable[[nn.Module], nn.Module]) -> Comparison:
    """A case that delivers each gradient by itself, with and without a plan."""

    def build(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedModule:
        # The meter counts what the kernels of ways hold while they run, which plans count as workspaces.
        return PlannedModule(model, args, kwargs, without_margin(seed), part_nbytes=0, ways=())

    case = next(case for case in CASES if case.name == name)
    found = compare(case, build, around=around)
    # Repeats at random may hold more than eager does.
    assert [what for what in broken_rules(found) if what[0] != "eager"] == []
    return found


def _copied_outputs(rank: int) -> None:
    def looking(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, find_unused_parameters=True)

    # This plan reads the output late in the backward, where its peak is.
    found = compared("shared_layer", 2, looking)
    output_nbytes = 16 * 4 * 4
    assert found.peaks.metered_nbytes == found.module.plan.live_peak_nbytes + output_nbytes
    assert found.peaks.allocated_nbytes == found.module.plan.peak_nbytes + output_nbytes


def test_copies_of_outputs_are_beyond_the_budget(ranks: Ranks) -> None:
    """Looking for unused parameters it returns copies, while the backward still reads the outputs."""
    ranks.run(_copied_outputs)


class LateFree(DistributedDataParallel):
    """Holds copies of the buffers through a step, as a slow thread of gloo does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        self.copies = [b.clone() for b in self.module.buffers()] if self.broadcast_buffers else []
        return super().forward(*args, **kwargs)


def _copied_buffers(rank: int) -> None:
    found = compared("spectral_norm", 0, lambda module: LateFree(module, bucket_cap_mb=BUCKET_MB))
    assert found.peaks.allocated_nbytes == found.module.plan.peak_nbytes


def test_copies_of_buffers_are_not_read_as_the_plans(ranks: Ranks) -> None:
    """The acceptance does not read them, however long they stay."""
    ranks.run(_copied_buffers)


class LateAllReduces:
    """A communication hook with which no all-reduce ends before the last one began."""

    def __init__(self) -> None:
        self.pending: list[tuple[Future[Tensor], Tensor]] = []

    def __call__(self, bucket: Any) -> Future[Tensor]:
        """What the all-reduce of this `dist.GradBucket` gives, once it is there."""
        reduced: Future[Tensor] = Future()
        self.pending.append((reduced, bucket.buffer()))
        if bucket.is_last():
            for future, buffer in self.pending:
                future.set_result(buffer)
            self.pending.clear()
        return reduced


def _late_all_reduces(rank: int) -> None:
    def around(module: nn.Module) -> nn.Module:
        trained = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB)
        trained.register_comm_hook(LateAllReduces(), lambda hook, bucket: hook(bucket))
        return trained

    found = compared("spectral_norm", 1, around)
    assert found.module.parts > 5
    assert found.peaks.metered_nbytes == found.module.plan.live_peak_nbytes
    assert found.peaks.allocated_nbytes == found.module.plan.peak_nbytes


def test_late_all_reduces_hold_nothing_of_the_plan(ranks: Ranks) -> None:
    """Gradients are copied to the buckets at once, so the next parts need not wait for the all-reduces."""
    ranks.run(_late_all_reduces)
