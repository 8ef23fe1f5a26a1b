"""Certified bounds of a graph: budgets that no schedule fits, and times that no schedule beats."""

from remat_solvers.bounds.budget_bound import Floor, budget_floor
from remat_solvers.bounds.tight_bound import tight_bound
from remat_solvers.bounds.time_bound import lower_bound

__all__ = ["Floor", "budget_floor", "lower_bound", "tight_bound"]
