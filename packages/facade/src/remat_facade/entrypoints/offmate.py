"""`Offmate`: a model, its gradients and its optimizer within a budget of device bytes, the rest on the host.

    model = Offmate(model, sample, "22GiB", host_budget="112GiB", optimizer=torch.optim.AdamW(...))

One plan says for every parameter, gradient, optimizer state and activation whether it stays on the device,
moves to the host and back, or is made again.
"""

import inspect
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat_executor import Buckets, PlannedModule
from remat_executor.errors import warn
from remat_executor.module.plan_cache import MOST_PLANS
from remat_facade.config.fields import links_from
from remat_facade.config.types import Config, OffmateConfig
from remat_facade.entrypoints.inputs import as_call, check_model, tensors_of
from remat_facade.entrypoints.options import AnyPath, folder, stages, zoo_of
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.errors import BadConfig, BadModel, NoRoom
from remat_facade.planning.memory_fit import Fit, free_on
from remat_facade.planning.method import Method, as_config
from remat_facade.planning.planner import PLANNING_S, SAVED, Progress, silent, versions
from remat_facade.planning.zoo import Zoo
from remat_graph import Grads, Graph, Links, RematError, simulate
from remat_graph.budget import parse_nbytes, resolve_budget
from remat_graph.errors import BadBudget, shown, text_of
from remat_graph.plan import Plan
from remat_graph.platforms.base import Platform, links_of
from remat_graph.training import accumulating, at_home
from remat_graph.units import format_nbytes
from remat_offload import CudaMachine, HostPool, HostPoolStatistics, Machine, SimulatedMachine
from remat_offload.engine.training_session import Training
from remat_offload.engine.weight_loading import Filler, Weights
from remat_offload.errors import OffloadMisuse
from remat_offload.machine.bandwidth import measure_links
from remat_offload.machine.threaded import LanedMachine, outside_of_lanes
from remat_solvers import Deadline, Problem
from remat_solvers.offload.solver import PERIODS, Offload

ALIKE = 0.2
"""So much may bandwidths and the host's memory, where they are what is found, differ from a saved plan's."""

HOST_BUDGET = "host_budget_nbytes"
"""Key of `Plan.solver_stats` under which the host's budget is found."""

HOST_SHARE = 0.8
"""Part of the host's free memory that moved values may take by default."""


class Offmate(Rockmate):
    """A model that trains within a budget of device bytes, with the rest of what training holds on the host.

    Parameters that move are tensors on the host between steps, and so are their gradients; `optimizer` is the
    user's own object, whose ``step`` may return while updates on the CPU are still under way: whoever reads a
    parameter waits for its own.

    Args:
        model: the module, in the mode it will train in.
        sample: as for `Rockmate`.
        budget: device bytes of all that training holds there: parameters, gradients, optimizer states,
            buffers, inputs and what a step makes; an int, a text such as ``"22GiB"``, or a percentage of
            what unplanned training of the sample holds beyond gradients, buffers and inputs.
        host_budget: host bytes for what moves; None for 80 % of the memory that is free.
        optimizer: over the model's parameters; None for the one that the config names, or for Adam, which
            steps during the backward.
        optimizer_in_backward: whether parameters are updated as soon as their gradients are there; None if
            no optimizer is given or named.
        master_weights: whether parameters in 16 bits are stepped in 32: the optimizer keeps a master of each.
        weights: a safetensors file, or a mapping from names to tensors. The model may be on the meta device:
            what they name is read once there is a plan, each tensor straight to its home. What they do not
            name keeps the values that it has.
        accumulation: micro-batches to a step of the optimizer, 1 by default. The plan is made for so many; a
            loop may have any other number, and the bits of plain training, in another time.
        machine: the device and its links; None for the sample's device, simulated if that is the CPU.
        pool: lends the host's memory, as much as its capacity, instead of one made for `host_budget`.
        links: bandwidths, instead of those of the platform, or measuring them.
        config: of type offmate: what is not given here is taken from there.
        sample_kwargs: as for `Rockmate`, and so are the others.

    Raises:
        NoRoom: no plan keeps both budgets.
        BadConfig: an option means nothing, or the config names no optimizer that there is.
        RefusedOptimizer: the optimizer cannot be stepped in parts.
        BadModel: there is nothing to plan, or it is planned already.
        OffloadMisuse: the optimizer does not fit the model, or an argument is of another kind.
        BadWeights: the weights do not fit the model, or leave some of it without values.
    """

    _remat_method = "offmate"

    __slots__ = ("_remat_end", "_remat_training")

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        budget: int | str,
        *,
        host_budget: int | str | None = None,
        optimizer: Optimizer | None = None,
        optimizer_in_backward: bool | None = None,
        master_weights: bool | None = None,
        weights: Weights | None = None,
        accumulation: int | None = None,
        machine: Machine | None = None,
        pool: HostPool | None = None,
        links: Links | None = None,
        sample_kwargs: Mapping[str, Any] | None = None,
        reserve_nbytes: int = 0,
        config: Config | AnyPath | None = None,
        seed: int = 0,
        time_limit_s: float | None = None,
        cache_dir: AnyPath | None = None,
        platform: Platform | None = None,
        differentiate: Iterable[int] | None = None,
        on_progress: Progress | None = None,
        zoo: bool = True,
        max_plans: int = MOST_PLANS,
        buckets: Buckets | None = None,
        part_nbytes: int | None = None,
    ) -> None:
        chosen = as_config("offmate" if config is None else config)
        if not isinstance(chosen, OffmateConfig):
            raise BadConfig(field="type", problem=f"Offmate wants one of type offmate, not {chosen.type}")
        chosen = chosen.with_(
            seed=seed or None,
            time_limit_s=time_limit_s,
            host_budget=host_budget,
            optimizer_in_backward=optimizer_in_backward,
            master_weights=master_weights,
            accumulation=accumulation,
        )
        if isinstance(model, PlannedModule):
            raise BadModel(problem="is planned already: give the original, which is its `module`")
        _check("links", links, Links, "give remat_graph.Links(...), or leave it out to measure them")
        _check("machine", machine, Machine, "give a remat_offload.CudaMachine, or leave it out")
        _check("pool", pool, HostPool, "give a remat_offload.HostPool, or leave it out")
        _check("optimizer", optimizer, Optimizer, "give the optimizer itself, over the model's parameters")
        args, kwargs = as_call(sample, sample_kwargs)
        weights = chosen.weights if weights is None else weights
        given = next((tensor.device for tensor in tensors_of((args, kwargs)) if tensor.dim()), None)
        device = check_model(
            model, args, kwargs, given if machine is None else machine.device, filled=weights is not None
        )
        filler = None if weights is None else Filler(model, weights)
        in_backward = chosen.optimizer_in_backward
        if in_backward is None:
            in_backward = optimizer is None and chosen.optimizer is None
        optimizer = optimizer or named_optimizer(chosen, model)
        own: list[LanedMachine | HostPool] = []
        if machine is None:
            machine = CudaMachine(device) if device.type == "cuda" else SimulatedMachine()
            own.append(machine)
        host_given = pool is not None or chosen.host_budget is not None
        if pool is None:
            pool = HostPool(_host_nbytes(chosen.host_budget), device=machine.device)
            own.append(pool)
        training = Training(
            machine,
            pool,
            optimizer,
            in_backward=in_backward,
            master_weights=chosen.master_weights,
            accumulation=chosen.accumulation,
            filler=filler,
        )
        end = _End(training, own)
        training.engine.owner = weakref.ref(self)
        weakref.finalize(
            self, end
        ).atexit = False  # a machine that is open when the interpreter ends is its own concern
        if links is None:
            links = links_from(chosen.links) if chosen.links else links_of(platform)
        planner = _Planner(
            budget=budget,
            reserve_nbytes=reserve_nbytes,
            host_budget_nbytes=pool.statistics.capacity_nbytes,
            host_budget_given=host_given,
            links=links or measure_links(machine, pool),
            links_given=links is not None,
            training=training,
            time_limit_s=chosen.time_limit_s,
            platform=platform.name if platform is not None else f"{device.type}, measured",
            on_progress=on_progress or silent,
            zoo=zoo_of(folder(cache_dir), machine.device, platform) if zoo else None,
        )
        pool.trim()
        object.__setattr__(self, "_remat_training", training)
        object.__setattr__(self, "_remat_end", end)
        PlannedModule.__init__(
            self,
            model,
            args,
            kwargs,
            planner,
            platform=platform,
            cache_dir=folder(cache_dir),
            differentiate=differentiate,
            on_progress=stages(on_progress),
            max_plans=max_plans,
            buckets=buckets,
            part_nbytes=part_nbytes,
            handlers=training,
            device=machine.device,
        )

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer, or the one made for want of one."""
        optimizer: Optimizer = self._remat_training.optimizer
        return optimizer

    @property
    def optimizer_in_backward(self) -> bool:
        """Whether each backward steps the optimizer by itself."""
        in_backward: bool = self._remat_training.in_backward
        return in_backward

    @property
    def host(self) -> HostPoolStatistics:
        """What the host holds of it."""
        statistics: HostPoolStatistics = self._remat_training.pool.statistics
        return statistics

    def synchronize(self) -> None:
        """Wait until every update is done.

        Raises:
            LaneFailed: one could not be carried out.
            OffloadMisuse: each backward steps, and gradients are left that none stepped by.
        """
        self._remat_training.wait()
        self._remat_training.check_gradients()

    def close(self) -> None:
        """Finish the updates that are under way, end the lanes' threads and unpin the host's memory.

        That also happens when the last reference to the module goes. Parameters and states stay where they
        are, and are ordinary tensors. A machine or a pool that was given is left to who gave it.

        If this is interrupted, another call goes on with it.

        Raises:
            LaneFailed: an update could not be carried out.
        """
        end: _End = self._remat_end
        end.finish()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all parameters, to the bit, beside the backward and the step.

        From the second call on the norms of gradients on the host are taken as the gradients arrive. They are
        scaled as the step reads them, or when ``.grad`` is read before. (A gradient that is changed between
        the backward and here is noticed, but not if that is done by way of ``.grad.data``.)

        Args:
            max_norm: the largest norm that gradients may have together.
            norm_type: which norm.
            error_if_nonfinite: whether a norm that is not finite is an error.
            foreach: as for torch's.

        Returns:
            the norm before, without dimensions.

        Raises:
            OffloadMisuse: each backward steps the optimizer by itself.
            MachineMisuse: the module was closed.
            RuntimeError: torch's, for a norm that is not finite.
        """
        training: Training = self._remat_training
        return training.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def accumulating(self) -> AbstractContextManager[None]:
        """Within it a backward adds to ``.grad`` and steps nothing; for models that step during the backward.

            for batch in batches[:-1]:
                with model.accumulating():
                    model(**batch).loss.backward()
            model(**batches[-1]).loss.backward()  # adds its own and steps

        Without effect for others. It counts where the backward is called, wherever the forward was.

        Raises:
            OffloadMisuse: the model was planned with ``accumulation=1``: there is no room for gradients.
        """
        training: Training = self._remat_training
        return training.accumulating()

    def will_it_fit(
        self, optimizer: str | Optimizer | None = None, *, device_nbytes: int | str | None = None
    ) -> Fit:
        """Whether the device has room for the budget, which counts all that training holds there."""
        fit = super().will_it_fit(optimizer or self.optimizer, device_nbytes=device_nbytes)
        return attrs.evolve(fit, parameters_nbytes=0, buffers_nbytes=0, gradients_nbytes=0, states_nbytes=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offmate":
        """It owns its optimizer's states and memory of the host."""
        raise OffloadMisuse(
            problem="a module whose values move cannot be copied",
            advice="copy the original, which is its `module`, and build another",
        )

    # -- what must wait for updates that are under way

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The original's, up to date."""
        self._remat_training.wait()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, up to date."""
        self.synchronize()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, into the tensors where they are.

        Raises:
            OffloadMisuse: ``assign=True``, which would leave the optimizer with other parameters.
        """
        if kwargs.get("assign") or args[2:3] == (True,):
            raise OffloadMisuse(
                problem="load_state_dict(assign=True) gives the module parameters that its optimizer lacks",
                advice="leave assign out: values are loaded into the tensors where they are",
            )
        self._remat_training.wait()
        return super().load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        self._remat_training.zero_grad(set_to_none)


@attrs.define(kw_only=True)
class _Planner:
    """Plans training steps at one pair of budgets; once the first is planned, everyone's home is settled."""

    budget: int | str
    reserve_nbytes: int
    host_budget_nbytes: int
    host_budget_given: bool
    links: Links
    links_given: bool
    training: Training
    time_limit_s: float | None
    platform: str
    on_progress: Progress
    zoo: Zoo | None
    asked_nbytes: int | None = attrs.field(default=None, init=False)

    def __call__(self, graph: Graph) -> Plan:
        """Plan.

        Raises:
            NoRoom: no plan keeps both budgets.
            BadBudget: the budget means nothing, or the reserve leaves nothing of it.
        """
        began_s = time.perf_counter()
        lent_nbytes = self.training.lent_nbytes
        if self.asked_nbytes is None:  # a percentage is of the sample's step, whatever comes later
            share = isinstance(self.budget, str) and self.budget.rstrip().endswith("%")
            self.asked_nbytes = resolve_budget(self.budget, at_home(graph, ())) + share * lent_nbytes
        taken_nbytes = self.reserve_nbytes + lent_nbytes
        budget_nbytes = self.asked_nbytes - taken_nbytes
        if budget_nbytes <= 0:
            taken = f"buffers, inputs and reserve_nbytes take {taken_nbytes} bytes, all of it"
            raise BadBudget(budget=str(self.budget), problem=taken)
        method = self._method()
        found = None if self.zoo is None else self.zoo.find(graph, budget_nbytes, method)
        if found is not None and self._serves(graph, found):
            stats = {**found.solver_stats, PLANNING_S: time.perf_counter() - began_s, SAVED: True}
            return attrs.evolve(found, solver_stats=stats, notes=Offload.explain(stats))
        self.on_progress(f"planning {graph.name}: {len(graph.ops)} ops in {format_nbytes(budget_nbytes)}")
        names = self.training.homes
        homes = None if names is None else {i for i, v in enumerate(graph.values) if v.name in names}
        passes = self.training.accumulation
        solver = Offload(
            in_backward=self.training.in_backward,
            micro_batches=passes,
            homes=None if homes is None else frozenset(homes),
        )
        rounding_nbytes = self._rounding_nbytes(graph)
        host_nbytes = max(0, self.host_budget_nbytes - rounding_nbytes)
        problem = Problem(graph, budget_nbytes, self.links, host_nbytes)
        deadline = Deadline(self.time_limit_s)
        solution = solver.solve(problem, deadline)
        if solution.schedule is None:
            least_host_nbytes = int(solution.stats["least_host_nbytes"])
            raise NoRoom(
                budget_nbytes=self.asked_nbytes,
                host_budget_nbytes=self.host_budget_nbytes,
                least_nbytes=int(solution.stats["least_nbytes"]) + taken_nbytes,
                least_host_nbytes=least_host_nbytes + (rounding_nbytes if least_host_nbytes else 0),
                cut_short=deadline.hit,
            )
        settled = at_home(graph, solution.on_host)
        plan = Plan.from_schedule(
            settled,
            solution.schedule,
            budget_nbytes=budget_nbytes,
            lower_bound_s=solution.lower_bound_s / passes,  # a plan's figures are of one forward and backward
            solver=solver.name,
            solver_stats={
                **solution.stats,
                PLANNING_S: time.perf_counter() - began_s,
                HOST_BUDGET: self.host_budget_nbytes,
            },
            versions=versions(),
            platform=self.platform,
            deadline_hit=deadline.hit,
            links=self.links,
            periods=PERIODS,
        )
        plan = attrs.evolve(self._where_most_is_held(settled, plan), notes=Offload.explain(plan.solver_stats))
        if self.zoo is not None:
            self.zoo.keep(graph, budget_nbytes, method, plan)
        return plan

    def _where_most_is_held(self, graph: Graph, plan: Plan) -> Plan:
        """A plan with its peaks in the state of ``.grad`` that needs most."""
        passes = self.training.accumulation
        if self.training.in_backward and passes == 1:
            return plan
        # Gradients that are there already take as much again on the host while new ones arrive.
        again = simulate(
            accumulating(graph),
            plan.schedule,
            grads=Grads.ACCUMULATE,
            links=self.links,
            passes=passes,
            periods=1 if passes == 1 else PERIODS,
        )
        return attrs.evolve(
            plan,
            peak_nbytes=max(plan.peak_nbytes, again.peak_nbytes),
            live_peak_nbytes=max(plan.live_peak_nbytes, again.live_peak_nbytes),
            host_peak_nbytes=max(plan.host_peak_nbytes, again.host_peak_nbytes),
        )

    def _method(self) -> Method:
        """What a plan depends on beside its graph, its budget and the source of its times."""
        training = self.training
        return Method(
            solver=Offload.name,
            time_limit_s=self.time_limit_s,
            parameters={
                "host_budget_nbytes": self.host_budget_nbytes if self.host_budget_given else "what is free",
                "in_backward": training.in_backward,
                "accumulation": training.accumulation,
                "optimizer": type(training.optimizer).__qualname__,
                "settled": training.homes is not None,
                "links": self.links if self.links_given else "measured",
            },
        )

    def _rounding_nbytes(self, graph: Graph) -> int:
        """The most that blocks of the host's memory take beyond their bytes, where they are whole pages."""
        blocks = len(graph.values) + len(graph.gradients)  # gradients that are there already, too
        return self.training.pool.rounding_nbytes * blocks

    def _serves(self, graph: Graph, plan: Plan) -> bool:
        """Whether a saved plan keeps the host's budget, and what is found here now is about what was then."""
        if plan.links is None:
            return False
        if plan.on_host and plan.host_peak_nbytes > self.host_budget_nbytes - self._rounding_nbytes(graph):
            return False
        then = (plan.solver_stats.get(HOST_BUDGET), *attrs.astuple(plan.links))
        now = (self.host_budget_nbytes, *attrs.astuple(self.links))
        return all(map(_alike, then, now))


def _alike(was: Any, now: Any) -> bool:
    """Whether a number of a saved plan is about the one that is found now; either may not be known."""
    if isinstance(was, int | float) and isinstance(now, int | float):
        return abs(was - now) <= ALIKE * now
    return was is None and now is None


def named_optimizer(config: OffmateConfig, model: nn.Module) -> Optimizer:
    """The optimizer that a config names, over all parameters of the model that train; else Adam.

    Raises:
        BadConfig: there is no such class, it is not imported, or it refuses its options.
    """
    found = _optimizer_class(config.optimizer or "Adam")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        known = 'a class of torch.optim such as "AdamW", "module:Class", or a name of remat.optimizers'
        raise BadConfig(field="optimizer", problem=f"wants {known}, got {shown(config.optimizer)}")
    trained = [param for param in model.parameters() if param.requires_grad]
    options: dict[str, Any] = dict(config.optimizer_options)
    try:
        return found(trained, **options)
    except Exception as error:  # whatever the class raises
        problem = f"{found.__name__} refuses {shown(options)}: {text_of(error)}"
        raise BadConfig(field="optimizer_options", problem=" ".join(problem.split())) from error


def _optimizer_class(name: str) -> object:
    """What a name means, if anything.

    A config is data, and nothing that it names is imported: a module counts only if the program has imported
    it itself. A distribution that is installed may offer its own by entry point.

    Raises:
        BadConfig: the program has not imported that module, or what is offered cannot be loaded.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name in vars(torch.optim):
            return vars(torch.optim)[name]
        offered = {point.name: point for point in entry_points(group="remat.optimizers")}
        try:
            return offered[name].load() if name in offered else None
        except Exception as error:  # whatever that package raises
            problem = f"{shown(name)} cannot be loaded ({text_of(error)})"
            raise BadConfig(field="optimizer", problem=" ".join(problem.split())) from error
    module = sys.modules.get(place)
    if module is None:
        problem = f"names the module {shown(place)}, and a config imports none: import it in your program"
        raise BadConfig(field="optimizer", problem=f"{problem} first")
    return vars(module).get(attribute)


def check_options(options: Mapping[str, Any]) -> None:
    """See that a module whose values move has all options that it is given.

    Raises:
        BadConfig: it lacks one.
    """
    known = inspect.signature(Offmate.__init__).parameters
    lacks = [name for name in options if name not in known]
    if lacks:
        problem = f"offmate has no option {', '.join(lacks)}; leave it out, or use a config of another type"
        raise BadConfig(field="type", problem=problem)


def _check(name: str, given: object, wanted: type, advice: str) -> None:
    """See that an argument, if it is given, is what it can be."""
    if given is not None and not isinstance(given, wanted):
        raise OffloadMisuse(
            problem=f"{name} is a {type(given).__name__}, not a {wanted.__name__}", advice=advice
        )


@attrs.define(eq=False)
class _End:
    """The end of a module, which may be called again, and in the midst of anything.

    Attributes:
        training: what it trains with.
        own: the machine and the pool that were made for it.
        process: the one that made it, in which alone it ends.
        told: whether a failure was told; those of other updates are not told after it.
    """

    training: Training
    own: Sequence[LanedMachine | HostPool]
    process: int = attrs.field(factory=os.getpid)
    told: bool = False

    def __call__(self) -> None:
        """Finish, since the module was let go: that is nobody's call that could be told of a failure."""
        outside_of_lanes(self._finish_alone)

    def _finish_alone(self) -> None:
        try:
            self.finish()
        except RematError as error:
            warn(f"the last updates of a module that was let go were not all carried out: {error}")

    def finish(self) -> None:
        """Finish its updates; what was made for it ends, whether or not they could be carried out.

        Raises:
            LaneFailed: one could not.
        """
        if self.process != os.getpid():
            return
        try:
            if not self.told:
                self.training.leave()
        except RematError:
            self.told = True
            raise
        finally:
            for each in self.own:
                if isinstance(each, HostPool):
                    each.give_up()
                else:
                    each.close()


def _host_nbytes(host_budget: int | str | None) -> int:
    if host_budget is not None:
        return parse_nbytes(host_budget)
    return int(HOST_SHARE * (free_on(torch.device("cpu")) or 0))
