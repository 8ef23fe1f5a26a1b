"""Planned modules on several ranks: as exact as the original under DDP and FSDP2, and one plan for all."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from remat_executor import (
    BadInput,
    CaptureError,
    MemoryMeter,
    PlannedModule,
    RankFailed,
    RanksDiffer,
    RematWarning,
    SharedPlan,
)
from remat_executor.costs.annotate import with_costs
from remat_executor.costs.cache import CostCache
from remat_executor.guards.snapshot import Snapshot
from remat_executor.inspection.tensors import collect
from remat_executor.module.pipeline import CostSource
from remat_facade import Hiremate
from remat_graph import BadBudget, Graph, Plan
from remat_graph.platforms.base import Flops
from remat_solvers import InfeasibleBudget
from tests.helpers.planners import repeat_at_random, save_all
from tests.helpers.ranks import LIMIT_S, RankError, Ranks, gathered

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 32


class Block(nn.Module):
    """A residual block with a norm and dropout; its scale is a parameter of its own."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), norm(2 * WIDTH)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.drop(F.gelu(self.norm(self.up(x)))))


class Net(nn.Module):
    """A few blocks, and perhaps a head that is never used."""

    def __init__(
        self,
        blocks: int = 3,
        *,
        norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
        unused: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 4) if unused else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.last(x), y)


def build(*args: Any, **options: Any) -> Net:
    """The same weights on every rank and every time."""
    torch.manual_seed(0)
    return Net(*args, **options)


def batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Other numbers for each seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks for all tests here."""
    with Ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cost cache: ops are measured once."""
    return tmp_path_factory.mktemp("costs")


def local(tensor: Tensor) -> Tensor:
    """A copy of what this rank holds of a tensor."""
    return getattr(tensor, "to_local", lambda: tensor)().detach().clone()


def train(model: nn.Module, *, accumulate: bool = False, sizes: tuple[int, ...] = (64, 64, 64)) -> list[Any]:
    """A few steps on this rank's own batches, its own dropout: all that can be compared, step by step."""
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for step, size in enumerate(sizes):
        waits = accumulate and step == 1  # DDP with a static graph wants its first step whole
        with model.no_sync() if waits else nullcontext():
            loss = model(*batch(2 * step + dist.get_rank(), size))
            loss.backward()
        seen += [loss.detach(), *(local(b) for b in model.buffers())]
        seen += [None if p.grad is None else local(p.grad) for p in model.parameters()]
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def assert_equal(expected: list[Any], actual: list[Any]) -> None:
    """To the bit."""
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


# --------------------------------------------------------------------------------------------------- DDP

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
}


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """With buckets small enough for several."""
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **options)


def _ddp_variants(rank: int, cache: Path) -> None:
    plans = [
        PlannedModule(build(unused=unused), batch(0), {}, repeat_at_random(20, rank), cache_dir=cache)
        for unused in (False, True)
    ]
    for name, options in VARIANTS.items():
        unused = name == "find_unused_parameters"
        for accumulate in (False, True):
            planned = copy.deepcopy(plans[unused])
            expected = train(ddp(build(unused=unused), **options), accumulate=accumulate)
            actual = train(ddp(planned, **options), accumulate=accumulate)
            assert_equal(expected, actual)
            assert planned.runs == {"planned": 3}
    _ddp_other_shapes(rank, cache)


def _ddp_other_shapes(rank: int, cache: Path) -> None:
    """The ranks meet another shape at different steps: no rank waits for another to plan."""
    sizes = ((64, 48, 64), (64, 64, 48))[rank]
    planned = PlannedModule(build(), batch(0), {}, repeat_at_random(20), cache_dir=cache)
    expected = train(ddp(build()), sizes=sizes)
    with pytest.warns(RematWarning, match="planning again"):
        actual = train(ddp(planned), sizes=sizes)
    assert_equal(expected, actual)
    assert planned.runs == {"planned": 3, "replanned": 1}


def test_ddp_is_exact(ranks: Ranks, cache: Path) -> None:
    """Every way of DDP, with and without accumulation, plans that differ by rank: to the bit, never anew."""
    ranks.run(_ddp_variants, cache)


def _three_budgets(rank: int, cache: Path) -> None:
    def planned_at(budget: int | str) -> Hiremate:
        return Hiremate(build(2), batch(0), budget, cache_dir=cache, time_limit_s=60.0, ranks="together")

    with pytest.raises(InfeasibleBudget) as caught:
        planned_at(1)
    assert len(set(gathered(caught.value.smallest_nbytes))) == 1
    expected = train(ddp(build(2)))
    for budget in ("100%", "60%", caught.value.smallest_nbytes):
        planned = planned_at(budget)
        one, other = gathered((planned.plan.schedule, planned.plan.budget_nbytes))
        assert one == other
        trained = ddp(planned)
        assert_equal(expected, train(trained))
        x, y = batch(rank)
        # Gloo's threads let go of what DDP copies buffers through when they come to it, perhaps at our peak.
        trained.broadcast_buffers = False
        with MemoryMeter() as meter:
            trained(x, y).backward()
        assert (budget, planned.plan.live_peak_nbytes) == (budget, meter.peak_nbytes)
        assert planned.runs == {"planned": 4}
    assert planned.plan.recomputed_s > 0


def test_three_budgets_with_one_plan_for_all_ranks(ranks: Ranks, cache: Path) -> None:
    """Dropout and batch norm at the full budget, at 60 % and at the smallest, which every rank is told."""
    ranks.run(_three_budgets, cache)


# -------------------------------------------------------------------------------------------------- FSDP2


def sharded(model: Any, **options: Any) -> Any:
    """`fully_shard` around each block, then around all."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def planned_blocks(cache: Path, **options: Any) -> tuple[Any, list[PlannedModule]]:
    """The net with each block planned."""
    model = build(**options)
    hidden = torch.randn(64, WIDTH, requires_grad=True)
    for i, block in enumerate(model.blocks):
        sample = hidden if i else hidden.detach()  # what comes in requires no gradient
        model.blocks[i] = PlannedModule(block, (sample,), {}, repeat_at_random(8, i), cache_dir=cache)
    return model, list(model.blocks)


def _fsdp(rank: int, cache: Path) -> None:
    expected = train(sharded(build()))
    model, blocks = planned_blocks(cache)
    keys = list(sharded(model).state_dict())
    assert list(build().state_dict()) == keys
    assert_equal(expected, train(model))
    assert [block.runs for block in blocks] == [{"planned": 3}] * 3

    # The whole network as one plan, gathered as a whole.
    planned = PlannedModule(build(), batch(0), {}, repeat_at_random(20), cache_dir=cache)
    assert_equal(train(fully_shard(build())), train(fully_shard(planned)))
    assert planned.runs == {"planned": 3}

    # Parameters in half precision are another step: planned anew, once.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, blocks = planned_blocks(cache, norm=nn.LayerNorm)
    sharded(model, mp_policy=policy)
    with pytest.warns(RematWarning, match="planning again"):
        actual = train(model)
    assert_equal(train(sharded(build(norm=nn.LayerNorm), mp_policy=policy)), actual)
    assert [block.runs for block in blocks] == [{"planned": 3, "replanned": 1}] * 3

    # Sharding what is inside a plan, or before planning, is said.
    planned = PlannedModule(build(), batch(0), {}, save_all, cache_dir=cache)
    sharded(planned)
    with pytest.warns(RematWarning, match=r"without a plan.*fully_shard"):
        assert_equal(expected, train(planned))
    assert planned.runs == {"original": 3}
    with pytest.raises(BadInput, match=r"fully_shard\(Hiremate\("):
        Hiremate(sharded(build()), batch(0), "60%", cache_dir=cache, ranks="alone")


def test_fsdp2_around_planned_blocks_is_exact(ranks: Ranks, cache: Path) -> None:
    """`fully_shard` around planned blocks, a planned network, in mixed precision; misuse is said."""
    ranks.run(_fsdp, cache)


# ------------------------------------------------------------------------------------- one plan, and no hang


class Branches(Net):
    """Cannot be captured."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) if x.sum() > 0 else super().forward(-x, y)


class Speaks(Net):
    """Averages its input over the ranks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return super().forward(x, y)


class _Summed(torch.autograd.Function):
    """Sums the gradient over the ranks, as tensor parallelism does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        return all_reduce(tangent, "sum", dist.group.WORLD)


class SpeaksBackwards(Net):
    """Uses that."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return _Summed.apply(super().forward(x, y))


def break_down(graph: Graph) -> Plan:
    """A planner that fails with an error of nobody's."""
    raise ZeroDivisionError("no reason")


def _planned(
    planner: Callable[[Graph], Plan],
    cache: Path,
    after: Exception | None = None,
    costs: CostSource | None = None,
) -> PlannedModule:
    """Planned together; `after` goes wrong once the plan has come."""
    with SharedPlan() as shared:
        planned = PlannedModule(build(), batch(0), {}, shared.planner(planner), cache_dir=cache, costs=costs)
        if after is not None:
            raise after
    return planned


def _failures(rank: int, cache: Path) -> None:
    options: dict[str, Any] = {
        "cache_dir": cache,
        "platform": Flops(),
        "ranks": "together",
        "solver": "noremat",
    }
    first = rank == 0

    with pytest.raises(RanksDiffer, match=r"rank 1 has bytes \d+ and rank 0 has \d+.*same model"):
        Hiremate(build(), batch(0, 64 if first else 32), "100%", **options)
    with pytest.raises(RanksDiffer, match=r"rank 1 has ops \d+ and rank 0 has \d+"):
        Hiremate(build(3 if first else 2), batch(0), "100%", **options)
    with pytest.raises(RanksDiffer, match="rank 1 has mode eval and rank 0 has train"):
        Hiremate(build().train(first), batch(0), "100%", **options)
    with pytest.raises(RanksDiffer, match="rank 1 has budget 1MiB and rank 0 has 2MiB"):
        Hiremate(build(), batch(0), "2MiB" if first else "1MiB", **options)

    with pytest.raises(BadBudget, match="lots"):  # on rank 1 before it has a graph
        Hiremate(build(), batch(0), "100%" if first else "lots", **options)
    with pytest.raises(CaptureError, match="branch or a Python number depends"):
        Hiremate(build() if first else Branches(), batch(0), "100%", **options)
    for speaks in (Speaks(), SpeaksBackwards()):
        with pytest.raises(CaptureError, match=r"communicates with other ranks.*either side"):
            Hiremate(speaks, batch(0), "100%", **options)

    with pytest.raises(ZeroDivisionError if first else RankFailed, match="no reason"):
        _planned(break_down, cache)
    _planned(save_all if first else break_down, cache)  # nobody asks rank 1
    with pytest.raises(RankFailed if first else MemoryError, match="full"):
        _planned(save_all, cache, after=None if first else MemoryError("full"))

    with pytest.warns(RematWarning, match='ranks="together"') as caught:
        Hiremate(build(), batch(0), "100%", **{**options, "ranks": None})
    assert caught[0].filename == __file__
    Hiremate(build(), batch(0), "100%", **{**options, "ranks": "alone"})
    Hiremate(build(), batch(0), "100%", **{**options, "ranks": dist.group.WORLD})
    with pytest.raises(BadInput, match="'both'"):
        Hiremate(build(), batch(0), "100%", **{**options, "ranks": "both"})
    only_first = dist.new_group([0])
    with pytest.raises(BadInput, match="rank 1 is not in the group") if not first else nullcontext():
        Hiremate(build(), batch(0), "100%", **{**options, "ranks": only_first})


def test_what_fails_on_one_rank_is_raised_on_all(ranks: Ranks, cache: Path) -> None:
    """Other graphs, other budgets, errors before, in and after planning: an error everywhere, and no hang."""
    ranks.run(_failures, cache)


def _workspaces(rank: int, cache: Path) -> None:
    asked: list[Any] = []

    def measured(*args: Any, **options: Any) -> Graph:
        """As if rank 1 had measured a workspace at its first op."""
        graph = with_costs(*args, cache=CostCache(folder=cache), **options)
        op = graph.ops[0]
        larger = tuple(attrs.evolve(i, workspace_nbytes=rank << 20) for i in op.implementations)
        return attrs.evolve(graph, ops=(attrs.evolve(op, implementations=larger), *graph.ops[1:]))

    def plan(graph: Graph) -> Plan:
        asked.append(graph.ops[0].first.workspace_nbytes)
        return save_all(graph)

    planned = _planned(plan, cache, costs=measured)
    assert [[1 << 20], []] == gathered(asked)
    one, other = gathered((planned.plan.schedule, planned.plan.peak_nbytes))
    assert one[0] == other[0]
    assert other[1] >= 1 << 20
    assert one[1] < other[1]


def test_the_plan_holds_on_the_rank_with_the_largest_workspaces(ranks: Ranks, cache: Path) -> None:
    """Rank 0 plans with the largest workspaces of all; each rank's own peak is by its own."""
    ranks.run(_workspaces, cache)


def test_ranks_on_other_devices_have_one_graph() -> None:
    """The index of the default device is no condition of a plan."""
    model = build()
    seen = Snapshot.take(model).signature(collect(model, batch(0), {}))
    first, second = (attrs.evolve(seen, flags=(("default_device", f"cuda:{i}"),)) for i in range(2))
    assert first != second
    assert first.conditions() == second.conditions() == (("mode", "train"), ("default_device", "cuda"))


def test_ranks_need_a_process_group(tmp_path: Path) -> None:
    """Asked to plan together outside of torch.distributed: a clear error. Without ranks= nothing is said."""
    with pytest.raises(BadInput, match="init_process_group"):
        Hiremate(build(), batch(0), "100%", cache_dir=tmp_path, platform=Flops(), ranks="together")
    Hiremate(build(), batch(0), "100%", cache_dir=tmp_path, platform=Flops())


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("ddp", ("--budget", "70%", "--layers", "1", "--batch", "4", "--steps", "12")),
        pytest.param("fsdp2", ("--budget", "70%", "--blocks", "2", "--steps", "12"), marks=pytest.mark.full),
    ],
)
def test_the_example_runs(example: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """As torchrun starts it, on two CPU processes; its loss falls."""
    script = str(ROOT / "examples" / f"{example}.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REMAT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*launcher, script, *options], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "within a budget of" in done.stdout
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def _none_hangs(rank: int) -> None:
    dist.barrier()


def _one_hangs(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def test_a_hang_is_a_failure(ranks: Ranks) -> None:
    """What these tests rest on: a rank that waits for ever is noticed."""
    ranks.run(_none_hangs)  # they have started
    with pytest.raises(RankError, match=r"ranks \[0\] hang"):
        ranks.run(_one_hangs, limit_s=1.0)
