"""Check the budget of a model, and other sizes that a user gives, before its step is captured."""

import attrs

from remat_graph import BadBudget, parse_nbytes
from remat_graph.budget import BudgetLike, check_unit, meant_by
from remat_graph.errors import shown


def check_model_budget(budget: BudgetLike) -> None:
    """Check that a budget is ``"auto"`` or can be parsed, and that a small one names its unit.

    ``"40"`` would be 40 bytes, which no model trains in; the user means ``"40%"`` or ``"40GiB"``. An int is
    not refused, because programs compute it, and neither is ``"40B"``.

    Raises:
        BadBudget: the budget is invalid, or text below 1024 bytes without a unit.
    """
    if isinstance(budget, str) and budget == "auto":
        return
    try:
        check_unit(budget)
    except BadBudget as error:
        raise attrs.evolve(error, auto=True) from None


def size_of(given: BudgetLike, name: str) -> int:
    """The bytes of a size, such as the memory of a device.

    Args:
        given: bytes, or text with a unit.
        name: of the argument or option, for messages.

    Raises:
        BadBudget: it is no size, zero, or a small number without a unit.
    """
    try:
        nbytes = parse_nbytes(given)
    except BadBudget as error:
        raise attrs.evolve(error, name=name) from None
    if not nbytes:
        raise BadBudget(budget=shown(given), problem="is zero", share=False, name=name)
    meant = meant_by(given, share=False)
    if meant:
        problem = f"is {nbytes} bytes"
        raise BadBudget(budget=shown(given), problem=problem, meant=meant, share=False, name=name)
    return nbytes
