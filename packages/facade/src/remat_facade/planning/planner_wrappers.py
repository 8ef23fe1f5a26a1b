"""Planners around another one: for a plan that there is already, for all ranks together, with notes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from remat_facade.planning.onednn_note import scratch_note
from remat_graph import Graph, OverBudget, Plan, fingerprint
from remat_graph.serialization.plans import plan_from_data, plan_to_data

if TYPE_CHECKING:  # it imports torch
    from remat_executor import MarginPlanner


@attrs.define(eq=False)
class FixedPlanner:
    """A planner that returns one plan for its graph, and asks another planner for later graphs.

    Attributes:
        plan: the plan.
        otherwise: plans other graphs, and says the budget.
        source: where the plan comes from, for messages.
        used: whether the plan was returned.
    """

    plan: Plan
    otherwise: "MarginPlanner"
    source: str = "the plan"
    used: bool = attrs.field(default=False, init=False)

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan may take now, whatever the fixed one was made for."""
        return self.otherwise.budget_for(graph)

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """The other planner with a margin of n bytes: the fixed plan took more than it says."""
        return self.otherwise.with_margin(nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """The fixed plan, judged again on this graph.

        Raises:
            ForeignPlan: the first graph asked for is not the plan's.
            OverBudget: the plan's peak on this graph is above the budget.
        """
        if self.used and fingerprint(graph) != self.plan.fingerprint:
            return self.otherwise(graph)
        plan = plan_from_data(plan_to_data(self.plan), graph=graph, source=self.source)
        budget_nbytes = self.otherwise.budget_for(graph)
        if plan.peak_nbytes > budget_nbytes:
            raise OverBudget(solver=plan.solver, peak_nbytes=plan.peak_nbytes, budget_nbytes=budget_nbytes)
        self.used = True
        return plan


@attrs.frozen
class RanksPlanner:
    """A planner for one of the ranks that plan together.

    Attributes:
        together: plans with the other ranks.
        alone: says this rank's budget, and plans with a margin what only this rank needs it for.
    """

    together: Callable[[Graph], Plan]
    alone: "MarginPlanner"

    def budget_for(self, graph: Graph) -> int:
        """This rank's."""
        return self.alone.budget_for(graph)

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """This rank's planner with a margin of n bytes."""
        return self.alone.with_margin(nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """The plan of all ranks."""
        return self.together(graph)


@attrs.frozen
class AnnotatedPlanner:
    """A planner whose plans carry notes.

    Attributes:
        planner: plans.
        note: the notes on a plan, in lines; what its budget does not count is noted as well.
    """

    planner: "MarginPlanner"
    note: Callable[[Plan], tuple[str, ...]]

    def budget_for(self, graph: Graph) -> int:
        """The planner's."""
        return self.planner.budget_for(graph)

    def with_margin(self, nbytes: int) -> "AnnotatedPlanner":
        """The planner with a margin of n bytes, whose plans carry notes too."""
        return attrs.evolve(self, planner=self.planner.with_margin(nbytes))

    def __call__(self, graph: Graph) -> Plan:
        """The planner's plan, with notes."""
        plan = self.planner(graph)
        return attrs.evolve(plan, notes=(*self.note(plan), *scratch_note(graph)))
