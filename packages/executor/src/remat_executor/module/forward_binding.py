"""Which forward a call of a planned module means: the original's own, or what was assigned since."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import attrs
from torch import nn

from remat_executor.errors import CaptureError
from remat_executor.guards.signature import calls_itself
from remat_executor.module.forward_descriptor import NOTHING, BoundForward, ForwardTarget, Nothing
from remat_graph.contexts import context


class _Depth(threading.local):
    """How many of something are under way in a thread."""

    count = 0


@context
def _one_deeper(depth: _Depth) -> Generator[None, None, None]:
    depth.count += 1
    try:
        yield
    finally:
        depth.count -= 1


@attrs.define(kw_only=True, eq=False)
class ForwardBinding:
    """The forwards of one planned module, and which are under way.

    Attributes:
        original: the module that is planned.
        first: what the original's forward was when the module was planned.
        assigned: what has been assigned to the planned module's forward since.
        active: forwards of the original that are under way: what was a forward before runs as it is in them.
        forward: the planned module's, as Dynamo leaves it alone, and
        runner: the same for any of its forwards; made late, since Dynamo takes seconds to import.
    """

    CAPTURES: ClassVar[_Depth] = _Depth()  # of all modules: one may be called inside of another's

    original: nn.Module
    first: ForwardTarget = None
    assigned: ForwardTarget | Nothing = NOTHING
    forward: Any = None
    runner: Any = None
    active: _Depth = attrs.field(factory=_Depth, init=False)

    def __attrs_post_init__(self) -> None:
        self.first = self.target()

    def copied(self, original: nn.Module) -> "ForwardBinding":
        """For a copy of the module; nothing is assigned to it."""
        return attrs.evolve(self, original=original, assigned=NOTHING)

    def target(self) -> ForwardTarget:
        """What the planned module's forward stands for now; None: the method of the original's class."""
        if not isinstance(self.assigned, Nothing):
            return self.assigned
        if calls_itself(self.original):
            return None
        own: ForwardTarget = self.original.__dict__.get("forward")
        mine = isinstance(own, BoundForward) and own.__self__._remat.binding is self
        return own.target if mine else own  # type: ignore[union-attr]

    def resolved(self, target: ForwardTarget) -> Callable[..., Any]:
        """The function itself."""
        if target is None and calls_itself(self.original):
            return functools.partial(type(self.original).__call__, self.original)
        return self.shown(target)

    def shown(self, target: ForwardTarget) -> Callable[..., Any]:
        """The forward whose signature and attributes it has."""
        if target is not None:
            return target
        if "forward" not in self.original.__dict__:
            return self.original.forward
        method: Callable[..., Any] = type(self.original).forward.__get__(self.original)
        return method

    def assign(self, forward: ForwardTarget) -> None:
        """Let something else be what the planned module's forward stands for; None: its class's."""
        if self.active.count and self.CAPTURES.count:
            raise CaptureError(
                problem="the forward puts another forward in its place, which a captured graph would not do",
                advice="do it outside of the forward",
            )
        self.assigned = NOTHING if forward is self.original.__dict__.get("forward") else forward

    def unassign(self) -> None:
        """Let the planned module's forward be its class's, as it is where an instance's is deleted.

        Raises:
            AttributeError: it is.
        """
        own = "forward" in self.original.__dict__
        if self.assigned is NOTHING and not own:
            raise AttributeError("forward")
        self.assigned = None if own else NOTHING

    def is_first(self, method: Any) -> bool:
        """Whether a method is what `forward.__func__` gave before anything was assigned."""
        planned = method.__self__.__dict__ is self.original.__dict__
        return planned and method.__func__ in (self.forward, getattr(self.forward, "__wrapped__", None))

    @property
    def inside(self) -> bool:
        """Whether a forward of the original's, or any capture, is under way in this thread."""
        return bool(self.active.count or self.CAPTURES.count)

    def traced(self, target: ForwardTarget) -> Callable[..., Any]:
        """A function for capture to trace."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with _one_deeper(self.CAPTURES), _one_deeper(self.active):
                return self.resolved(target)(*args, **kwargs)

        return call

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Within it a forward of the original's is under way."""
        return _one_deeper(self.active)
