"""The bound of a saved plan on a graph that was measured again."""

import attrs

from remat_graph import Grads, Graph, Plan
from remat_solvers import Deadline
from remat_solvers.bounds.decisions import bounding_graphs, time_bound_s
from remat_solvers.present_gradients import freed_when_made


def with_bound(graph: Graph, plan: Plan) -> Plan:
    """The plan with a lower bound of this graph's times, if its own was of others.

    Args:
        graph: the step of the plan.
        plan: as it was read, without a bound where its times are not those of the graph. One that moves
            values to the host stays so.
    """
    if plan.lower_bound_s or plan.links is not None or not graph.time_s:
        return plan
    step = freed_when_made(graph) if plan.grads is Grads.PRESENT else graph
    # Without a limit: 0.1 s at 1,000 ops and 3 s at 10,000, after 2 s of compiling in a new installation.
    bound_s = min(time_bound_s(each, plan.budget_nbytes, Deadline()) for each in bounding_graphs(step))
    return attrs.evolve(plan, lower_bound_s=min(bound_s, plan.noremat_time_s * (1 + plan.overhead)))
