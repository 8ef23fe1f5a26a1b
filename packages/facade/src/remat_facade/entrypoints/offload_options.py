"""The options of `Offmate` that concern offloading: optimizer, weights, machine, host memory and links."""

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from remat_executor import PlannedModule
from remat_facade.config.fields import links_from
from remat_facade.config.types import Config, OffmateConfig
from remat_facade.entrypoints.inputs import Arguments, check_forward, check_model, tensors_of
from remat_facade.entrypoints.model_budget import size_of
from remat_facade.entrypoints.named_optimizer import named_optimizer
from remat_facade.entrypoints.offmate_end import OffmateEnd
from remat_facade.entrypoints.options import CostOptions, PlanOptions
from remat_facade.errors import BadConfig, BadModel
from remat_facade.planning.memory_fit import free_on
from remat_facade.planning.method import as_config
from remat_facade.planning.offmate_planner import OffmatePlanner
from remat_graph import Links
from remat_graph.platforms.base import links_of
from remat_graph.serialization.fields import AnyPath
from remat_offload import (
    CudaMachine,
    HostPool,
    Machine,
    OffloadMisuse,
    SimulatedMachine,
    TrainingSession,
    WeightReader,
    Weights,
    measure_links,
)
from remat_offload.copy_lanes.threaded import LanedMachine

HOST_SHARE = 0.8
"""Default host budget, as a share of the free host memory."""


def offmate_config(config: Config | AnyPath | None) -> OffmateConfig:
    """The config of an `Offmate`; None for the default.

    Raises:
        BadConfig: the config is of another type.
    """
    chosen = as_config("offmate" if config is None else config)
    if not isinstance(chosen, OffmateConfig):
        raise BadConfig(field="type", problem=f"Offmate expected a config of type offmate, got {chosen.type}")
    return chosen


@attrs.frozen(kw_only=True)
class OffloadOptions:
    """The arguments of `Offmate` that concern offloading; `config` has the keyword arguments merged in."""

    config: OffmateConfig
    optimizer: Optimizer | None
    weights: Weights | None
    machine: Machine | None
    pool: HostPool | None
    links: Links | None

    def check(self, model: nn.Module) -> None:
        """Check the types of the arguments.

        Raises:
            BadModel: the model is planned already.
            OffloadMisuse: an argument has another type.
        """
        if isinstance(model, PlannedModule):
            raise BadModel(problem="is planned already: give the original, which is its `module`")
        if isinstance(model, nn.Module):  # its type is checked with the sample
            check_forward(model)
        for name, kind, advice in (
            ("links", Links, "give remat_graph.Links(...), or omit it to measure them"),
            ("machine", Machine, "give a remat_offload.CudaMachine, or omit it"),
            ("pool", HostPool, "give a remat_offload.HostPool, or omit it"),
            ("optimizer", Optimizer, "give an optimizer of the model's parameters"),
        ):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                article = "an" if kind is Optimizer else "a"
                problem = f"{name} is of type {type(given).__name__}; expected {article} {kind.__name__}"
                raise OffloadMisuse(problem=problem, advice=advice)

    def training(self, model: nn.Module, arguments: Arguments) -> tuple[TrainingSession, OffmateEnd]:
        """Create the training session, its machine and its host pool, unless the user gave these.

        Args:
            model: the module.
            arguments: positional and keyword inputs of the call to plan.

        Returns:
            The training session, and its finalizer.
        """
        config = self.config
        weights = config.weights if self.weights is None else self.weights
        args, kwargs = arguments
        sample_device = next((tensor.device for tensor in tensors_of(arguments) if tensor.dim()), None)
        wanted = sample_device if self.machine is None else self.machine.device
        device = check_model(model, args, kwargs, wanted, filled=weights is not None)
        reader = None if weights is None else WeightReader(model, weights)
        in_backward = config.optimizer_in_backward
        if in_backward is None:
            in_backward = self.optimizer is None and config.optimizer is None
        optimizer = self.optimizer or named_optimizer(config, model)
        machine, pool = self.machine, self.pool
        own: list[LanedMachine | HostPool] = []
        if machine is None:
            machine = CudaMachine(device) if device.type == "cuda" else SimulatedMachine()
            own.append(machine)
        if pool is None:
            if config.host_budget is not None:
                host_nbytes = size_of(config.host_budget, "host_budget")
            else:
                host_nbytes = int(HOST_SHARE * (free_on(torch.device("cpu")) or 0))
            pool = HostPool(host_nbytes, device=machine.device)
            own.append(pool)
        training = TrainingSession(
            machine,
            pool,
            optimizer,
            in_backward=in_backward,
            master_weights=config.master_weights,
            accumulation=config.accumulation,
            reader=reader,
        )
        return training, OffmateEnd(training, own)

    def planner(self, options: PlanOptions, cost: CostOptions, training: TrainingSession) -> OffmatePlanner:
        """Create the planner of the training step; it measures the links unless they are known."""
        device = training.machine.device
        links = self.links
        if links is None:
            links = links_from(self.config.links) if self.config.links else links_of(cost.platform)
        return OffmatePlanner(
            budget=options.budget,
            reserve_nbytes=options.reserve_nbytes,
            host_budget_nbytes=training.pool.statistics.capacity_nbytes,
            host_budget_given=self.pool is not None or self.config.host_budget is not None,
            links=links or measure_links(training.machine, training.pool),
            links_given=links is not None,
            training=training,
            time_limit_s=self.config.time_limit_s,
            platform=cost.source(device),
            on_progress=cost.report,
            live=cost.live,
            zoo=cost.zoo(device) if options.zoo else None,
        )
