"""The warning of a plan whose search Ctrl-C ended."""

import warnings

from remat_facade.errors import PlanningInterrupted
from remat_graph import Plan


def warn_of_interrupt(plan: Plan) -> None:
    """Warn that a plan is the best until Ctrl-C, and how far from the best of all it can be."""
    warnings.warn(
        f"planning was interrupted: the best plan so far has an overhead of {plan.overhead:+z.2%}; no plan "
        f"has less than {plan.lower_bound_overhead:+z.2%} (gap {plan.gap:.2%})",
        PlanningInterrupted,
        stacklevel=4,
    )
