"""Questions users ask: what is the smallest budget?"""

import attrs

from remat_graph import Graph, Schedule, simulate
from remat_solvers.bounds import budget_floor
from remat_solvers.descend import descend
from remat_solvers.errors import InfeasibleBudget
from remat_solvers.evaluate import flatten
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
    """Find the smallest budget for which a schedule is found, and certify a floor below it.

    Args:
        graph: the training step.
        deadline: limit by the clock; without one about 10 s at 600 ops.
    """
    floor = budget_floor(graph)
    order = descend(flatten(graph), floor.nbytes, floor.nbytes, deadline or Deadline())
    schedule = Schedule.from_order(graph, order.tolist())
    return MinBudget(
        nbytes=simulate(graph, schedule).peak_nbytes,
        schedule=schedule,
        floor_nbytes=floor.nbytes,
        floor_op=floor.op,
        floor_reason=floor.reason,
        floor_op_nbytes=floor.op_nbytes,
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
