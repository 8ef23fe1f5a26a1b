"""Time work on an accelerator by the device's own clock, without the time in which the host issues it.

Two events around some work measure the host's time too if the device is idle when the work is issued: it then
waits for each kernel. On an H100 the host issues an operator in 8 to 13 us, several times as long as a small
kernel runs. So the device gets other work first, and if that ended before all of the measured work was
issued, the measurement is repeated behind twice as much of it.

The time in which the host issues the work is read by a clock of the host: by that of the issuing thread, if
waits for a core must not count. It is a number of its own: the host issues while the device computes, so a
step takes the longer of both. Work that no delay outlasts, because the host waits for the device in it, is
measured without one: the host's time would contain the delay.

The other work writes a block that is larger than most caches. So a run finds its inputs in memory, and the
further runs of a group find them in the cache. That is right in part either way: in a training step the
operator before has just written some of the inputs, and the weights and saved activations are in memory. The
cache is not emptied between the runs of a group: only runs of less than 25 us are grouped, whose inputs are
small. Longer runs are timed one by one, each behind the block.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import attrs
import torch

_BLOCK_NBYTES = 128 << 20  # the cache of an H100 holds 50 MB, which it writes in 45 us
_MOST_DELAYS = 64  # some milliseconds; work that is not issued by then waits for the device itself


class TimingEvent(Protocol):
    """A moment on the device, such as a ``torch.Event`` that can be timed."""

    def record(self) -> Any:
        """Note the moment at which the device has finished what was issued so far."""

    def query(self) -> bool:
        """Whether the device has reached the moment."""

    def synchronize(self) -> Any:
        """Wait until the device has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this moment to another."""


class Seconds(NamedTuple):
    """Mean seconds of one run."""

    run_s: float  # on the device
    issue_s: float  # on the host, until the run is issued


@attrs.define(kw_only=True, eq=False)
class DeviceTimer:
    """Times work on a device.

    Attributes:
        new_event: makes an event.
        delay: issues work that keeps the device busy for longer than the host needs to issue it.
        clock: seconds now, of the host.
    """

    new_event: Callable[[], TimingEvent]
    delay: Callable[[], object]
    clock: Callable[[], float] = time.perf_counter
    _delays: int = attrs.field(default=1, init=False)  # as many as the last work needed

    @classmethod
    def of(cls, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> "DeviceTimer":
        """A timer for an accelerator, which must be the current device; it holds a block there."""
        block = torch.empty(_BLOCK_NBYTES, dtype=torch.uint8, device=device)
        return cls(
            new_event=partial(torch.Event, device, enable_timing=True),
            delay=partial(block.fill_, 0),
            clock=clock,
        )

    def seconds(self, run: Callable[[], object], runs: int = 1) -> Seconds:
        """The mean seconds of several runs; they are issued at least once, and maybe again.

        Work during which the host waits for the device includes that wait, in both times.
        """
        while True:
            start, end = self.new_event(), self.new_event()
            for _ in range(self._delays):
                self.delay()
            start.record()
            began_s = self.clock()
            for _ in range(runs):
                run()
            issued_s = self.clock() - began_s
            end.record()
            device_waited = start.query()
            end.synchronize()
            if not device_waited or self._delays == 0:
                return Seconds(start.elapsed_time(end) / 1e3 / runs, issued_s / runs)
            self._delays = 2 * self._delays if self._delays < _MOST_DELAYS else 0
