"""Replace plans of steps by faster ones, when the planner finds that a search for them pays off.

A planner may carry a plan over from another size of the step, which is quick and may be slower than a plan
that it searches for. It is asked before each step.
"""

import contextlib
import weakref
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Protocol, runtime_checkable

import attrs

from remat_executor.inspection.tensors import Tensors
from remat_executor.module.pipeline import PipelineStages, PlanFunction
from remat_executor.module.planned_step import PlannedStep
from remat_graph import Graph, Plan, RematError


@runtime_checkable
class RevisingPlanner(Protocol):
    """A planner whose plans may be replaced by faster ones."""

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now; asked before each step by `plan`."""


@attrs.define(kw_only=True, eq=False)
class RevisedPlans:
    """The steps with faster plans.

    Attributes:
        planner: finds faster plans, if it is a `RevisingPlanner`.
        stages: lowers plans.
        lock: held while one is made.
        newer: per step the one that replaced it.
    """

    planner: PlanFunction
    stages: PipelineStages
    lock: AbstractContextManager[object]
    newer: "weakref.WeakKeyDictionary[PlannedStep, PlannedStep]" = attrs.field(
        factory=weakref.WeakKeyDictionary
    )

    @cached_property
    def revising(self) -> RevisingPlanner | None:
        """The planner, if it finds faster plans."""
        return self.planner if isinstance(self.planner, RevisingPlanner) else None

    def step_for(self, step: PlannedStep, tensors: Tensors) -> PlannedStep:
        """The step, or one of the same call with a faster plan, unless that needs more than the budget."""
        step = self.newer.get(step, step)
        plan = None if self.revising is None else self.revising.revised(step.graph, step.plan)
        if plan is None:
            return step
        with self.lock, contextlib.suppress(RematError):
            self.newer[step] = self.stages.lower(step.captured, tensors, step.translation, step.graph, plan)
        return self.newer.get(step, step)
