"""The bound of a plan that there is already: of a graph that was measured again, or a higher one."""

import attrs

from remat_graph import Grads, Graph, Plan
from remat_solvers import Deadline
from remat_solvers.bounds import tight_bound
from remat_solvers.bounds.decisions import ROUNDING, bounding_graphs, time_bound_s
from remat_solvers.errors import warn_of
from remat_solvers.present_gradients import freed_gradients


def with_bound(graph: Graph, plan: Plan) -> Plan:
    """The plan with a lower bound of this graph's times, if its own was of others.

    Args:
        graph: the step of the plan.
        plan: as it was read, without a bound where its times are not those of the graph. One that moves
            values to the host stays so.
    """
    if plan.lower_bound_s or plan.links is not None or not graph.time_s:
        return plan
    step, computing_s = _bounded(graph, plan), plan.noremat_time_s * (1 + plan.overhead)
    # Without a limit: 0.1 s at 1,000 ops and 3 s at 10,000, after 2 s of compiling in a new installation.
    bound_s = min(time_bound_s(each, plan.budget_nbytes, Deadline()) for each in bounding_graphs(step))
    return attrs.evolve(plan, lower_bound_s=min(bound_s, computing_s))


def raised_bound(graph: Graph, plan: Plan, deadline: Deadline) -> Plan:
    """The plan with the best bound that is proven until the deadline."""
    computing_s = plan.noremat_time_s * (1 + plan.overhead)
    if plan.lower_bound_s >= computing_s * (1 - ROUNDING):
        return plan
    try:
        bound_s = tight_bound(_bounded(graph, plan), plan.budget_nbytes, deadline, known_s=computing_s)
    except Exception as error:  # noqa: BLE001 - whatever it is, the plan still counts
        warn_of("the coarse program", error)
        return plan
    return attrs.evolve(plan, lower_bound_s=max(plan.lower_bound_s, bound_s))


def _bounded(graph: Graph, plan: Plan) -> Graph:
    """The step whose bound is that of the plan."""
    return freed_gradients(graph) if plan.grads is Grads.PRESENT else graph
