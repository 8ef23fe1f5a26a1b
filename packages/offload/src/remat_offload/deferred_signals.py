"""Defer signals while a parameter is updated, so that its weight and its states stay consistent.

A Python signal handler, such as that of Ctrl-C, runs between any two instructions of the main thread, and its
exception would leave an update incomplete. `uninterrupted` replaces the handlers by one that records signals,
which are handled as soon as the update is complete. Other threads run no handlers.
"""

import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FrameType
from typing import Any

import attrs

from remat_graph.contexts import context

_SIGNALS = tuple(map(int, sorted(signal.valid_signals())))

# What `signal` wraps, where there is such a module: its enumerations take ten times as long as all else here.
_plain: Any = sys.modules.get("_signal", signal)


@attrs.define
class _DeferringHandler:
    """A handler that records signals, and after the context passes them to the original handlers."""

    handlers: Mapping[int, Callable[[int, FrameType | None], Any]]
    over: bool = False
    received: list[int] = attrs.field(factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            self.handlers[number](number, frame)
        else:
            self.received.append(number)


@context
def uninterrupted() -> Generator[None, None, None]:
    """Defer signals: their handlers run in this thread when the context ends."""
    handlers = _handlers()
    if not handlers:  # no handler runs here, or all are deferred already
        yield
        return
    deferring = _DeferringHandler(handlers)
    try:
        for number in handlers:
            _plain.signal(number, deferring)
        yield
    finally:
        deferring.over = True  # first: a handler may raise between any two of these instructions
        try:
            for number, handler in handlers.items():
                _plain.signal(number, handler)
        finally:
            _handle(deferring.received)


def _handlers() -> dict[int, Any]:
    """Return Python's handlers that may run in this thread; none if they are deferred already."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = _plain.getsignal(number)
            if isinstance(handler, _DeferringHandler) and not handler.over:
                return {}
            if callable(handler):
                handlers[number] = handler
    return handlers


def _handle(numbers: Sequence[int]) -> None:
    """Handle each signal, even if the handler of an earlier one raises."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _handle(numbers[1:])
