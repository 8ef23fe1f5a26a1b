"""Plan a module in place: it stays the same object, and its class becomes a subclass of its own class.

Programs that train a model look at its class, read its signature, save it, replace its `forward`: a wrapper
is another model to them, this one is not. A second object of the model's own class, which shares all
attributes with it, serves as the original. The plan is made at the first call that needs gradients, for it.
"""

import copy
import types
import weakref
from collections.abc import Generator, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat_executor.errors import BadInput, CaptureError, NothingToDifferentiate, UnplannedUse, warn
from remat_executor.fork_lock import ForkAwareLock
from remat_executor.guards.objections import NO_GRADIENT, calls_itself, reason_for_original, reason_in_force
from remat_executor.inspection.object_contents import slots_of
from remat_executor.inspection.tensors import called_with, owned_by
from remat_executor.module.forward_binding import ForwardBinding
from remat_executor.module.forward_descriptor import NOTHING, Forward, ForwardTarget, must_be_planned
from remat_executor.module.notices import COMPILED, uncalled
from remat_executor.module.planned_module import PlannedModule
from remat_executor.module.training_watch import TrainingWatch
from remat_executor.torch_private.dynamo import compiled_module, unseen_by_dynamo
from remat_graph.contexts import context
from remat_graph.errors import text_of


class MakePlanned(Protocol):
    """Plans a module for a call: `PlannedModule._remat_bound`, or the same with options."""

    def __call__(
        self, binding: ForwardBinding, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> PlannedModule:
        """Plan `binding.original` for a call; the plan runs the forwards of `binding`."""
        ...


class InPlaceState:
    """What a module in place has in addition to its own class: the attribute `_remat` of its class.

    Attributes:
        kind: the module's own class.
        original: an object of that class that shares the module's attributes.
        binding: which forward a call refers to.
        make: plans the original for a call.
        planned: the planned module; None before the first call that needs gradients.
        released: whether the module has its own class back; functions that were read before run unplanned.
    """

    def __init__(self, model: nn.Module, make: MakePlanned) -> None:
        self.kind = type(model)
        self.original = _twin(model)
        self.binding = ForwardBinding(original=self.original)
        self.binding.forward = unseen_by_dynamo(self._forward)
        self.binding.runner = unseen_by_dynamo(self._run)
        self.make = make
        self.planned: PlannedModule | None = None
        self.released = False
        self.warned: set[str] = set()
        self.lock = ForkAwareLock("a module that is planned")
        self.watch = TrainingWatch(model, lambda parts: self.warn_once(uncalled(parts)))

    def _forward(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.binding.first, args, kwargs)

    def _run(self, module: nn.Module, target: ForwardTarget, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(target, args, kwargs)

    def run(self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward of the module: by a plan, if gradients are needed."""
        self.watch.called()
        if self.released or self.binding.inside:
            return self.binding.resolved(target)(*args, **kwargs)
        if self.planned is None:
            why = self._plan(target, args, kwargs)
            if why is not None:
                return self._run_original(target, args, kwargs, why)
        assert self.planned is not None
        return PlannedModule._remat_run(self.planned, target, *args, **kwargs)

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Plan for a call before it comes."""
        self.planned = self.make(self.binding, args, kwargs)

    def _plan(
        self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "_Unplanned | None":
        """Plan for a call of a forward; return why it runs without a plan, or None."""
        reason = reason_in_force()
        if reason is None:
            reason = reason_for_original(called_with(owned_by(self.original), args, kwargs))
        if reason is not None:
            return _Unplanned(reason)
        with self.lock:
            if self.planned is not None:  # another thread has planned it meanwhile
                return None
            try:
                with self._called(target):
                    self.plan(args, kwargs)
            except NothingToDifferentiate:
                return _Unplanned("nothing that it returns requires a gradient")
            except CaptureError as error:
                if target is self.binding.first or must_be_planned(target):
                    raise
                return _Unplanned(error.problem, assigned=True)
        return None

    @context
    def _called(self, target: ForwardTarget) -> Generator[None, None, None]:
        """A context in which this target is the module's forward, as a plan for it reads it."""
        assigned = self.binding.assigned
        try:
            self.binding.assigned = NOTHING if target is self.binding.first else target
            yield
        finally:
            self.binding.assigned = assigned

    def _run_original(
        self, target: ForwardTarget, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: "_Unplanned"
    ) -> Any:
        function = self.binding.resolved(target)
        if why.assigned:  # the forwards that it calls are planned
            result = function(*args, **kwargs)
            if self.planned is None:
                self.warn_once(
                    f"runs without a plan: what was assigned to its forward cannot be captured ({why.reason})"
                )
            return result
        if torch.is_grad_enabled() and why.reason != NO_GRADIENT:
            self.warn_once(f"runs without a plan: {why.reason}")
        with self.binding.running():
            return function(*args, **kwargs)

    def warn_once(self, message: str) -> None:
        """Warn of the module, once for each message."""
        if message not in self.warned:
            self.warned.add(message)
            warn(f"a {self.kind.__name__} with a memory limit {message}")

    def close(self) -> None:
        """Let go of the plans and the tensors."""
        self.watch.stop()
        self.released = True
        self.planned = None
        self.original = self.binding.original = nn.Module()


@attrs.frozen
class _Unplanned:
    """Why a call runs without a plan; `assigned`: only because of what was assigned to the forward."""

    reason: str
    assigned: bool = False


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that is trained, inside of `DistributedDataParallel` and `torch.compile`."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else compiled_module(model)
        if inner is None:
            return model
        model = inner


def state_of(model: nn.Module) -> InPlaceState | None:
    """The state of a module that is planned in place, or of one inside of wrappers; None of another one."""
    found = getattr(type(unwrapped(model)), "_remat", None)
    return found if isinstance(found, InPlaceState) else None


def plan_in_place(model: nn.Module, make: MakePlanned) -> InPlaceState:
    """Let a module run by plans from now on.

    Args:
        model: the module; its class is replaced by a subclass.
        make: plans the module for a call; called at the first call that needs gradients.

    Raises:
        BadInput: its class cannot be replaced.
    """
    state = InPlaceState(model, make)
    try:
        model.__class__ = _subclass(state)
    except TypeError as error:
        state.watch.stop()
        raise BadInput(
            problem=f"the class of the {state.kind.__name__} cannot be replaced ({text_of(error)})",
            advice="plan it by a wrapper: Hiremate(model, sample, budget)",
        ) from error
    # The class, which holds the state, is left to the garbage collector: the tensors go at once.
    weakref.finalize(model, state.close).atexit = False
    return state


def release(model: nn.Module) -> None:
    """Give a module that was planned in place its own class back; what was assigned to its forward stays.

    Raises:
        BadInput: it was not planned in place.
    """
    model = unwrapped(model)
    state = state_of(model)
    if state is None:
        raise BadInput(
            problem=f"the {type(model).__name__} has no memory limit", advice="call limit_memory first"
        )
    if "_remat" not in vars(type(model)):
        raise BadInput(
            problem=f"the {state.kind.__name__} with a memory limit became a {type(model).__name__} since",
            advice="undo that first, or make another model",
        )
    model.__class__ = state.kind
    state.watch.stop()
    state.released = True
    state.planned = None
    if state.binding.assigned is None:  # restored to the method of the class
        model.__dict__.pop("forward", None)
    elif state.binding.assigned is not NOTHING:
        model.__dict__["forward"] = state.binding.assigned


def _twin(model: nn.Module) -> nn.Module:
    """Another object of the model's class with the same attributes."""
    kind = type(model)
    slots = [name for base in kind.__mro__ for name in slots_of(base)]
    if slots or isinstance(model, torch.jit.ScriptModule):
        what = f"slots ({', '.join(slots)})" if slots else "TorchScript"
        raise BadInput(
            problem=f"a {kind.__name__} keeps state in {what}, which a second object cannot share",
            advice="plan it by a wrapper: Hiremate(model, sample, budget)",
        )
    twin: nn.Module = object.__new__(kind)
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def _subclass(state: InPlaceState) -> type:
    """A class for one module, derived from its own."""
    kind = state.kind
    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # The class is called to make another model, for a slice of a `Sequential` say.
        "__new__": staticmethod(lambda _, *args, **kwargs: kind(*args, **kwargs)),
        "_remat": state,
        "forward": Forward(lambda module, /, *args, **kwargs: module.forward(*args, **kwargs)),
        "_compiled_call_impl": property(lambda _: None),
        "compile": lambda _, *args, **kwargs: state.warn_once(f"is not compiled: {COMPILED}"),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": lambda _, protocol: _reduced(state, protocol),
        "_replicate_for_data_parallel": _no_replicas,
    }
    if calls_itself(state.original):
        # The forward calls the original's `__call__`.
        body["__call__"] = lambda self, *args, **kwargs: self.forward(*args, **kwargs)
    return types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body))


def _reduced(state: InPlaceState, protocol: int) -> Any:
    """For a file or another process: an object of the module's own class."""
    state.warn_once("is pickled or copied without its limit; call limit_memory on what is loaded, too")
    return state.original.__reduce_ex__(min(protocol, 1))  # later ones insist on the class that it has


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy that is planned in place as well, and shares the plans."""
    state = state_of(model)
    assert state is not None
    copied: nn.Module = object.__new__(state.kind)
    memo[id(model)] = copied  # its contents may refer to it
    object.__setattr__(copied, "__dict__", copy.deepcopy(state.original, memo).__dict__)
    new = plan_in_place(copied, state.make)
    if state.binding.assigned is not NOTHING:
        new.binding.assigned = copy.deepcopy(state.binding.assigned, memo)
    if state.planned is not None:
        new.planned = state.planned._remat_copy(new.original, new.binding, memo)
    return copied


def _no_replicas(_: nn.Module) -> Any:
    raise UnplannedUse(
        problem="a module with a memory limit cannot be copied to several devices by DataParallel",
        advice="use DistributedDataParallel, a process for each device",
    )
