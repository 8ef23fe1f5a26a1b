"""Limit the memory of a model's training step in place.

    limit_memory(model, "20GiB")   # the same object, of a subclass of its own class
    planned(model)                 # None before the first training step, then its plan, fit and counts

`release` undoes it.
"""

import os
from collections.abc import Mapping
from typing import Any, TypeVar, Unpack, cast

from torch import nn

from remat_executor import PlannedModule
from remat_executor.module import in_place
from remat_executor.module.forward_binding import ForwardBinding
from remat_facade.entrypoints.budgeted_module import BudgetedModule
from remat_facade.entrypoints.inputs import as_call
from remat_facade.entrypoints.keywords import LimitKeywords
from remat_facade.entrypoints.rockmate import Rockmate
from remat_facade.errors import BadModel
from remat_facade.planning.method import choose_method
from remat_graph import Budget

BUDGET = "REMAT_BUDGET"
"""The environment variable with the budget of models for which none is given."""

_M = TypeVar("_M", bound=nn.Module)


def limit_memory(
    model: _M,
    budget: int | str | None = None,
    *,
    sample: Any = None,
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
        **options: as for `Rockmate`; ``sample_kwargs`` plans at once, too.

    Returns:
        The model.

    Raises:
        BadModel: it is no module, or is planned by a wrapper.
        BadInput: its class cannot be replaced.
        BadBudget: the budget is invalid.
        BadConfig: the config, solver or class contradict each other.
        TypeError: an option is unknown.

    With a sample, or else at the first call that needs gradients, all errors of `Rockmate` are raised too.
    """
    if not isinstance(model, nn.Module):
        raise BadModel(problem=f"is of type {type(model).__name__}; expected an nn.Module")
    if isinstance(in_place.unwrapped(model), PlannedModule):
        raise BadModel(problem="is planned already: give the original, which is its `module`")
    for name in options:
        if name not in LimitKeywords.__annotations__:
            raise TypeError(f"limit_memory() got an unexpected keyword argument {name!r}")
    chosen = (os.environ.get(BUDGET) or "auto") if budget is None else budget
    if chosen != "auto":
        Budget.parse(chosen)
    choose_method(
        "auto",
        options.get("config"),
        options.get("solver"),
        options.get("seed", 0),
        options.get("time_limit_s"),
    )
    sample_kwargs, call = options.pop("sample_kwargs", None), None
    if sample is not None or sample_kwargs is not None:
        call = as_call(() if sample is None else sample, sample_kwargs)
    if in_place.state_of(model) is not None:
        in_place.release(model)

    def make(binding: ForwardBinding, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedModule:
        return Rockmate._remat_bound(binding, args, chosen, sample_kwargs=kwargs, **options)

    state = in_place.plan_in_place(in_place.unwrapped(model), make)
    if call is not None:
        try:
            state.plan(*call)
        except BaseException:
            in_place.release(model)
            raise
    return model


def release(model: _M) -> _M:
    """Undo `limit_memory`: the model has its own class again, and plans are dropped.

    Returns:
        The model.

    Raises:
        BadInput: the model has no memory limit.
    """
    in_place.release(model)
    return model


def planned(model: nn.Module) -> BudgetedModule | None:
    """The planned module behind a model with a memory limit, with `plan`, `runs` and `will_it_fit`.

    Returns:
        The model itself if it is a `Rockmate` or an `Offmate`. None if nothing is planned yet, or if the
        model has no memory limit.
    """
    if isinstance(model, BudgetedModule):
        return model
    state = in_place.state_of(model)
    return None if state is None else cast("BudgetedModule | None", state.planned)
