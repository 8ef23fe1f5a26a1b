"""Limit the memory of a model's training step in place.

    limit_memory(model, "20GiB")   # the same object, of a subclass of its own class
    planned(model)                 # None before the first training step, then its plan, fit and counts

`release` undoes it.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Unpack, cast

import attrs
from torch import nn

from remat_executor import PlannedModule
from remat_executor.module import in_place
from remat_executor.module.forward_binding import ForwardBinding
from remat_executor.module.input_checks import output_indices
from remat_executor.module.planned_loss import LossFunction, check_loss, leave_loss, plan_loss
from remat_executor.module.shared_plan import check_ranks
from remat_facade.entrypoints.budgeted_module import BudgetedModule
from remat_facade.entrypoints.check_call import meant
from remat_facade.entrypoints.inputs import as_call, check_forward
from remat_facade.entrypoints.keywords import LimitKeywords
from remat_facade.entrypoints.model_budget import check_model_budget
from remat_facade.entrypoints.options import CostOptions, PlanOptions, RunOptions
from remat_facade.entrypoints.prepare import saved_plan
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.errors import BadModel
from remat_facade.planning.method import choose_method
from remat_facade.planning.planner import RecomputePlanner

BUDGET = "REMAT_BUDGET"
"""The environment variable with the budget of models for which none is given."""

_M = TypeVar("_M", bound=nn.Module)


def limit_memory(
    model: _M,
    budget: int | str | None = None,
    *,
    sample: Any = None,
    loss: LossFunction | None = None,
    **options: Unpack[LimitKeywords],
) -> _M:
    """Let a model's forward and backward stay within a memory budget from now on.

    The model stays the same object with the same attributes, and its class becomes a subclass of its own
    class, so programs that inspect, wrap, save or copy it see their model. Its step is planned at the first
    call that needs gradients, for the inputs of that call, and again for calls in other ways, as for
    `Rockmate`. What is assigned to its ``forward`` is planned as well. Calls without gradients run as before.

    Args:
        model: the module, or what `DistributedDataParallel` or `torch.compile` made of it. If its memory is
            limited already, the new limit replaces the old one.
        budget: as for `Rockmate`; None for the environment variable ``REMAT_BUDGET``, or else ``"auto"``.
        sample: plans at once, for this sample, as for `Rockmate`.
        loss: a function of the model's output and a target. The model then takes one more keyword:
            ``model(x, target=y)`` returns ``loss(output, y)``, computed within the budget, and ``model(x)``
            the output, as before. A sample has ``{"target": y}`` in its ``sample_kwargs``.
        **options: as for `Rockmate`; ``sample_kwargs`` plans at once, too.

    Returns:
        The model.

    Raises:
        BadModel: it is no module, or is planned by a wrapper.
        BadInput: its class cannot be replaced, the loss cannot be planned with it, or an option is invalid.
        BadBudget: the budget is invalid.
        BadConfig: the config, solver or class contradict each other.
        BadFile: the path of a config or plan has no valid file.
        UnknownOptimizer: the size of the optimizer's states is unknown.
        UnknownSolver: no solver has this name.
        TypeError: an option is unknown.

    With a sample, or else at the first call that needs gradients, all errors of `Rockmate` are raised too.
    """
    _check_limitable(model)
    chosen = check_limit("limit_memory", budget, options)
    sample_kwargs, call = options.pop("sample_kwargs", None), None
    if sample is not None or sample_kwargs is not None:
        call = as_call(() if sample is None else sample, sample_kwargs)
    if in_place.state_of(model) is not None:
        release(model)
    trained = in_place.unwrapped(model)
    if loss is not None:
        check_loss(trained, loss)

    def make(binding: ForwardBinding, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedModule:
        return Rockmate._remat_bound(binding, args, chosen, sample_kwargs=kwargs, **options)

    state = in_place.plan_in_place(trained, make)
    if loss is not None:
        plan_loss(trained, loss)
    if call is not None:
        try:
            state.plan(*call)
        except BaseException:
            release(model)
            raise
    return model


def check_limit(caller: str, budget: int | str | None, options: Mapping[str, Any]) -> int | str:
    """Check the arguments of `limit_memory` before there is a model.

    Args:
        caller: the function that a user calls, for messages.
        budget: as for `limit_memory`.
        options: as for `limit_memory`.

    Returns:
        The budget: the given one, that of the environment, or ``"auto"``.

    Raises:
        BadBudget: the budget is invalid.
        BadConfig: the config, solver or class contradict each other.
        UnknownSolver: no solver has this name.
        BadInput: an option is invalid.
        BadFile: the path of a plan has no valid file.
        UnknownOptimizer: the size of the optimizer's states is unknown.
        TypeError: an option is unknown.
    """
    for name in options:
        if name not in LimitKeywords.__annotations__:
            problem = f"got an unexpected keyword argument {name!r}"
            raise TypeError(f"{caller}() {problem}{meant(name, LimitKeywords.__annotations__)}")
    chosen = (os.environ.get(BUDGET) or "auto") if budget is None else budget
    check_model_budget(chosen)
    method = choose_method(
        "auto",
        options.get("config"),
        options.get("solver"),
        options.get("seed", 0),
        options.get("time_limit_s"),
        options.get("ways"),
        outputs=options.get("outputs"),
        gradients=options.get("gradients"),
    )
    reserve_nbytes = options.get("reserve_nbytes", 0)
    known = "100%" if chosen == "auto" else chosen
    RecomputePlanner(budget=known, method=method, reserve_nbytes=reserve_nbytes).check()
    step = {name: getattr(method, name) for name in ("ways", "outputs", "gradients")}
    given = {"budget": chosen, **options, **step}
    for kind in (PlanOptions, CostOptions, RunOptions):  # they check their values
        kind(**{name: given[name] for name in attrs.fields_dict(kind) if name in given})
    if not isinstance(options.get("differentiate"), Iterator):  # which can be read only once
        output_indices(options.get("differentiate"))
    check_ranks(options.get("ranks"))
    if options.get("plan") is not None:
        saved_plan(options["plan"])
    return chosen


def release(model: _M) -> _M:
    """Undo `limit_memory`: the model has its own class again, and plans are dropped.

    Returns:
        The model.

    Raises:
        BadInput: the model has no memory limit.
    """
    state = in_place.state_of(model)
    if state is not None:
        leave_loss(state)
    in_place.release(model)
    return model


def planned(model: nn.Module) -> BudgetedModule | None:
    """The planned module behind a model with a memory limit, with `plan`, `runs` and `will_it_fit`.

    Args:
        model: the model with the limit, or a module that has one such model in it, such as a
            `LightningModule` or a PEFT model.

    Returns:
        The model itself if it is a `Rockmate` or an `Offmate`. None if nothing is planned yet, or if the
        model has no memory limit, and neither has exactly one module in it.

    Raises:
        BadModel: it is no module, but a trainer say.
    """
    _module(model)
    found = _planned_itself(model)
    if found is not None or in_place.state_of(model) is not None:
        return found
    inside = limited_in(model)
    return _planned_itself(inside[0]) if len(inside) == 1 else None


def limited_in(model: nn.Module) -> list[nn.Module]:
    """The modules in a model, itself included, that have a memory limit."""
    limited = [m for m in model.modules() if isinstance(m, BudgetedModule) or in_place.state_of(m)]
    return list({id(in_place.unwrapped(each)): each for each in limited}.values())


def _planned_itself(model: nn.Module) -> BudgetedModule | None:
    if isinstance(model, BudgetedModule):
        return model
    state = in_place.state_of(model)
    return None if state is None else cast("BudgetedModule | None", state.planned)


def _check_limitable(model: nn.Module) -> None:
    """Raise `BadModel` if a limit of this object would bound nothing."""
    trained = in_place.unwrapped(_module(model))
    if isinstance(trained, PlannedModule):
        raise BadModel(problem="is planned already: give the original, which is its `module`")
    check_forward(trained)


def _module(model: object) -> nn.Module:
    """The model; raises `BadModel` if this is no module."""
    if isinstance(model, type):
        raise BadModel(problem=f"is the class {model.__name__}; expected an nn.Module: make an object of it")
    if not isinstance(model, nn.Module):
        hint = 'as in limit_memory(model, "20GiB")'
        if isinstance(getattr(model, "model", None), nn.Module):
            hint = "give its `model`"
        elif isinstance(model, list | tuple):
            hint = "limit each model by a call of its own"
        raise BadModel(problem=f"is of type {type(model).__name__}; expected an nn.Module: {hint}")
    return model
