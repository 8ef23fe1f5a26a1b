"""Types of the keyword arguments that entry points pass on; `Rockmate` and `Offmate` document each."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from remat_executor import Buckets
from remat_executor.module.gradient_states import GradientsState
from remat_executor.module.shared_plan import Ranks
from remat_executor.translation.dropped_outputs import OutputsState
from remat_facade.config.types import Config
from remat_facade.entrypoints.options import Ways
from remat_facade.planning.memory_fit import Optimizer
from remat_facade.planning.planner import Progress
from remat_graph import Plan, Platform
from remat_graph.serialization.fields import AnyPath

if TYPE_CHECKING:  # a `Rockmate` needs no offloading engine
    import torch

    from remat_graph import Links
    from remat_offload import HostPool, Machine, Weights


class StepKeywords(TypedDict, total=False):
    """Keywords of every entry point, in addition to model, sample, budget and config."""

    reserve_nbytes: int
    cache_dir: AnyPath | None
    platform: Platform | None
    on_progress: Progress | None
    zoo: bool
    differentiate: Iterable[int] | None
    max_plans: int
    buckets: Buckets | None
    part_nbytes: int | None


class SharedKeywords(StepKeywords, total=False):
    """The same with the sample's keyword inputs."""

    sample_kwargs: Mapping[str, Any] | None


class RockmateKeywords(SharedKeywords, total=False):
    """Keywords of `Rockmate`."""

    plan: Plan | AnyPath | None
    ranks: Ranks | None
    optimizer: Optimizer
    runtime: str
    ways: Ways | None
    outputs: OutputsState | None
    gradients: GradientsState | None


class LimitKeywords(RockmateKeywords, total=False):
    """Keywords of `limit_memory`, in addition to the model, its budget and a sample."""

    config: Config | AnyPath | None
    solver: str | None
    seed: int
    time_limit_s: float | None


class OffmateKeywords(SharedKeywords, total=False):
    """Keywords of `Offmate`."""

    host_budget: int | str | None
    optimizer: "torch.optim.Optimizer | None"
    optimizer_in_backward: bool | None
    master_weights: bool | None
    weights: "Weights | None"
    accumulation: int | None
    machine: "Machine | None"
    pool: "HostPool | None"
    links: "Links | None"


class OffmateTrainerKeywords(StepKeywords, total=False):
    """Keywords of `Offmate` that a trainer does not determine, in addition to a budget and a sample."""

    host_budget: int | str | None
    master_weights: bool | None
    accumulation: int | None
    machine: "Machine | None"
    pool: "HostPool | None"
    links: "Links | None"
    config: Config | AnyPath | None
    seed: int
    time_limit_s: float | None
