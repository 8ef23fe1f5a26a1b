"""Keywords that `from_config` passes on, for type checkers; the classes explain them."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from remat_executor import Buckets
from remat_executor.module.distributed import Ranks
from remat_facade.entrypoints.options import AnyPath
from remat_facade.planning.memory_fit import Optimizer
from remat_facade.planning.planner import Progress
from remat_graph import Plan, Platform

if TYPE_CHECKING:  # a `Rockmate` does without the offloading engine
    import torch

    from remat_graph import Links
    from remat_offload import HostPool, Machine, Weights


class SharedKeywords(TypedDict, total=False):
    """What every entry point takes in addition to model, sample, budget and config."""

    sample_kwargs: Mapping[str, Any] | None
    reserve_nbytes: int
    cache_dir: AnyPath | None
    platform: Platform | None
    differentiate: Iterable[int] | None
    on_progress: Progress | None
    zoo: bool
    max_plans: int
    buckets: Buckets | None
    part_nbytes: int | None


class RockmateKeywords(SharedKeywords, total=False):
    """What `Rockmate` takes."""

    plan: Plan | AnyPath | None
    ranks: Ranks | None
    optimizer: Optimizer
    runtime: str


class OffmateKeywords(SharedKeywords, total=False):
    """What `Offmate` takes."""

    host_budget: int | str | None
    optimizer: "torch.optim.Optimizer | None"
    optimizer_in_backward: bool | None
    master_weights: bool | None
    weights: "Weights | None"
    accumulation: int | None
    machine: "Machine | None"
    pool: "HostPool | None"
    links: "Links | None"
