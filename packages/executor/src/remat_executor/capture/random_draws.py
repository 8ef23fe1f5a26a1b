"""Find out whether a forward draws from Python's or numpy's generator, which a captured graph cannot repeat.

These two belong to the whole process, so other threads may draw from them meanwhile: one that sends logs and
waits for a random time before the next try, say.
"""

import random
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from remat_executor.errors import CaptureError
from remat_executor.generator_state import preserved_generators
from remat_executor.inspection.tensors import Tensors
from remat_graph.contexts import context

_T = TypeVar("_T")
_TRIES = 3
"""Runs after which draws are taken for the forward's own."""


def with_torch_randomness_only(run: Callable[[], _T], tensors: Tensors) -> _T:
    """Run a forward, restore torch's generators, and refuse draws from Python's or numpy's.

    A forward that draws does so at each run; therefore a run with draws is repeated, and what other threads
    drew stays drawn. Which thread draws from Python's generator is seen from the second run on.

    Raises:
        CaptureError: the forward draws; the generators are restored.
        Exception: what the run raises.
    """
    before = _other_states()
    for attempt in range(_TRIES):
        start, own = _other_states(), list[bool]()
        try:
            with (
                preserved_generators(t.device for t in tensors.flat),
                _python_draws(own) if attempt else nullcontext(),
            ):
                result = run()
        except BaseException:
            _restore(start)
            raise
        now = _other_states()
        drew_python, drew_numpy = _changed(start, now)
        if not drew_numpy and (not drew_python or (attempt and not own)):
            return result
    _restore(before)
    raise CaptureError(
        problem=f"the forward draws from {'Python' if drew_python else 'numpy'}'s random module, which a "
        "captured graph cannot repeat",
        advice="draw with torch instead, or wrap the submodules around the draw; if another thread draws, "
        "let it wait until the first step is done",
    )


@context
def _python_draws(found: list[bool]) -> Generator[None, None, None]:
    """A context that adds to `found` at each draw of this thread from Python's generator.

    A profile function sees all calls of the generator's own methods, however they were imported. Backwards
    that a run computes run in this thread as well.
    """
    generator = random.random.__self__  # type: ignore[attr-defined]
    before = sys.getprofile()

    def see(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__self__", None) is generator:
            found.append(True)

    with torch.autograd.set_multithreading_enabled(False):
        try:
            sys.setprofile(see)
            yield
        finally:
            sys.setprofile(before)


def _other_states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _changed(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[bool, bool]:
    return one[0] != other[0], not all(map(np.array_equal, one[1], other[1]))


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
