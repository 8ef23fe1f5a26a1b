"""Check the budget of a model before its step is captured."""

import attrs

from remat_graph import BadBudget
from remat_graph.budget import BudgetLike, check_unit


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
