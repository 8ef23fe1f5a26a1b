"""Signals are put off while a parameter is updated, so that its weight and its states stay together.

A handler of Python's, such as the one of Ctrl-C, runs between any two instructions of the main thread, and
what it raises would leave an update half done. Here handlers are replaced by one that takes note; what came
is handled as soon as the update is whole. Other threads run no handlers.
"""

import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FrameType
from typing import Any

import attrs

from remat_graph.contexts import context

_SIGNALS = tuple(sorted(signal.valid_signals()))


@attrs.define
class _Noted:
    """A handler that remembers what came, and once that is over hands on what comes."""

    handlers: Mapping[int, Callable[[int, FrameType | None], Any]]
    over: bool = False
    came: list[int] = attrs.field(factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            self.handlers[number](number, frame)
        else:
            self.came.append(number)


@context
def uninterrupted() -> Generator[None, None, None]:
    """Within it no handler of a signal runs in this thread; those of what came run at its end."""
    handlers = _handlers()
    if not handlers:  # nothing is to come, or it is put off already
        yield
        return
    noted = _Noted(handlers)
    try:
        for number in handlers:
            signal.signal(number, noted)
        yield
    finally:
        noted.over = True  # before it goes: what comes now may raise between any two of these
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        finally:
            _handle(noted.came)


def _handlers() -> dict[int, Any]:
    """Python's handlers that may run in this thread; none where all are put off."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(handler, _Noted) and not handler.over:
                return {}
            if callable(handler):
                handlers[number] = handler
    return handlers


def _handle(numbers: Sequence[int]) -> None:
    """Let each signal be handled, also where the handler of one before it raises."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _handle(numbers[1:])
