"""Which forward a call of a planned module refers to: the original's own, or one that was assigned later."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar

import attrs
from torch import nn

from remat_executor.errors import CaptureError
from remat_executor.guards.objections import calls_itself
from remat_executor.module.forward_descriptor import NOTHING, BoundForward, ForwardTarget, Nothing
from remat_graph.contexts import context


def takes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has the arguments that a function takes."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class _Depth(threading.local):
    """How many nested calls are running in a thread."""

    count = 0


@context
def _one_deeper(depth: _Depth) -> Generator[None, None, None]:
    before = depth.count
    try:
        depth.count = before + 1
        yield
    finally:
        depth.count = before


@attrs.define(kw_only=True, eq=False)
class ForwardBinding:
    """The forwards of one planned module, and how many of them are running.

    Attributes:
        original: the module that is planned.
        first: the original's forward when the module was planned.
        assigned: what has been assigned to the planned module's forward since.
        forward: the planned module's forward, hidden from Dynamo.
        runner: the same for any of its forwards; set late, since Dynamo takes seconds to import.
        active: running forwards of the original; an earlier forward that they call runs unplanned.
    """

    CAPTURES: ClassVar[_Depth] = _Depth()  # of all modules: one may call another

    original: nn.Module
    first: ForwardTarget = attrs.field(init=False)
    assigned: ForwardTarget | Nothing = NOTHING
    forward: Any = None
    runner: Any = None
    active: _Depth = attrs.field(factory=_Depth, init=False)

    def __attrs_post_init__(self) -> None:
        self.first = self.target()

    def copied(self, original: nn.Module) -> "ForwardBinding":
        """The binding of a copied module, to which nothing is assigned."""
        return attrs.evolve(self, original=original, assigned=NOTHING)

    def target(self) -> ForwardTarget:
        """What the planned module's forward runs now; None: the method of the original's class."""
        if not isinstance(self.assigned, Nothing):
            return self.assigned
        if calls_itself(self.original):
            return None
        own: ForwardTarget = self.original.__dict__.get("forward")
        mine = isinstance(own, BoundForward) and own.__self__._remat.binding is self
        return own.target if mine else own  # type: ignore[union-attr]

    def resolved(self, target: ForwardTarget) -> Callable[..., Any]:
        """The function that a target runs."""
        if target is None and calls_itself(self.original):
            return functools.partial(type(self.original).__call__, self.original)
        return self.shown(target)

    def shown(self, target: ForwardTarget) -> Callable[..., Any]:
        """The function whose signature and attributes a target shows."""
        if target is not None:
            return target
        if "forward" not in self.original.__dict__:
            return self.original.forward
        method: Callable[..., Any] = type(self.original).forward.__get__(self.original)
        return method

    def assign(self, forward: ForwardTarget) -> None:
        """Set what the planned module's forward runs; None: the method of its class.

        Raises:
            CaptureError: this is called while the forward is captured.
        """
        if self.active.count and self.CAPTURES.count:
            raise CaptureError(
                problem="the forward replaces itself, which a captured graph would not do",
                advice="assign it outside of the forward",
            )
        self.assigned = NOTHING if forward is self.original.__dict__.get("forward") else forward

    def unassign(self) -> None:
        """Restore the forward of the class, as deleting an instance attribute does.

        Raises:
            AttributeError: nothing was assigned.
        """
        own = "forward" in self.original.__dict__
        if self.assigned is NOTHING and not own:
            raise AttributeError("forward")
        self.assigned = None if own else NOTHING

    def is_first(self, method: Any) -> bool:
        """Whether a method is the `forward` from before anything was assigned."""
        planned = method.__self__.__dict__ is self.original.__dict__
        return planned and method.__func__ in (self.forward, getattr(self.forward, "__wrapped__", None))

    @property
    def inside(self) -> bool:
        """Whether a forward of the original, or any capture, is running in this thread."""
        return bool(self.active.count or self.CAPTURES.count)

    def traced(self, target: ForwardTarget) -> Callable[..., Any]:
        """A function for capture to trace."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with _one_deeper(self.CAPTURES), _one_deeper(self.active):
                return self.resolved(target)(*args, **kwargs)

        return call

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A context in which a forward of the original runs."""
        return _one_deeper(self.active)
