"""Certified bounds of a graph: budgets that no schedule fits, and times that no schedule beats."""

from remat_solvers.bounds.coarse import tight_bound
from remat_solvers.bounds.cut import lower_bound
from remat_solvers.bounds.floor import Floor, budget_floor

__all__ = ["Floor", "budget_floor", "lower_bound", "tight_bound"]
