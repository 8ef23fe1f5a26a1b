"""Options that entry points share."""

import os
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import torch

from remat_executor import Buckets
from remat_executor.costs.cache import CostCache
from remat_executor.module.distributed import Ranks
from remat_facade.planning.memory_fit import Optimizer
from remat_facade.planning.planner import Progress
from remat_facade.planning.zoo import Zoo
from remat_graph.plan import Plan
from remat_graph.platforms.base import Platform

AnyPath = str | PathLike[str]


class Options(TypedDict, total=False):
    """What every entry point takes beside model, sample and budget; `Rockmate` explains them."""

    sample_kwargs: Mapping[str, Any] | None
    reserve_nbytes: int
    cache_dir: AnyPath | None
    plan: Plan | AnyPath | None
    platform: Platform | None
    differentiate: Iterable[int] | None
    on_progress: Progress | None
    ranks: Ranks | None
    optimizer: Optimizer
    zoo: bool
    max_plans: int
    buckets: Buckets | None
    runtime: str
    part_nbytes: int | None


def zoo_of(folder: Path | None, device: torch.device, platform: Platform | None) -> Zoo | None:
    """The saved plans beside the costs that they were made with; None where the environment forbids them."""
    if os.environ.get("REMAT_NO_ZOO"):
        return None
    costs = CostCache(device, folder).path
    return Zoo(folder=costs.parent / "plans", times=costs.stem if platform is None else platform.name)


def stages(on_progress: Progress | None) -> Callable[[str, int, int], None] | None:
    """What the executor reports, in words."""
    if on_progress is None:
        return None

    def tell(what: str, done: int, total: int) -> None:
        on_progress(f"{what} {done} of {total}" if total > 1 else what)

    return tell


def folder(path: AnyPath | None) -> Path | None:
    """A path that may not be given."""
    return None if path is None else Path(path)
