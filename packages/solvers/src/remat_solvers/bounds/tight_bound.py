"""The best bound that can be proven in the time given: branch and bound, and rounds of the coarse program."""

from math import inf

from remat_graph import Graph
from remat_solvers.bounds.decisions import DecidedBound
from remat_solvers.protocol import Deadline


def tight_bound(
    graph: Graph, budget_nbytes: int, deadline: Deadline | None = None, *, known_s: float = inf
) -> float:
    """Seconds that no valid schedule within the budget beats: `lower_bound`, raised step by step.

    Like `lower_bound` for schedules without transfers whose first runs use the first implementations of a
    decision.

    Args:
        graph: the training step, with switches too: the bound holds for every decision of them.
        budget_nbytes: bound on the peak.
        deadline: ends the search with what is proven so far; without one it can take hours where memory is
            tight at many moments.
        known_s: compute time of a known schedule within the budget: the bound does not exceed it, and it cuts
            the programs short.

    Returns:
        Seconds of computing; infinite if nothing fits.
    """
    deadline = deadline or Deadline()
    bound = DecidedBound(graph, budget_nbytes, deadline)
    bound.prove(known_s, deadline)
    return min(bound.lower_s, known_s)
