"""Checks that need no torch: a command makes them before its long work."""

import attrs

from remat_facade.entrypoints.model_budget import check_model_budget, meant_by
from remat_facade.planning.method import Method
from remat_facade.planning.state_rules import rule_of
from remat_graph import BadBudget, Budget, Graph, noremat_peak_nbytes, parse_nbytes
from remat_solvers import get_solver

FAR = 1000
"""A budget without a unit is a mistake if the unplanned step needs this many times as much."""


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


def check_graph_budget(budget: str, graph: Graph) -> None:
    """Check that a budget in bytes is meant in bytes: a graph in a test may be as small.

    Raises:
        BadBudget: it is a small number without a unit, and the graph needs far more.
    """
    nbytes = Budget.parse(budget).nbytes
    if nbytes is not None and noremat_peak_nbytes(graph) > FAR * nbytes:
        check_budget(budget)


def size_of(text: str) -> int:
    """The bytes of a size of a device or a budget in bytes.

    Raises:
        BadBudget: it is not a size, or a small number without a unit.
    """
    nbytes = parse_nbytes(text)
    if not nbytes:
        raise BadBudget(budget=repr(text), problem="is zero", share=False)
    meant = meant_by(text, share=False)
    if meant:
        raise BadBudget(budget=repr(text), problem=f"is {nbytes} bytes", meant=meant, share=False)
    return nbytes


def check_method(method: Method, optimizer: str = "adamw") -> None:
    """Check the names of a solver and of an optimizer.

    Raises:
        UnknownSolver: no solver has this name.
        BadParameter: the solver does not accept these parameters.
        UnknownOptimizer: the size of the optimizer's states is unknown.
    """
    get_solver(method.solver, **method.parameters)
    rule_of(optimizer)
