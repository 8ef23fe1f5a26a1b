"""Certified statements about a graph: budgets below which nothing exists, times below which nothing runs."""

from remat_solvers.bounds.coarse import tight_bound
from remat_solvers.bounds.cut import lower_bound
from remat_solvers.bounds.floor import Floor, budget_floor

__all__ = ["Floor", "budget_floor", "lower_bound", "tight_bound"]
