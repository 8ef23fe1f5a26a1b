"""The classes that a user trains with: `Rockmate` and its variants.

    model = Hiremate(model, sample, "2GiB")   # use it as the original
    model.plan                                # predicted peak, time, overhead, lower bound, schedule

The `Pure` classes run the one method of their name and nothing else; a method that this version does not have
is an error, never another method in its place.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from remat_executor import Buckets, MarginPlanner
from remat_executor.module.distributed import Ranks, plan_sharing
from remat_executor.module.plan_cache import MOST_PLANS
from remat_facade.config.types import Config
from remat_facade.entrypoints.budgeted_module import BudgetedModule
from remat_facade.entrypoints.inputs import device_of
from remat_facade.entrypoints.options import AnyPath, CallOptions, CostOptions, PlanOptions, RunOptions
from remat_facade.entrypoints.prepare import fixed_planner, prepare
from remat_facade.errors import UnknownOptimizer
from remat_facade.planning.memory_fit import Optimizer, fit_of
from remat_facade.planning.method import choose_method
from remat_facade.planning.planner import Progress
from remat_facade.planning.planner_wrappers import AnnotatedPlanner, RanksPlanner
from remat_graph import Plan, Platform


class Rockmate(BudgetedModule):
    """A model whose forward and backward stay within a memory budget; use it as the original.

    Outputs, gradients, buffers and random state are those of the original, `state_dict` keys too.

    Args:
        model: the module, in the mode and on the device it will train.
        sample: a tensor, a tuple or list of positional inputs, or a mapping of keyword inputs. A model whose
            only input is a list takes `[that list]`.
        budget: bytes as an int, a text such as ``"2GiB"`` (binary) or ``"800MB"`` (decimal), ``"40%"`` of
            what the unplanned step holds beyond its gradients, or ``"auto"``: what the device has left now,
            less gradients, the optimizer's states and a reserve of 5 %. On the CPU the budget is of what
            torch hands out; what oneDNN keeps past it (about 0.1 MiB for each kind of convolution, LSTM layer
            or product in 16 bits, whatever the batch) lies beside it, and the plan's notes say so.
        sample_kwargs: keyword inputs beside positional ones.
        reserve_nbytes: bytes of the budget left to what lies outside the model, such as the caller's loss.
        config: a `Config`, the path of one, or a type's name; who plans, and how.
        solver: the name of a registered solver, instead of a config.
        seed: seeds the solver's random choices; 0 leaves the config's.
        time_limit_s: wall-clock seconds for the solver, instead of the config's.
        cache_dir: where measured times and plans are kept; None for the default folder.
        plan: a saved plan (or its path) to use for this model and sample instead of planning again.
        platform: takes times from a cost platform instead of measuring.
        differentiate: indices of the output tensors that will get gradients; None for a lone scalar loss if
            it comes first, else all.
        on_progress: told in a few words what begins.
        ranks: under `torch.distributed`, "together" if all ranks build this module now and shall run one
            plan, which rank 0 makes (a process group for the ranks of that group); "alone" if each plans for
            itself, which is also what None does, with a warning where there are several ranks. What is
            captured later, for another shape say, each rank plans for itself.
        optimizer: who will update the parameters, by a name of `optimizer_names()` (in
            `remat_facade.planning.memory_fit`) or itself; its states count for ``budget="auto"`` and in
            `will_it_fit`.
        zoo: whether a plan that an earlier process saved for this step, budget and method is used, and one
            that is made is saved; the environment variable ``REMAT_NO_ZOO`` turns it off too.
        max_plans: how many plans are kept for other ways of calling; the least recently used goes first.
        buckets: pads inputs to a few lengths, so that there are as few plans.
        runtime: ``"eager"``; ``"inductor"``, which compiles the plan (results within rounding of eager's); or
            ``"cudagraph"``, which replays it on CUDA. The last two are tried once, to see that they keep to
            the budget.
        part_nbytes: bytes of gradients that wait together at most before the backward hands them over, to
            hooks, optimizers and all-reduces; 0 for each by itself, None for as many parts as cost a
            hundredth of the step.

    Raises:
        InfeasibleBudget: no schedule fits; it names a budget that works.
        BadBudget: the budget means nothing.
        BudgetAboveDevice: the device has less memory.
        NothingLeft: the budget is ``"auto"`` and nothing is left.
        UnknownOptimizer: the optimizer's states cannot be counted.
        BadModel: there is nothing to plan.
        BadSample: it is no sample, or on another device.
        Exception: whatever the model itself raises when it is called with the sample, with a note.
        MethodNotAvailable: the named method is not in this version.
        RanksDiffer: ranks that plan together have different graphs or budgets; raised on every rank.
        RankFailed: something went wrong on another rank that plans together with this one.
        BadInput: there is no such runtime, or not here; or an option means nothing.
        OverCompiled: the runtime takes more than the budget, however it is planned.
    """

    _remat_method: ClassVar[str] = "auto"

    __slots__ = ()

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        budget: int | str,
        *,
        sample_kwargs: Mapping[str, Any] | None = None,
        reserve_nbytes: int = 0,
        config: Config | AnyPath | None = None,
        solver: str | None = None,
        seed: int = 0,
        time_limit_s: float | None = None,
        cache_dir: AnyPath | None = None,
        plan: Plan | AnyPath | None = None,
        platform: Platform | None = None,
        differentiate: Iterable[int] | None = None,
        on_progress: Progress | None = None,
        runtime: str = "eager",
        ranks: Ranks | None = None,
        optimizer: Optimizer = "adamw",
        zoo: bool = True,
        max_plans: int = MOST_PLANS,
        buckets: Buckets | None = None,
        part_nbytes: int | None = None,
    ) -> None:
        call = CallOptions(sample=sample, sample_kwargs=sample_kwargs, differentiate=differentiate)
        options = PlanOptions(budget=budget, reserve_nbytes=reserve_nbytes, optimizer=optimizer, zoo=zoo)
        cost = CostOptions(platform=platform, cache_dir=cache_dir, on_progress=on_progress)
        run = RunOptions(runtime=runtime, max_plans=max_plans, buckets=buckets, part_nbytes=part_nbytes)
        with plan_sharing(ranks) as together:
            method = choose_method(self._remat_method, config, solver, seed, time_limit_s)
            arguments, own = prepare(model, call, options, method, cost)
            planner: MarginPlanner = own if plan is None else fixed_planner(plan, own)
            if together is not None:
                terms = {"budget": str(own.budget), "reserve_nbytes": str(own.reserve_nbytes)}
                planner = RanksPlanner(together.planner(planner, terms), planner)
            annotated = AnnotatedPlanner(planner, partial(_fit_note, model, optimizer))
            self._remat_build(model, arguments, annotated, call, cost, run, optimizer=optimizer)


def _fit_note(model: nn.Module, optimizer: Optimizer, plan: Plan) -> tuple[str, ...]:
    """What training holds in addition to a plan's budget; nothing where the optimizer is not known."""
    try:
        return (fit_of(model, plan.budget_nbytes, optimizer, device=device_of(model)).details(),)
    except UnknownOptimizer:
        return ()


class Hiremate(Rockmate):
    """The entry point for any network: `Rockmate` by the portfolio."""


class PureRotor(Rockmate):
    """`Rockmate` by rotor alone."""

    _remat_method = "rotor"


class PureCheckmate(Rockmate):
    """`Rockmate` by Checkmate's integer linear program alone."""

    _remat_method = "checkmate"


class PureRockmate(Rockmate):
    """`Rockmate` by the method of its paper alone."""

    _remat_method = "rockmate"


class PureHiremate(Rockmate):
    """`Rockmate` by the method of the HiRemate paper alone."""

    _remat_method = "hiremate"
