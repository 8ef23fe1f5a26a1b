"""Questions users ask: what is the smallest budget?"""

import attrs
from remat_graph import Graph, Schedule, simulate

from remat_solvers.errors import InfeasibleBudget
from remat_solvers.protocol import Deadline


@attrs.frozen(kw_only=True, eq=False)
class MinBudget:
    """The smallest budget for which a schedule was found, and the floor below which none exists.

    Attributes:
        nbytes: the schedule's peak.
        schedule: a schedule that needs this much.
        floor_nbytes: no schedule needs less.
        floor_op: name of the op that binds at the floor.
        floor_reason: in words.
        floor_op_nbytes: what that op alone holds.
    """

    nbytes: int
    schedule: Schedule
    floor_nbytes: int
    floor_op: str
    floor_reason: str
    floor_op_nbytes: int


def min_budget(graph: Graph, deadline: Deadline | None = None) -> MinBudget:
    """Find the smallest budget (first version: save-all)."""
    schedule = Schedule.from_order(graph, range(len(graph.ops)))
    peak = simulate(graph, schedule).peak_nbytes
    return MinBudget(
        nbytes=peak, schedule=schedule, floor_nbytes=0, floor_op="", floor_reason="", floor_op_nbytes=0
    )


def infeasible(graph: Graph, budget_nbytes: int, deadline: Deadline | None = None) -> InfeasibleBudget:
    """The error that says what would work."""
    smallest = min_budget(graph, deadline)
    return InfeasibleBudget(
        budget_nbytes=budget_nbytes,
        smallest_nbytes=smallest.nbytes,
        floor_nbytes=smallest.floor_nbytes,
        floor_op=smallest.floor_op,
        floor_op_nbytes=smallest.floor_op_nbytes,
    )
