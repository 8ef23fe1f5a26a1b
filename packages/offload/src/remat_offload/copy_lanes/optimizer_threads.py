"""The threads that kernels use for updates on the CPU.

While the CPU updates parameters, another thread issues work to the device. If kernels use every core, that
thread waits for one at each operator, and so do the kernels, whose threads wait for each other. On an H200
with 16 cores both took two to eight times as long as alone. Updates are bound by the host's memory, which a
part of the cores can use up.
"""

from collections.abc import Generator

import torch

from remat_graph.contexts import context

_LEAST_SPARED = 2  # one thread issues, another one of the driver waits
_SPARED = 4  # one core in n


def optimizer_threads(device: torch.device) -> int:
    """The number of threads for updates on the CPU; where the CPU is the device, kernels use all of them."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        return threads
    return max(1, threads - max(_LEAST_SPARED, threads // _SPARED))


@context
def kept_threads() -> Generator[None, None, None]:
    """A context after which threads use as many as before, whatever other threads have set for themselves.

    In torch the number that one thread sets is that of each thread which runs its first kernel later.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@context
def kernel_threads(n: int) -> Generator[None, None, None]:
    """A context in which kernels that the calling thread runs use n threads."""
    if n == torch.get_num_threads():
        yield
        return
    with kept_threads():
        torch.set_num_threads(n)
        yield
