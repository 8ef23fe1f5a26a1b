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
from remat_executor.errors import check_choice
from remat_executor.lowering.gradient_segments import check_part_nbytes
from remat_executor.module.gradient_states import GradientsState, checked_state
from remat_executor.module.pipeline import ENDED
from remat_executor.module.plan_cache import MOST_PLANS, check_most
from remat_executor.runtime.registry import check_runtime
from remat_executor.translation.dropped_outputs import OutputsState, check_outputs
from remat_executor.ways.registry import rounding_families
from remat_executor.ways.substitution import Family
from remat_facade.entrypoints.inputs import Arguments
from remat_facade.entrypoints.progress_line import erase_stage, show_stage
from remat_facade.planning.memory_fit import Optimizer, states_nbytes
from remat_facade.planning.planner import Progress
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
    check_choice("ways", ways, get_args(Ways), "exact")


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

    def __attrs_post_init__(self) -> None:
        is_named = isinstance(self.optimizer, str) and self.budget != "auto"  # the name is for a sum only
        if not is_named and not isinstance(self.optimizer, torch.optim.Optimizer):
            states_nbytes((), self.optimizer)  # raises for an unknown name
        if not isinstance(self.zoo, bool):
            raise BadInput(
                problem=f"zoo is {shown(self.zoo)}, not True or False",
                advice="give False to search again and save no plan",
            )


@attrs.frozen(kw_only=True)
class CostOptions:
    """Where the costs of operators come from, and the callback for progress."""

    platform: Platform | None = None
    cache_dir: AnyPath | None = None
    on_progress: Progress | None = None
    live: bool = attrs.field()  # whether `report` rewrites one line

    @live.default
    def _shows_itself(self) -> bool:
        return self.on_progress is None

    def __attrs_post_init__(self) -> None:
        check_platform(self.platform)
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise BadInput(
                problem=f"cache_dir is {shown(self.cache_dir)}, not a path",
                advice="give a folder, or leave it out for the default one",
            )
        if self.on_progress is not None and not callable(self.on_progress):
            raise BadInput(
                problem=f"on_progress is {shown(self.on_progress)}, not a function",
                advice="give a function of one string, such as print",
            )

    @property
    def folder(self) -> Path | None:
        """The cache folder as a path."""
        return None if self.cache_dir is None else Path(self.cache_dir)

    @property
    def report(self) -> Progress:
        """`on_progress`, or a function that shows the stage on a terminal."""
        return self.on_progress or show_stage

    @property
    def stages(self) -> Callable[[str, int, int], None]:
        """The callback for the executor: it formats (stage, done, total) for `report`."""
        report = self.report

        def report_stage(stage: str, done: int, total: int) -> None:
            if stage != ENDED:
                report(f"{stage} {done} of {total}" if total > 1 else stage)
            elif self.on_progress is None:
                erase_stage()

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
    outputs: OutputsState = "kept"
    gradients: GradientsState = "auto"

    def __attrs_post_init__(self) -> None:
        check_ways(self.ways)
        check_outputs(self.outputs)
        checked_state(self.gradients, other_plans=self.runtime == "eager")
        check_runtime(self.runtime)
        check_most(self.max_plans)
        check_part_nbytes(self.part_nbytes)
        if not isinstance(self.buckets, Buckets | None):
            raise BadInput(
                problem=f"buckets is {shown(self.buckets)}, not Buckets",
                advice='give lengths and paddings, as in Buckets((64, 128), pad={"input_ids": 0})',
            )

    @property
    def families(self) -> tuple[Family, ...] | None:
        """The families of `ways`; None for all that are exact."""
        return families_of(self.ways)
