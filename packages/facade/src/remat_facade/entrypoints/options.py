"""Groups of options that the entry points pass on; `Rockmate` and `Offmate` document each option."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, get_args

import attrs
import torch

from remat_executor import BadInput, Buckets
from remat_executor.costs.cache import CostCache
from remat_executor.costs.check_platform import check_platform
from remat_executor.module.plan_cache import MOST_PLANS
from remat_executor.ways.registry import rounding_families
from remat_executor.ways.substitution import Family
from remat_facade.entrypoints.inputs import Arguments
from remat_facade.planning.memory_fit import Optimizer
from remat_facade.planning.planner import Progress, silent
from remat_facade.planning.zoo import Zoo
from remat_graph import Platform
from remat_graph.errors import shown
from remat_graph.serialization.fields import AnyPath

Ways = Literal["exact", "rounding", "none"]
"""Which other ways to run ops a plan may choose; "rounding": also those that may differ in the last bits."""


def check_ways(ways: object) -> None:
    """Check the option `ways`.

    Raises:
        BadInput: it is not one of `Ways`.
    """
    if ways not in get_args(Ways):
        raise BadInput(
            problem=f"ways is {shown(ways)}, not one of {', '.join(map(repr, get_args(Ways)))}",
            advice='leave it out for "exact"',
        )


def families_of(ways: str) -> tuple[Family, ...] | None:
    """The families of an option `ways`; None for all that are exact.

    Raises:
        BadInput: it is not one of `Ways`.
    """
    check_ways(ways)
    if ways == "rounding":
        return rounding_families()
    return () if ways == "none" else None


@attrs.frozen(kw_only=True)
class PlanOptions:
    """What a plan must satisfy, and whether saved plans are used."""

    budget: int | str
    reserve_nbytes: int = 0
    optimizer: Optimizer = "adamw"
    zoo: bool = True


@attrs.frozen(kw_only=True)
class CostOptions:
    """Where the costs of operators come from, and the callback for progress."""

    platform: Platform | None = None
    cache_dir: AnyPath | None = None
    on_progress: Progress | None = None

    def __attrs_post_init__(self) -> None:
        check_platform(self.platform)

    @property
    def folder(self) -> Path | None:
        """The cache folder as a path."""
        return None if self.cache_dir is None else Path(self.cache_dir)

    @property
    def report(self) -> Progress:
        """`on_progress`, or a function that does nothing."""
        return self.on_progress or silent

    @property
    def stages(self) -> Callable[[str, int, int], None] | None:
        """The callback for the executor: it formats (stage, done, total) for `on_progress`."""
        on_progress = self.on_progress
        if on_progress is None:
            return None

        def report_stage(stage: str, done: int, total: int) -> None:
            on_progress(f"{stage} {done} of {total}" if total > 1 else stage)

        return report_stage

    def source(self, device: torch.device) -> str:
        """The name of the source of the operator times, for `Plan.platform`."""
        return f"{device.type}, measured" if self.platform is None else self.platform.name

    def zoo(self, device: torch.device) -> Zoo | None:
        """The saved plans, next to the cached costs; None if the environment disables them."""
        if os.environ.get("REMAT_NO_ZOO"):
            return None
        costs = CostCache(device, self.folder).path
        times = costs.stem if self.platform is None else self.platform.name
        return Zoo(folder=costs.parent / "plans", times=times)


@attrs.frozen(kw_only=True)
class CallOptions:
    """The call that is planned, and which of its outputs get gradients."""

    arguments: Arguments
    differentiate: Iterable[int] | None = None


@attrs.frozen(kw_only=True)
class RunOptions:
    """How plans run, and how many are kept."""

    runtime: str = "eager"
    max_plans: int = MOST_PLANS
    buckets: Buckets | None = None
    part_nbytes: int | None = None
    ways: str = "exact"

    def __attrs_post_init__(self) -> None:
        check_ways(self.ways)

    @property
    def families(self) -> tuple[Family, ...] | None:
        """The families of `ways`; None for all that are exact."""
        return families_of(self.ways)
