"""Choose between two plans of a step by what a call finds: a `.grad` for every parameter, or not.

A plan for the first step of a training (`Grads.NEW`) holds every gradient to the end. Where each parameter
has a `.grad` already (accumulation, ``zero_grad(set_to_none=False)``, the bucket views of DDP), a gradient is
added to it and freed, so a plan for that (`Grads.PRESENT`) may use the budget that new gradients would need.
What a call finds is what counts: if `.grad` is set to None between the forward and the backward, the memory
of the old gradients is free before the new ones are made.

"auto" makes the second plan once the calls that find gradients have lost as much time to recomputation, by
the first plan, as planning took: it costs at most twice what the better decision would have cost.
"""

import functools
import weakref
from contextlib import AbstractContextManager
from typing import Literal, Protocol, get_args, runtime_checkable

import attrs

from remat_executor.errors import BadInput, add_note, check_choice
from remat_executor.inspection.tensors import Tensors
from remat_executor.module.pipeline import PipelineStages, PlanFunction
from remat_executor.module.planned_step import PlannedStep
from remat_executor.module.revised_plans import RevisedPlans
from remat_graph import Grads, Graph, Plan, RematError, simulate
from remat_graph.errors import shown

GradientsState = Literal["auto", "new", "present"]
"""What calls find: either, by what they show; always none; a `.grad` for every parameter as a rule."""

LEAST_OVERHEAD = 0.01
"""A plan that costs less than this is left alone."""


@runtime_checkable
class StatePlanner(Protocol):
    """A planner for either state of `.grad`."""

    def for_grads(self, grads: Grads) -> PlanFunction:
        """The same planner for a state."""

    def planning_s(self, plan: Plan) -> float:
        """The seconds that planning took."""

    def __call__(self, graph: Graph) -> Plan:
        """Plan the graph; raises if the budget cannot be met."""


@attrs.define(kw_only=True, eq=False)
class GradientStates:
    """The second plans of steps, and when they are made.

    Attributes:
        state: what calls find.
        planner: plans for either state.
        stages: lowers plans.
        lock: held while one is made.
        others: per step its plan for the other state; None if that is no faster, or none was found.
        lost_s: per step the seconds of recomputation by a plan that does not use what was found.
        revisions: the steps with faster plans for the same state.
    """

    state: GradientsState
    planner: PlanFunction
    stages: PipelineStages
    lock: AbstractContextManager[object]
    others: "weakref.WeakKeyDictionary[PlannedStep, PlannedStep | None]" = attrs.field(
        factory=weakref.WeakKeyDictionary
    )
    lost_s: "weakref.WeakKeyDictionary[PlannedStep, float]" = attrs.field(factory=weakref.WeakKeyDictionary)
    revisions: RevisedPlans = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        chosen = functools.cache(functools.partial(planner_for, self.planner))
        self.revisions = RevisedPlans(planner_for=chosen, stages=self.stages, lock=self.lock)

    def step_for(self, step: PlannedStep, tensors: Tensors) -> PlannedStep:
        """The step or its other plan, whichever is for what the call finds, or a faster one of that."""
        return self.revisions.step_for(self._for_state(step, tensors), tensors)

    def _for_state(self, step: PlannedStep, tensors: Tensors) -> PlannedStep:
        """The step or its other plan, whichever is for what the call finds; planned if it is new."""
        if self.state == "new" or (self.state == "auto" and step.plan.overhead < LEAST_OVERHEAD):
            return step
        found = Grads.PRESENT if finds_gradients(step, tensors) else Grads.NEW
        if step.plan.grads is found:
            return step
        if step not in self.others and (self.state == "present" or self.pays_off(step)):
            with self.lock:
                if step not in self.others:
                    self.others[step] = self.made(step, tensors, found)
        return self.others.get(step) or step

    def pays_off(self, step: PlannedStep) -> bool:
        """Whether recomputation in such calls has taken as long as another plan would take."""
        plan = step.plan
        if not isinstance(self.planner, StatePlanner):
            return False
        lost_s = self.lost_s[step] = self.lost_s.get(step, 0.0) + plan.overhead * plan.noremat_time_s
        return lost_s >= self.planner.planning_s(plan)

    def made(self, step: PlannedStep, tensors: Tensors, found: Grads) -> PlannedStep | None:
        """The step with a plan for the other state; None to go on with the plan that there is.

        Raises:
            RematError: there is no plan for a call that finds no gradients.
        """
        plan, graph = step.plan, step.graph
        if found is Grads.NEW and simulate(graph, plan.schedule).peak_nbytes <= plan.budget_nbytes:
            return None  # it serves both
        try:
            planner = planner_for(self.planner, found)
            stages = attrs.evolve(self.stages, replanner=planner)
            other = stages.lower(step.captured, tensors, step.translation, graph, planner(graph))
        except RematError as error:
            if found is Grads.PRESENT:
                return None
            add_note(error, _NO_GRADIENTS)
            raise
        return other if found is Grads.NEW or other.plan.time_s < plan.time_s else None


_NO_GRADIENTS = (
    'gradients="present" expects a .grad for every parameter, and this call finds none for some: give each '
    "one, as in p.grad = torch.zeros_like(p), or raise the budget"
)


def finds_gradients(step: PlannedStep, tensors: Tensors) -> bool:
    """Whether the step differentiates parameters, and every one of them has a `.grad`."""
    count = len(tensors.parameters)
    owners = [tensors.flat[place] for place in step.owners if place < count]
    return bool(owners) and all(owner.is_leaf and owner.grad is not None for owner in owners)


def planner_for(planner: PlanFunction, grads: Grads) -> PlanFunction:
    """The planner for a state of `.grad`.

    Raises:
        BadInput: it plans for calls without gradients only.
    """
    if grads is Grads.NEW and not isinstance(planner, StatePlanner):
        return planner
    if not isinstance(planner, StatePlanner):
        raise BadInput(
            problem=f"the planner {shown(planner)} cannot plan for gradients that are present",
            advice="give it the methods of StatePlanner",
        )
    return planner.for_grads(grads)


def checked_state(state: GradientsState, *, other_plans: bool) -> GradientsState:
    """What calls find, if a step can have several plans.

    Args:
        state: as given.
        other_plans: whether the step runs eagerly and nothing is moved.

    Raises:
        BadInput: the state is unknown, or needs other plans.
    """
    check_choice("gradients", state, get_args(GradientsState), "auto")
    if state == "present" and not other_plans:
        raise BadInput(
            problem='gradients="present" needs plans that run eagerly and do nothing but compute',
            advice='leave out runtime=, or give gradients="new"',
        )
    return state if other_plans else "new"
