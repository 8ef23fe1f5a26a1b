"""A device's time has none of the host's: simulated by a device and a host with a clock each."""

from __future__ import annotations

import attrs
import pytest

from remat_executor.costs.device_timer import DeviceTimer, Seconds

ISSUE_S, DELAY_S = 10e-6, 45e-6


@attrs.define
class Simulated:
    """The host issues work in 10 us; the device does it in order, as soon as it is issued.

    With `waits` the host waits for each piece of work.
    """

    kernel_s: float
    issue_s: float = ISSUE_S
    waits: bool = False
    host_s: float = 0.0
    device_s: float = 0.0
    runs: int = 0

    def issue(self, issue_s: float, work_s: float) -> None:
        self.host_s += issue_s
        self.device_s = max(self.device_s, self.host_s) + work_s

    def run(self) -> None:
        self.runs += 1
        self.issue(self.issue_s, self.kernel_s)
        if self.waits:
            self.host_s = self.device_s

    def timer(self) -> DeviceTimer:
        return DeviceTimer(
            new_event=lambda: Moment(self),
            delay=lambda: self.issue(ISSUE_S, DELAY_S),
            clock=lambda: self.host_s,
        )


@attrs.define
class Moment:
    """An event."""

    of: Simulated
    device_s: float = 0.0

    def record(self) -> None:
        self.of.issue(0.0, 0.0)
        self.device_s = self.of.device_s

    def query(self) -> bool:
        return self.device_s <= self.of.host_s

    def synchronize(self) -> None:
        self.of.host_s = max(self.of.host_s, self.device_s)

    def elapsed_time(self, end_event: Moment) -> float:
        assert end_event.device_s <= self.of.host_s, "read before it is reached"
        return 1e3 * (end_event.device_s - self.device_s)


@pytest.mark.parametrize("runs", [1, 3, 25])
@pytest.mark.parametrize("kernel_s", [2e-6, 30e-6, 1e-3])
def test_no_time_of_the_host(kernel_s: float, runs: int) -> None:
    """A kernel that is shorter than its launch is timed as itself, alone and in a group."""
    device = Simulated(kernel_s)
    found = device.timer().seconds(device.run, runs)
    assert found == pytest.approx(Seconds(kernel_s, ISSUE_S))


def test_the_delay_is_found_once() -> None:
    """Runs are repeated until the device stays busy meanwhile; later measurements begin with that delay."""
    device = Simulated(2e-6)
    timer = device.timer()
    timer.seconds(device.run, 25)
    tried = device.runs
    timer.seconds(device.run, 25)
    assert tried == 4 * 25  # behind 1, 2, 4 and 8 delays
    assert device.runs == tried + 25


def test_work_that_waits_for_the_device() -> None:
    """No delay hides the host's part of such work: both times have it, none has a delay, and it ends."""
    device = Simulated(2e-6, waits=True)
    timer = device.timer()
    for _ in range(2):
        found = timer.seconds(device.run, 4)
        assert found == pytest.approx(Seconds(2e-6 + ISSUE_S, 2e-6 + ISSUE_S), rel=0.5)
    assert device.runs == 8 * 4 + 4  # behind 1, 2, ... 64 delays and none; then none at once


def test_work_that_is_issued_slowly() -> None:
    """The delay is bounded, so that the device's queue never fills; the device's time is then too long."""
    device = Simulated(2e-6, issue_s=1.0)
    found = device.timer().seconds(device.run, 2)
    assert found.run_s > 2e-6
    assert found.issue_s == pytest.approx(1.0)
    assert device.runs == 8 * 2
