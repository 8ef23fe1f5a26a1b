"""A machine with a CUDA device: one stream a direction, events between streams, no wait for the whole device.

A copy is *issued*: its stream is told to wait for events, and an event is recorded after it. That is done at
once if nothing is before it that only the host can wait for; else the lane's thread waits on the host for
that CPU work, and issues it then. A ticket is waited for in two parts: until it is issued, then its event.

**Memory.** PyTorch's allocator lends a freed block again at once, in the order of the stream that it was
allocated on, not of the copies. So before it drops either tensor of a copy the caller calls
``wait_on_compute(ticket)`` on the stream that it computes on; what is computed next in that memory then
follows the copy. Where nobody will, a call having failed, say, ``release_after_copies`` has the allocator ask
the streams. Host memory should be pinned (``HostPool`` does that): from other memory copies are slow and hold
their lane.

It was written without a device at hand: it is tested with a stand-in for ``torch.cuda``, and by tests marked
``cuda``.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from remat_graph import Lane
from remat_offload.host_memory.pool import Event
from remat_offload.machine.base import Ticket
from remat_offload.machine.threaded import Job, LanedMachine, own


class CudaMachine(LanedMachine):
    """A CUDA device and its host.

    Args:
        device: the device; without an index it is the current one.
        cuda: what stands for ``torch.cuda``.

    Attributes:
        device: the device, with its index.
    """

    copies_at_once: ClassVar[bool] = True

    def __init__(self, device: torch.device | str = "cuda", *, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams = {lane: cuda.Stream(device=device) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)}
        super().__init__(self._streams[Lane.TO_HOST].device)

    def release(self, tensor: torch.Tensor) -> None:
        """Do nothing: memory goes with its last reference, once every copy of it is held (see the module)."""

    def release_after_copies(self, tensor: torch.Tensor) -> None:
        """Let PyTorch's allocator ask both streams before it lends the memory again."""
        for stream in self._streams.values():
            tensor.record_stream(stream)

    def _copying(
        self, lane: Lane, destination: torch.Tensor, source: torch.Tensor
    ) -> Callable[[Sequence[Job]], Event]:
        """A copy on the lane's stream, after what the caller's current stream, which computes, was given."""
        cuda, stream = self._cuda, self._streams[lane]
        computed = cuda.current_stream(self.device).record_event()

        def issue(jobs: Sequence[Job]) -> Event:
            with cuda.device(stream.device), cuda.stream(stream), torch.inference_mode():
                stream.wait_event(computed)
                for job in jobs:
                    if job.event is not None:  # CPU work has none: it was done before this began
                        stream.wait_event(job.event)
                # By `data`, autograd takes no notice: what a plan brings back is what it took away.
                destination.data.copy_(source.data, non_blocking=True)
                copied: Event = stream.record_event()
            return copied

        return issue

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Let the caller's current stream wait for a copy once it is issued; wait here for CPU work."""
        event = own(ticket).issued()
        if event is not None:
            self._cuda.current_stream(self.device).wait_event(event)

    def _finish_copies(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
