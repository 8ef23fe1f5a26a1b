"""Random generators: repeat a draw with the same numbers, and leave the user's generators unchanged.

The generator state of a random op that will be recomputed is read before its first run. The repeat sets that
state, runs, and restores the state that it found, so the generator ends as without the repeat. The same code
serves CPU (Mersenne twister, 5,056 bytes of state) and CUDA (philox seed and offset, 16 bytes, on the host).
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor

from remat_graph.contexts import context


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that ops on a device draw from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if not module.default_generators:  # nothing has used the device yet
        module.init()
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    generator: torch.Generator = module.default_generators[index]
    return generator


def read_state(device: str) -> Tensor:
    """The state that `replay` takes; lowered graphs call this, hence the device as a string."""
    # A copy goes through the dispatcher, so a memory meter counts its bytes.
    return default_generator(torch.device(device)).get_state().clone()


def replay(state: Tensor, device: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a random op from a given state; the generator's own state is restored."""
    generator = default_generator(torch.device(device))
    found = generator.get_state()
    try:
        generator.set_state(state)
        return target(*args, **kwargs)
    finally:
        generator.set_state(found)


@context
def preserved_generators(devices: Iterable[torch.device]) -> Generator[None, None, None]:
    """Restore the generators of these devices and of the CPU at the end."""
    wanted = {torch.device("cpu"), *(d for d in devices if d.type != "meta")}
    generators = [default_generator(device) for device in wanted]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
