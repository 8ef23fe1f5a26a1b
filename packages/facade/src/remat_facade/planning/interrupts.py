"""The warning of a plan whose search Ctrl-C ended."""

import warnings
from collections.abc import Callable

from remat_facade.errors import PlanningInterrupted
from remat_graph import Plan
from remat_solvers.running.stopping import interrupted


def warn_if_interrupted(plan: Plan, show: Callable[[str], None]) -> None:
    """Warn that a plan is the best until Ctrl-C, and how far from the best of all it can be.

    Args:
        plan: nothing is done unless its search was interrupted.
        show: called with "" before, to clear a line of progress.
    """
    if not interrupted(plan):
        return
    show("")
    warnings.warn(
        f"planning was interrupted: the best plan so far has an overhead of {plan.overhead:+z.2%}; no plan "
        f"has less than {plan.lower_bound_overhead:+z.2%} (gap {plan.gap:.2%})",
        PlanningInterrupted,
        stacklevel=3,
    )
