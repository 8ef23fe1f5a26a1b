"""Checks that need no torch: a command makes them before its long work."""

from collections.abc import Iterable

import attrs

from remat_facade.entrypoints.model_budget import check_model_budget
from remat_facade.errors import BudgetAboveDevice, NothingLeft
from remat_facade.planning.method import Method
from remat_facade.planning.state_rules import rule_of
from remat_graph import BadBudget, Budget, format_nbytes
from remat_solvers import check_solver_name, get_solver


def check_budget(budget: str) -> None:
    """Check the budget of a model that has no device memory to fill.

    Raises:
        BadBudget: the budget is invalid, ``"auto"``, or a small number without a unit.
    """
    Budget.parse(budget)
    try:
        check_model_budget(budget)
    except BadBudget as error:
        raise attrs.evolve(error, auto=False) from None


def check_device(budget: str, device_nbytes: int | None, *, estimated: bool) -> None:
    """Check the budget of a model against the memory of the device.

    Args:
        budget: as the user wrote it.
        device_nbytes: the memory of the device, if it is given.
        estimated: whether the model is built without values, for a device that is not here.

    Raises:
        NothingLeft: the budget is ``"auto"``, and the memory is neither given nor that of this device.
        BudgetAboveDevice: the budget exceeds the memory that is given.
    """
    if budget == "auto":
        if estimated and device_nbytes is None:
            problem = "the memory of the device of --platform is unknown"
            raise NothingLeft(problem=problem, advice="add --device-memory, for example 16GiB")
        return
    nbytes = Budget.parse(budget).nbytes
    if nbytes is not None and device_nbytes is not None and nbytes > device_nbytes:
        has = f"the given device, which has {format_nbytes(device_nbytes)}"
        raise BudgetAboveDevice(budget=budget, device=has)


def size_for(nbytes: int) -> str:
    """A size of at least n bytes, as an option takes it: whole KiB, or MiB where that is nearly the same."""
    unit, scale = ("KiB", 2**10) if nbytes < 100 * 2**20 else ("MiB", 2**20)
    return f"{-(-nbytes // scale)}{unit}"


def methods_of(text: str) -> list[str]:
    """The names of methods that a string lists, each once; no method is loaded.

    Raises:
        UnknownSolver: no solver has such a name.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        check_solver_name(name)
    return names


def load_methods(names: Iterable[str]) -> None:
    """Load methods before long work, since a package may be broken.

    Raises:
        ImportError: a method cannot be imported.
    """
    for name in names:
        get_solver(name)


def check_method(method: Method, optimizer: str = "adamw") -> None:
    """Check the names of a solver and of an optimizer.

    Raises:
        UnknownSolver: no solver has this name.
        BadParameter: the solver does not accept these parameters.
        UnknownOptimizer: the size of the optimizer's states is unknown.
    """
    rule_of(optimizer)
    get_solver(method.solver, **method.parameters)
