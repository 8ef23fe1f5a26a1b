"""Random generators: drawing the same numbers again, and leaving the user's generators as they were.

A random op that will run again has its generator's state read before its first run; the repeat puts that
state back, runs, and restores what it found, so that the generator ends as it would have without the repeat.
The same code serves CPU (Mersenne twister, 5,056 bytes of state) and CUDA (philox seed and offset, 16 bytes,
on the host).
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor

from remat_graph.contexts import context


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that ops on a device draw from when none is given."""
    if device.type == "cpu":
        return torch.default_generator
    generators = torch.get_device_module(device).default_generators
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    generator: torch.Generator = generators[index]
    return generator


def read_state(device: str) -> Tensor:
    """The state that `replay` takes; called from lowered graphs, hence the device as text."""
    # A copy goes through the dispatcher, so that a memory meter sees the bytes that stay.
    return default_generator(torch.device(device)).get_state().clone()


def replay(state: Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a random op from a given state; the generator ends as it was found."""
    generator = default_generator(torch.device(device))
    found = generator.get_state()
    generator.set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        generator.set_state(found)


@context
def preserved_generators(devices: Iterable[torch.device]) -> Generator[None, None, None]:
    """Put the generators of these devices, and the CPU's, back at the end."""
    wanted = {torch.device("cpu"), *(d for d in devices if d.type != "meta")}
    generators = [default_generator(device) for device in wanted]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
