"""Plans of a search that Ctrl-C ended: how they are marked, and the warning of them."""

import warnings

from remat_facade.errors import PlanningInterrupted
from remat_graph import Plan
from remat_solvers.running.stopping import INTERRUPTED


def interrupted(plan: Plan) -> bool:
    """Whether Ctrl-C ended the search for a plan, which is the best until then."""
    return bool(plan.solver_stats.get(INTERRUPTED))


def warn_of_interrupt(plan: Plan) -> None:
    """Warn that a plan is the best until Ctrl-C, and how far from the best of all it can be."""
    warnings.warn(
        f"planning was interrupted: the best plan so far has an overhead of {plan.overhead:+.2%}; no plan "
        f"has less than {plan.lower_bound_overhead:+.2%} (gap {plan.gap:.2%})",
        PlanningInterrupted,
        stacklevel=4,
    )
