"""The classes that a user trains with: `Rockmate` and its variants.

    model = Hiremate(model, sample, "2GiB")   # use it like the original
    model.plan                                # predicted peak, time, overhead, lower bound, schedule

Each `Pure` class runs the method of its name only. A method that this version does not have is an error.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from remat_executor import Buckets
from remat_executor.module.gradient_states import GradientsState
from remat_executor.module.plan_cache import MOST_PLANS
from remat_executor.module.shared_plan import Ranks, plan_sharing
from remat_executor.translation.dropped_outputs import OutputsState
from remat_facade.config.types import Config
from remat_facade.entrypoints.budgeted_module import BudgetedModule
from remat_facade.entrypoints.inputs import as_call, device_of
from remat_facade.entrypoints.options import CallOptions, CostOptions, PlanOptions, RunOptions, Ways
from remat_facade.entrypoints.prepare import fixed_planner, prepare
from remat_facade.errors import UnknownOptimizer
from remat_facade.planning.memory_fit import Optimizer, fit_of
from remat_facade.planning.method import choose_method
from remat_facade.planning.planner import Progress
from remat_facade.planning.planner_wrappers import AnnotatedPlanner, EntryPlanner, RanksPlanner
from remat_graph import Plan, Platform
from remat_graph.serialization.fields import AnyPath


class Rockmate(BudgetedModule):
    """A model whose forward and backward stay within a memory budget; use it like the original.

    Outputs, gradients, buffers, random state and `state_dict` keys are those of the original.

    Args:
        model: the module, in the mode and on the device of training.
        sample: a tensor, a tuple or list of positional inputs, or a mapping of keyword inputs. If the only
            input of the model is a list, give `[that list]`.
        budget: bytes as an int, a size such as ``"2GiB"`` (binary) or ``"800MB"`` (decimal), ``"40%"`` of
            what the unplanned step holds beyond its gradients, or ``"auto"``: the free memory of the device,
            less gradients, the optimizer's states and a reserve of 5 % (22 % on CUDA without expandable
            segments). On the CPU the budget covers the memory that torch allocates; oneDNN keeps about
            0.1 MiB more for each kind of convolution, LSTM layer or 16-bit product, whatever the batch size,
            and the plan's notes report it.
        sample_kwargs: keyword inputs in addition to positional ones.
        reserve_nbytes: bytes of the budget reserved for memory outside the model, such as the caller's loss.
        config: a `Config`, the path of one, or a type's name: the planning method and its options.
        solver: the name of a registered solver, instead of a config.
        seed: seeds the solver's random choices; 0 keeps the config's seed.
        time_limit_s: wall-clock seconds for the solver; None keeps the config's limit, or else 20 s up to
            1,000 ops and 60 s at 10,000.
        cache_dir: the folder of measured times and saved plans; None for the default folder.
        plan: a saved plan (or its path) for this model and sample, instead of planning again.
        platform: a cost platform that gives the times, instead of measuring them.
        differentiate: indices of the output tensors that will get gradients; None for the first one
            that requires a gradient if it is a scalar, otherwise for all that do.
        on_progress: called with a short description when a stage begins or a better plan is found; None to
            show it in one line on stderr, where that is a terminal.
        ranks: under `torch.distributed`, "together" if all ranks build this module now and run one plan,
            which rank 0 makes (or a process group, for the ranks of that group); "alone" if each rank plans
            by itself. None is "alone", with a warning if there are several ranks. A later capture, for
            another input shape for example, is always planned by each rank itself.
        optimizer: the optimizer of the parameters, by a name of `optimizer_names()` (in
            `remat_facade.planning.state_rules`) or itself; its states count for ``budget="auto"`` and in
            `will_it_fit`.
        zoo: whether to load a plan that an earlier process saved for the same step, budget and method, and
            to save new plans; the environment variable ``REMAT_NO_ZOO`` disables both.
        max_plans: number of plans kept for different calls (shapes, modes); the least recently used plan is
            dropped first.
        buckets: pads inputs to a few lengths, which limits the number of plans.
        runtime: ``"eager"``; ``"inductor"``, which compiles the plan (results equal eager's up to rounding);
            or ``"cudagraph"``, which replays the plan on CUDA. The peak of the last two is measured once
            before use and checked against the budget.
        part_nbytes: largest number of gradient bytes that the backward collects before it delivers them to
            hooks, optimizers and all-reduces; 0 delivers each gradient by itself, None divides the backward
            into as many parts as cost 1 % of the step.
        ways: ``"exact"`` lets the plan choose other ways to run parts of the step that give the same bits,
            such as a cross entropy by chunks of rows; ``"none"`` keeps every operator as it was captured.
            ``"rounding"`` allows in addition ways whose results differ from the original's within rounding,
            such as a linear layer inside the chunks of a cross entropy; the plan names every op that such a
            way runs. None keeps the config's choice, or else ``"exact"``.
        outputs: ``"dropped"`` if you drop the outputs that are not differentiated before the backward, as
            ``model(...).loss.backward()`` drops the logits: plans then hold them only to the end of the
            forward. With ``"kept"`` they count to the end of the backward. None keeps the config's choice, or
            else ``"kept"``.
        gradients: what the budget must hold in addition to a ``.grad`` that exists when a call begins. A plan
            for ``"new"`` gradients holds each to the end of the backward. A plan for ``"present"`` ones, for
            calls that find a ``.grad`` for every parameter (accumulation, ``zero_grad(set_to_none=False)``,
            bucket views of DDP), adds each to that and frees it, so it works at smaller budgets or is faster;
            a call that finds none is planned like ``"new"``, which must then fit too. ``"auto"`` begins with
            ``"new"`` and makes the other plan when recomputation in calls that find gradients has taken as
            long as planning did. None keeps the config's choice, or else ``"auto"``.

    Raises:
        InfeasibleBudget: no schedule fits; the error has a budget that works.
        NotFound: the named method found no schedule, but another method did.
        BadBudget: the budget is invalid.
        BudgetAboveDevice: the budget exceeds the memory of the device.
        NothingLeft: the budget is ``"auto"``, and no memory is left.
        UnknownOptimizer: the size of the optimizer's states is unknown.
        BadModel: the model cannot be planned.
        BadSample: the sample is not a call of the model, or is on another device.
        Exception: any error of the model itself when it is called with the sample, with a note.
        BadConfig: the config, solver or class contradict each other.
        BadFile: the path of a config or plan has no valid file.
        ForeignPlan: the saved plan is of another graph.
        OverBudget: the saved plan exceeds the budget on this graph.
        MethodNotAvailable: the named method is not available in this version.
        UnknownSolver: no solver has this name.
        CaptureError: the step of the model cannot be captured as one graph.
        RanksDiffer: ranks that plan together have different graphs or budgets; raised on every rank.
        RankFailed: planning failed on another rank that plans together with this one.
        BadInput: the runtime is unknown or not available here, or an option is invalid.
        StepOverBudget: the runtime exceeds the budget with every plan that was tried.
        KeyboardInterrupt: by Ctrl-C, unless a plan is known: then the search ends with the best one so far
            and a `PlanningInterrupted` warning.
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
        ways: Ways | None = None,
        outputs: OutputsState | None = None,
        gradients: GradientsState | None = None,
    ) -> None:
        options = PlanOptions(budget=budget, reserve_nbytes=reserve_nbytes, optimizer=optimizer, zoo=zoo)
        cost = CostOptions(platform=platform, cache_dir=cache_dir, on_progress=on_progress)
        with plan_sharing(ranks) as together:
            method = choose_method(
                self._remat_method,
                config,
                solver,
                seed,
                time_limit_s,
                ways,
                outputs=outputs,
                gradients=gradients,
            )
            run = RunOptions(
                runtime=runtime,
                max_plans=max_plans,
                buckets=buckets,
                part_nbytes=part_nbytes,
                ways=method.ways,
                outputs=method.outputs,
                gradients=method.gradients,
            )
            call = CallOptions(arguments=as_call(sample, sample_kwargs), differentiate=differentiate)
            own = prepare(model, call.arguments, options, method, cost, carries_saved=True)
            planner: EntryPlanner = own if plan is None else fixed_planner(plan, own, method.gradients)
            if together is not None:
                terms = {"budget": str(own.budget), "reserve_nbytes": str(own.reserve_nbytes)}
                planner = RanksPlanner(partial(together.planner, terms=terms), planner)
            annotated = AnnotatedPlanner(planner, partial(_fit_note, model, optimizer))
            self._remat_build(model, annotated, call, cost, run, optimizer)
        if getattr(self, "_remat_binding", None) is None:  # `limit_memory` watches the model itself
            self._remat_warn_if_uncalled()


def _fit_note(model: nn.Module, optimizer: Optimizer, plan: Plan) -> tuple[str, ...]:
    """The memory of training beyond the budget; nothing if the size of the optimizer's states is unknown."""
    try:
        return (fit_of(model, plan.budget_nbytes, optimizer, device=device_of(model)).details(),)
    except UnknownOptimizer:
        return ()


class Hiremate(Rockmate):
    """`Rockmate` with the portfolio of all methods: the entry point for any network."""


class PureRotor(Rockmate):
    """`Rockmate` with rotor only."""

    _remat_method = "rotor"


class PureCheckmate(Rockmate):
    """`Rockmate` with Checkmate's integer linear program only."""

    _remat_method = "checkmate"


class PureRockmate(Rockmate):
    """`Rockmate` with the method of its paper only."""

    _remat_method = "rockmate"


class PureHiremate(Rockmate):
    """`Rockmate` with the method of the HiRemate paper only."""

    _remat_method = "hiremate"
