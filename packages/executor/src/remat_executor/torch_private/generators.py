"""Private names of random generators: detect seeding, and compare generators."""

import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch

from remat_graph.contexts import context


class _GuardedGenerator:
    """Replaces a generator where torch's functions look it up; calls `on_set` before it is set."""

    def __init__(self, generator: torch.Generator, on_set: Callable[[str], None]) -> None:
        self._generator, self._on_set, self._thread = generator, on_set, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        sets = ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state")
        guarded = name in sets and threading.get_ident() == self._thread  # other threads are unaffected
        if guarded and not _caller().startswith(("torch._dynamo", "torch._functorch", "torch._inductor")):
            self._on_set(name)
        return getattr(self._generator, name)


def _caller() -> str:
    """Name of the module that called torch's generator functions; a compiler saves states by itself."""
    frame: Any = sys._getframe(2)
    between = (
        "torch.random",
        "torch.cuda.random",
        "contextlib",
        "torch._compile",
        "torch._dynamo.eval_frame",
    )
    while frame.f_back is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


@context
def guarded_generators(on_set: Callable[[str], None]) -> Generator[None, None, None]:
    """Call `on_set` before a function of torch seeds a default generator or sets its state."""
    device = torch.accelerator.current_accelerator()
    owners: list[Any] = [torch, torch.random]
    before: dict[Any, Any] = {owner: owner.default_generator for owner in owners}
    guarded: Any = _GuardedGenerator(torch.default_generator, on_set)
    of_device: Any = torch.get_device_module(device) if device is not None else None
    several = getattr(of_device, "default_generators", ())
    try:
        for owner in owners:
            owner.default_generator = guarded
        if several:
            of_device.default_generators = tuple(_GuardedGenerator(g, on_set) for g in several)
        yield
    finally:
        for owner in owners:
            owner.default_generator = before[owner]
        if several:
            of_device.default_generators = several


def is_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two Python objects are one generator: operators get another object."""
    return bool(one._cdata == other._cdata)  # type: ignore[attr-defined]
