"""What a trainer reports of a model with a memory limit: its plan in words, and its figures for a logger."""

from torch import nn

from remat_executor.module.in_place import state_of
from remat_executor.module.notices import uncalled
from remat_facade.entrypoints.limit_memory import planned


def plan_text(model: nn.Module) -> str | None:
    """The plan that ran last and the memory of training, in lines; None if nothing is planned."""
    found = planned(model)
    return None if found is None else found.plan.summary()


def warn_uncalled(model: nn.Module) -> bool:
    """Warn if nothing is planned after a step of training, and no warning said why; whether it warned."""
    state = state_of(model)
    if state is None or state.planned is not None or state.warned:
        return False
    state.warn_once(uncalled(()))
    return True


def plan_figures(model: nn.Module) -> dict[str, float]:
    """Figures of that plan by name, with counts of calls; empty if nothing is planned.

    Bytes are named ``..._nbytes`` and ratios ``overhead``, the extra time relative to the unplanned step, and
    ``lower_bound_overhead``, the least extra time that any plan within the budget could have.
    """
    found = planned(model)
    if found is None:
        return {}
    plan = found.plan
    figures = {
        "budget_nbytes": plan.budget_nbytes,
        "peak_nbytes": plan.peak_nbytes,
        "overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
        "calls_planned": found.runs["planned"],
        "calls_unplanned": found.runs["original"],
        "plans": 1 + found.runs["replanned"],
    }
    return {f"remat/{name}": float(value) for name, value in figures.items()}
