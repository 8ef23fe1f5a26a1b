"""Options of the entry points, gathered once into groups that are passed on.

The keywords by which users give them are in `remat_facade.entrypoints.keywords`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import attrs
import torch

from remat_executor import Buckets
from remat_executor.costs.cache import CostCache
from remat_executor.module.plan_cache import MOST_PLANS
from remat_facade.entrypoints.inputs import Arguments, as_call
from remat_facade.planning.memory_fit import Optimizer
from remat_facade.planning.planner import Progress, silent
from remat_facade.planning.zoo import Zoo
from remat_graph import Platform

AnyPath = str | PathLike[str]


@attrs.frozen(kw_only=True)
class PlanOptions:
    """What a plan must keep to; `Rockmate` explains them.

    Attributes:
        budget: as the user gave it.
        reserve_nbytes: bytes of the budget left to the caller.
        optimizer: whose states count, by name or itself.
        zoo: whether saved plans are used and kept.
    """

    budget: int | str
    reserve_nbytes: int = 0
    optimizer: Optimizer = "adamw"
    zoo: bool = True


@attrs.frozen(kw_only=True)
class CostOptions:
    """Where the costs of operators come from.

    Attributes:
        platform: gives them instead of measuring; None to measure.
        cache_dir: where measured ones are kept; None for the default folder.
        on_progress: is called with a few words when something begins.
    """

    platform: Platform | None = None
    cache_dir: AnyPath | None = None
    on_progress: Progress | None = None

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
        """What the executor calls with its progress, which becomes words."""
        on_progress = self.on_progress
        if on_progress is None:
            return None

        def tell(what: str, done: int, total: int) -> None:
            on_progress(f"{what} {done} of {total}" if total > 1 else what)

        return tell

    def source(self, device: torch.device) -> str:
        """The name of where the times come from, for the record."""
        return f"{device.type}, measured" if self.platform is None else self.platform.name

    def zoo(self, device: torch.device) -> Zoo | None:
        """The saved plans next to the costs that they were made with; None where the environment forbids."""
        if os.environ.get("REMAT_NO_ZOO"):
            return None
        costs = CostCache(device, self.folder).path
        times = costs.stem if self.platform is None else self.platform.name
        return Zoo(folder=costs.parent / "plans", times=times)


@attrs.frozen(kw_only=True)
class CallOptions:
    """Which call of the model is planned.

    Attributes:
        sample: a tensor, a tuple or list of positional inputs, or a mapping of keyword inputs.
        sample_kwargs: keyword inputs in addition to positional ones.
        differentiate: indices of the output tensors that get gradients; None to choose them.
    """

    sample: Any
    sample_kwargs: Mapping[str, Any] | None = None
    differentiate: Iterable[int] | None = None

    def arguments(self) -> Arguments:
        """Positional and keyword arguments of the call.

        Raises:
            BadSample: the sample stands for no call.
        """
        return as_call(self.sample, self.sample_kwargs)


@attrs.frozen(kw_only=True)
class RunOptions:
    """How plans run.

    Attributes:
        runtime: what runs them.
        max_plans: how many are kept.
        buckets: pads inputs to a few lengths.
        part_nbytes: bytes of gradients that are delivered together at most.
    """

    runtime: str = "eager"
    max_plans: int = MOST_PLANS
    buckets: Buckets | None = None
    part_nbytes: int | None = None
