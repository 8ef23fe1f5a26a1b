"""`CudaMachine`: one stream a direction, events between streams, no synchronization of the whole device.

To *issue* a copy, its stream waits for events, and an event is recorded after the copy. A copy is
issued at once if all work before it is issued or done; otherwise the lane's thread waits on the host for CPU
work, and issues the copy then. To wait for a ticket is to wait until its copy is issued, then for its event.

**Memory.** PyTorch's allocator reuses a freed block at once, in the order of the stream that allocated it; it
does not know the copies. So the caller calls ``wait_on_compute(ticket)`` on its compute stream before it
drops either tensor of a copy; later compute in that memory then follows the copy. Where this is impossible,
after a failed call for example, ``release_after_copies`` lets the allocator ask the copy streams. Host memory
should be pinned (``HostPool`` does that): copies from other memory are slow and block their lane.

It is tested with a fake of ``torch.cuda``, and by tests marked ``cuda``.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from remat_executor.inspection.devices import check_device
from remat_graph import Lane
from remat_offload.copy_lanes.machine import Ticket
from remat_offload.copy_lanes.threaded import Job, LanedMachine, as_job
from remat_offload.host_memory.pool import Event


class CudaMachine(LanedMachine):
    """A CUDA device and its host.

    Args:
        device: the device; without an index it is the current one.
        cuda: ``torch.cuda``, or a fake of it.

    Attributes:
        device: the device, with its index.

    Raises:
        BadInput: this machine does not have the device.
    """

    copies_at_once: ClassVar[bool] = True

    def __init__(self, device: torch.device | str = "cuda", *, cuda: Any = torch.cuda) -> None:
        check_device(torch.device(device))
        self._cuda = cuda
        self._streams = {lane: cuda.Stream(device=device) for lane in (Lane.TO_HOST, Lane.TO_DEVICE)}
        super().__init__(self._streams[Lane.TO_HOST].device)

    def release(self, tensor: torch.Tensor) -> None:
        """Do nothing: the last reference frees the memory, after its copies (see the module)."""

    def release_after_copies(self, tensor: torch.Tensor) -> None:
        """Let PyTorch's allocator ask both copy streams before it reuses the memory."""
        for stream in self._streams.values():
            tensor.record_stream(stream)

    def _copying(
        self, lane: Lane, destination: torch.Tensor, source: torch.Tensor
    ) -> Callable[[Sequence[Job]], Event]:
        """Return a function that issues a copy after the compute on the caller's current stream so far."""
        cuda, stream = self._cuda, self._streams[lane]
        computed = cuda.current_stream(self.device).record_event()

        def issue(jobs: Sequence[Job]) -> Event:
            with cuda.device(stream.device), cuda.stream(stream), torch.inference_mode():
                stream.wait_event(computed)
                for job in jobs:
                    if job.event is not None:  # CPU work has no event: it is done already
                        stream.wait_event(job.event)
                # By `data`, so that autograd does not count a write: a plan restores the same values.
                destination.data.copy_(source.data, non_blocking=True)
                copied: Event = stream.record_event()
            return copied

        return issue

    def wait_on_compute(self, ticket: Ticket) -> None:
        """Let the caller's current stream wait for a copy, once issued; block for CPU work."""
        event = as_job(ticket).issued()
        if event is not None:
            self._cuda.current_stream(self.device).wait_event(event)

    def _finish_copies(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
