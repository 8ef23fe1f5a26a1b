"""Who touches the process' random generators in a lane's thread, where the model draws beside it.

Calls on a generator of torch's or Python's are seen by a profiling function, which counts for one thread;
draws inside of torch's operators by their tag; numpy's by the state of its generator, which tests do not
draw from while lanes run.
"""

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import current_thread
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat_executor.torch_private.generators import is_generator
from remat_offload.copy_lanes import threaded

_GLOBAL = {
    id(torch.default_generator): "torch's generator",
    id(random._inst): "Python's random",
}


class _Draws(TorchDispatchMode):
    """Notes operators that draw from no generator of their own, be it that torch's is given to them."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = kwargs.get("generator")  # another object of Python's, for the same generator of torch's
        shared = given is None or is_generator(given, torch.default_generator)
        if torch.Tag.nondeterministic_seeded in func.tags and shared:
            self._note(f"{func} draws")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _watched(note: Callable[[str], None]) -> Iterator[None]:
    def profile(frame: Any, event: str, function: Any) -> None:
        owner = _GLOBAL.get(id(getattr(function, "__self__", None))) if event == "c_call" else None
        if owner is not None:
            note(f"{function.__name__} of {owner}")

    before, numbers = sys.getprofile(), np.random.get_state()[1:3]
    sys.setprofile(profile)
    try:
        with _Draws(note):
            yield
    finally:
        sys.setprofile(before)
        if any(np.any(a != b) for a, b in zip(numbers, np.random.get_state()[1:3], strict=True)):
            note("a draw from numpy.random")


@contextlib.contextmanager
def lanes_watched() -> Iterator[list[str]]:
    """What lanes do to the process' generators meanwhile, one line each: nothing, as it should be."""
    found: list[str] = []
    run = threaded.Job.run

    def watched(job: threaded.Job, *args: Any, **kwargs: Any) -> None:
        def note(what: str) -> None:
            found.append(f"{what} in {job.name!r} on the lane {job.lane}")

        # Taken when it is called, and not kept: what it holds of the host's memory goes before the job ends.
        functions = [job._function]

        def call(after: Sequence[threaded.Job]) -> Any:
            with _watched(note):
                return functions.pop()(after)

        if job._function is not None and current_thread().name.startswith(
            "remat "
        ):  # not at once, by the user's
            job._function = call
        else:
            functions.clear()
        run(job, *args, **kwargs)

    threaded.Job.run = watched
    try:
        yield found
    finally:
        threaded.Job.run = run
