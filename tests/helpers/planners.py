"""Planners that need no solver: they let the executor be tested on schedules of any shape."""

import random

from remat_executor import PlanFunction
from remat_graph import Graph, Plan, Schedule, specialize
from remat_graph.testing.random_schedules import random_order

AMPLE_NBYTES = 1 << 50


def plan_order(graph: Graph, order: list[int], solver: str) -> Plan:
    """A plan of an order of ops, without a budget to speak of."""
    schedule = Schedule.from_order(graph, order)
    return Plan.from_schedule(graph, schedule, budget_nbytes=AMPLE_NBYTES, lower_bound_s=0.0, solver=solver)


def save_all(graph: Graph) -> Plan:
    """Every op once."""
    return plan_order(graph, list(range(len(graph.ops))), "save_all")


def repeat_at_random(count: int, seed: int = 0) -> PlanFunction:
    """`count` repeats of random ops at random places of the backward."""

    def plan(graph: Graph) -> Plan:
        rng = random.Random(seed)
        order = list(range(len(graph.ops)))
        forward = sum(not op.backward for op in graph.ops)
        for _ in range(count):
            place = rng.randrange(forward, len(order) + 1)
            order.insert(place, rng.choice([op for op in order[:place] if graph.ops[op].rerun is not None]))
        return plan_order(graph, order, "repeat_at_random")

    return plan


def all_switched(seed: int | None = None) -> PlanFunction:
    """Every switch on; every op once, or with a seed, an order with random repeats."""

    def plan(graph: Graph) -> Plan:
        decided = specialize(graph, graph.switches)
        order = range(len(decided.graph.ops)) if seed is None else random_order(decided.graph, seed)
        schedule = decided.restore(Schedule.from_order(decided.graph, order))
        budget = AMPLE_NBYTES
        return Plan.from_schedule(
            graph, schedule, budget_nbytes=budget, lower_bound_s=0.0, solver="all_switched"
        )

    return plan
