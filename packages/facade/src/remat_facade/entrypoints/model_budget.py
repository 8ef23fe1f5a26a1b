"""Check the budget of a model before its step is captured."""

import re

import attrs

from remat_graph import BadBudget, Budget, format_nbytes
from remat_graph.budget import BudgetLike

LEAST_BARE_NBYTES = 1024
"""The smallest budget that may be text without a unit."""


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
        parsed = Budget.parse(budget)
    except BadBudget as error:
        raise attrs.evolve(error, auto=True) from None
    meant = meant_by(budget)
    if meant:
        problem = f"has no unit, so it would be {format_nbytes(parsed.nbytes or 0)}"
        raise BadBudget(budget=parsed.text, problem=problem, meant=meant)


def meant_by(size: BudgetLike, *, share: bool = True) -> str:
    """What a valid budget below 1024 bytes without a unit may mean; empty for any other budget.

    Args:
        size: the budget.
        share: whether it may be a percentage.
    """
    if not isinstance(size, str) or re.search(r"[a-z%]\s*$", size, re.IGNORECASE):
        return ""
    if (Budget.parse(size).nbytes or 0) >= LEAST_BARE_NBYTES:
        return ""
    number = size.strip().removeprefix("+")
    percent = [f'"{number}%"'] if share else []
    return " or ".join([*percent, f'"{number}GiB"'])
