"""Planners that wrap another planner: to reuse a given plan, to plan with other ranks, to add notes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from remat_facade.planning.onednn_note import onednn_note
from remat_graph import Graph, OverBudget, Plan, fingerprint
from remat_graph.serialization.plans import plan_from_data, plan_to_data

if TYPE_CHECKING:  # the module imports torch
    from remat_executor import MarginPlanner


@attrs.define(eq=False)
class FixedPlanner:
    """A planner that returns one plan for its graph, and asks another planner for later graphs."""

    plan: Plan  # the plan
    otherwise: "MarginPlanner"  # the planner of other graphs, which also gives the budget
    source: str = "the plan"  # the origin of the plan, for messages
    used: bool = attrs.field(default=False, init=False)  # whether the plan was returned

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan may take; the budget of the fixed plan does not matter."""
        return self.otherwise.budget_for(graph)

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """The other planner with a margin of n bytes: the measured peak of the fixed plan was too high."""
        return self.otherwise.with_margin(nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """The fixed plan, simulated again on this graph.

        Raises:
            ForeignPlan: the first graph is not the graph of the plan.
            OverBudget: the plan's peak on this graph exceeds the budget.
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
        alone: the planner of this rank, for its budget and for plans with a margin that only it needs.
    """

    together: Callable[[Graph], Plan]
    alone: "MarginPlanner"

    def budget_for(self, graph: Graph) -> int:
        """The budget of this rank."""
        return self.alone.budget_for(graph)

    def with_margin(self, nbytes: int) -> "MarginPlanner":
        """This rank's planner with a margin of n bytes."""
        return self.alone.with_margin(nbytes)

    def __call__(self, graph: Graph) -> Plan:
        """The common plan of all ranks."""
        return self.together(graph)


@attrs.frozen
class AnnotatedPlanner:
    """A planner whose plans carry notes.

    Attributes:
        planner: makes the plans.
        note: returns the notes on a plan, as lines; memory of oneDNN outside the budget is noted too.
    """

    planner: "MarginPlanner"
    note: Callable[[Plan], tuple[str, ...]]

    def budget_for(self, graph: Graph) -> int:
        """The budget of the planner."""
        return self.planner.budget_for(graph)

    def with_margin(self, nbytes: int) -> "AnnotatedPlanner":
        """The planner with a margin of n bytes; its plans carry notes too."""
        return attrs.evolve(self, planner=self.planner.with_margin(nbytes))

    def __call__(self, graph: Graph) -> Plan:
        """The plan of the planner, with notes."""
        plan = self.planner(graph)
        return attrs.evolve(plan, notes=(*self.note(plan), *onednn_note(graph)))
