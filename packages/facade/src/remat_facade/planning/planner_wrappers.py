"""Planners that wrap another planner: to reuse a given plan, to plan with other ranks, to add notes."""

from collections.abc import Callable
from typing import Protocol

import attrs

from remat_facade.planning.onednn_note import onednn_note
from remat_facade.planning.saved_bound import with_bound
from remat_graph import Grads, Graph, OverBudget, Plan, fingerprint
from remat_graph.serialization.plans import plan_from_data, plan_to_data


class EntryPlanner(Protocol):
    """A planner of an entry point: for a budget, with a margin, for either state of `.grad`."""

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan of `graph` may take."""

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes."""

    def with_margin(self, nbytes: int) -> "EntryPlanner":
        """The same planner with a margin of n bytes."""

    def for_grads(self, grads: Grads) -> "EntryPlanner":
        """The same planner for a state of `.grad`."""

    def planning_s(self, plan: Plan) -> float:
        """The seconds that planning took."""

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan a graph."""


@attrs.define(eq=False)
class FixedPlanner:
    """A planner that returns one plan for its graph, and asks another planner for later graphs."""

    plan: Plan  # the plan
    otherwise: EntryPlanner  # the planner of other graphs, which also gives the budget
    source: str = "the plan"  # the origin of the plan, for messages
    grads: Grads = Grads.NEW  # the state of `.grad` that calls find; the plan may be for another one
    used: bool = attrs.field(default=False, init=False)  # whether the plan was returned

    def budget_for(self, graph: Graph) -> int:
        """The bytes that a plan may take; the budget of the fixed plan does not matter."""
        return self.otherwise.budget_for(graph)

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes."""
        return self.otherwise.asked_for(nbytes)

    def with_margin(self, nbytes: int) -> EntryPlanner:
        """The other planner with a margin of n bytes: the measured peak of the fixed plan was too high."""
        return self.otherwise.with_margin(nbytes)

    def for_grads(self, grads: Grads) -> "FixedPlanner":
        """The planner for a state of `.grad`; the fixed plan is for one of them."""
        return FixedPlanner(self.plan, self.otherwise.for_grads(grads), self.source, grads)

    def planning_s(self, plan: Plan) -> float:
        """The seconds that planning took."""
        return self.otherwise.planning_s(plan)

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now."""
        return self.otherwise.revised(graph, plan)

    def __call__(self, graph: Graph) -> Plan:
        """The fixed plan, simulated again on this graph.

        Raises:
            ForeignPlan: the first graph is not the graph of the plan.
            OverBudget: the plan's peak on this graph exceeds the budget.
        """
        if self.plan.grads is not self.grads:
            return self.otherwise(graph)
        if self.used and fingerprint(graph) != self.plan.fingerprint:
            return self.otherwise(graph)
        plan = plan_from_data(plan_to_data(self.plan), graph=graph, source=self.source)
        budget_nbytes = self.otherwise.budget_for(graph)
        if plan.peak_nbytes > budget_nbytes:
            raise OverBudget(
                solver=plan.solver,
                peak_nbytes=plan.peak_nbytes,
                budget_nbytes=budget_nbytes,
                source=self.source,
            )
        self.used = True
        return with_bound(graph, plan)


@attrs.frozen
class RanksPlanner:
    """A planner for one of the ranks that plan together.

    Attributes:
        shared: makes a planner of this rank one that plans with the other ranks.
        alone: the planner of this rank, for its budget and for plans with a margin that only it needs.
    """

    shared: Callable[[EntryPlanner], Callable[[Graph], Plan]]
    alone: EntryPlanner

    def budget_for(self, graph: Graph) -> int:
        """The budget of this rank."""
        return self.alone.budget_for(graph)

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes."""
        return self.alone.asked_for(nbytes)

    def with_margin(self, nbytes: int) -> EntryPlanner:
        """This rank's planner with a margin of n bytes."""
        return self.alone.with_margin(nbytes)

    def for_grads(self, grads: Grads) -> "RanksPlanner":
        """The same planner for a state of `.grad`."""
        return RanksPlanner(self.shared, self.alone.for_grads(grads))

    def planning_s(self, plan: Plan) -> float:
        """The seconds that planning took."""
        return self.alone.planning_s(plan)

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now."""
        return self.alone.revised(graph, plan)

    def __call__(self, graph: Graph) -> Plan:
        """The common plan of all ranks."""
        return self.shared(self.alone)(graph)


@attrs.frozen
class AnnotatedPlanner:
    """A planner whose plans carry notes.

    Attributes:
        planner: makes the plans.
        note: returns the notes on a plan, as lines; memory of oneDNN outside the budget is noted too.
    """

    planner: EntryPlanner
    note: Callable[[Plan], tuple[str, ...]]

    def budget_for(self, graph: Graph) -> int:
        """The budget of the planner."""
        return self.planner.budget_for(graph)

    def asked_for(self, nbytes: int) -> int:
        """The budget to ask for so that a plan may need n bytes."""
        return self.planner.asked_for(nbytes)

    def with_margin(self, nbytes: int) -> "AnnotatedPlanner":
        """The planner with a margin of n bytes; its plans carry notes too."""
        return attrs.evolve(self, planner=self.planner.with_margin(nbytes))

    def for_grads(self, grads: Grads) -> "AnnotatedPlanner":
        """The planner for a state of `.grad`."""
        return attrs.evolve(self, planner=self.planner.for_grads(grads))

    def planning_s(self, plan: Plan) -> float:
        """The seconds that planning took."""
        return self.planner.planning_s(plan)

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now."""
        found = self.planner.revised(graph, plan)
        return None if found is None else self._with_notes(graph, found)

    def __call__(self, graph: Graph) -> Plan:
        """The plan of the planner, with notes."""
        return self._with_notes(graph, self.planner(graph))

    def _with_notes(self, graph: Graph, plan: Plan) -> Plan:
        return attrs.evolve(plan, notes=(*self.note(plan), *onednn_note(graph)))
