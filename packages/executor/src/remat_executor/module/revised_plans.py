"""Replace plans of steps by faster ones, when the planner finds that a search for them pays off.

A planner may carry a plan over from another size of the step, which is quick and may be slower than a plan
that it searches for. It is asked before each step.
"""

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import attrs
import torch

from remat_executor.inspection.tensors import Tensors
from remat_executor.module.pipeline import PipelineStages, PlanFunction
from remat_executor.module.planned_step import PlannedStep
from remat_graph import Grads, Graph, Plan, RematError


@runtime_checkable
class RevisingPlanner(Protocol):
    """A planner whose plans may be replaced by faster ones."""

    def revised(self, graph: Graph, plan: Plan) -> Plan | None:
        """A faster plan, if a search for one pays off by now; asked before each step by `plan`."""


@attrs.define(kw_only=True, eq=False)
class RevisedPlans:
    """The steps with faster plans; of eager steps only, since others hold recorded or compiled code.

    Attributes:
        planner_for: the planner of a state of ``.grad``, which may be a `RevisingPlanner`.
        stages: lowers plans.
        lock: held while one is made.
        newer: per step the one that replaced it.
    """

    planner_for: Callable[[Grads], PlanFunction]
    stages: PipelineStages
    lock: AbstractContextManager[object]
    newer: "weakref.WeakKeyDictionary[PlannedStep, PlannedStep]" = attrs.field(
        factory=weakref.WeakKeyDictionary
    )

    def step_for(self, step: PlannedStep, tensors: Tensors) -> PlannedStep:
        """The step, or one of the same call with a faster plan, if that runs within the budget."""
        step = self.newer.get(step, step)
        planner = self.planner_for(step.plan.grads)
        if self.stages.runtime != "eager" or not isinstance(planner, RevisingPlanner):
            return step
        plan = planner.revised(step.graph, step.plan)
        if plan is None:
            return step
        stages = attrs.evolve(self.stages, replanner=planner)
        with self.lock, contextlib.suppress(RematError, torch.OutOfMemoryError):
            faster = stages.lower(step.captured, tensors, step.translation, step.graph, plan)
            if faster.plan.time_s < step.plan.time_s:
                self.newer[step] = faster
        return self.newer.get(step, step)
