"""What an `Offmate` takes to move values: its config, optimizer, weights, machine, host memory and links."""

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from remat_executor import PlannedModule
from remat_facade.config.fields import links_from
from remat_facade.config.types import Config, OffmateConfig
from remat_facade.entrypoints.inputs import Arguments, check_model, tensors_of
from remat_facade.entrypoints.named_optimizer import named_optimizer
from remat_facade.entrypoints.offmate_end import OffmateEnd
from remat_facade.entrypoints.options import AnyPath, CostOptions, PlanOptions
from remat_facade.errors import BadConfig, BadModel
from remat_facade.planning.memory_fit import free_on
from remat_facade.planning.method import as_config
from remat_facade.planning.offmate_planner import OffmatePlanner
from remat_graph import Links, parse_nbytes
from remat_graph.platforms.base import links_of
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
from remat_offload.machine.threaded import LanedMachine

HOST_SHARE = 0.8
"""Part of the host's free memory that moved values may take by default."""


def offmate_config(config: Config | AnyPath | None) -> OffmateConfig:
    """The config of an `Offmate`; None for the default.

    Raises:
        BadConfig: it is of another type.
    """
    chosen = as_config("offmate" if config is None else config)
    if not isinstance(chosen, OffmateConfig):
        raise BadConfig(field="type", problem=f"Offmate wants one of type offmate, not {chosen.type}")
    return chosen


@attrs.frozen(kw_only=True)
class OffloadOptions:
    """What moves values, and where to; `Offmate` explains them.

    Attributes:
        config: holds what the keywords set, too.
        optimizer: the user's; None for the one that the config names.
        weights: the user's; None for those that the config names.
        machine: the user's; None to make one.
        pool: the user's; None to make one.
        links: the user's; None for the config's, the platform's, or measured ones.
    """

    config: OffmateConfig
    optimizer: Optimizer | None
    weights: Weights | None
    machine: Machine | None
    pool: HostPool | None
    links: Links | None

    def check(self, model: nn.Module) -> None:
        """See that the arguments are of the right kind.

        Raises:
            BadModel: the model is planned already.
            OffloadMisuse: an argument is of another kind.
        """
        if isinstance(model, PlannedModule):
            raise BadModel(problem="is planned already: give the original, which is its `module`")
        _check("links", self.links, Links, "give remat_graph.Links(...), or leave it out to measure them")
        _check("machine", self.machine, Machine, "give a remat_offload.CudaMachine, or leave it out")
        _check("pool", self.pool, HostPool, "give a remat_offload.HostPool, or leave it out")
        advice = "give the optimizer itself, over the model's parameters"
        _check("optimizer", self.optimizer, Optimizer, advice)

    def training(self, model: nn.Module, arguments: Arguments) -> tuple[TrainingSession, OffmateEnd]:
        """What carries out the moves and updates, with a machine and a host pool that are made if need be.

        Args:
            model: the module.
            arguments: of the call that is planned.

        Returns:
            The training session and what ends it.
        """
        config = self.config
        weights = config.weights if self.weights is None else self.weights
        device = self._device(model, arguments, filled=weights is not None)
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
            pool = HostPool(_host_nbytes(config.host_budget), device=machine.device)
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
        """What plans the training step.

        Args:
            options: what the plan keeps to.
            cost: where the costs of operators come from.
            training: what carries plans out.
        """
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
            zoo=cost.zoo(device) if options.zoo else None,
        )

    def _device(self, model: nn.Module, arguments: Arguments, *, filled: bool) -> torch.device:
        """The machine's device, else the sample's, else the model's."""
        args, kwargs = arguments
        given = next((tensor.device for tensor in tensors_of(arguments) if tensor.dim()), None)
        wanted = given if self.machine is None else self.machine.device
        return check_model(model, args, kwargs, wanted, filled=filled)


def _check(name: str, given: object, wanted: type, advice: str) -> None:
    """See that an argument, if it is given, is what it can be."""
    if given is not None and not isinstance(given, wanted):
        raise OffloadMisuse(
            problem=f"{name} is a {type(given).__name__}, not a {wanted.__name__}", advice=advice
        )


def _host_nbytes(host_budget: int | str | None) -> int:
    if host_budget is not None:
        return parse_nbytes(host_budget)
    return int(HOST_SHARE * (free_on(torch.device("cpu")) or 0))
