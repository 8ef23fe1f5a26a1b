"""Measure operators on this device: seconds, workspace bytes, output bytes.

Each key is measured once, with inputs of that key alone, which are freed before the next key's are made. So
the operators of a model larger than the device can be measured. A first run initializes what is initialized
once (oneDNN's primitives, cuBLAS' workspace, compiled code); later runs are timed. Short operators run in
groups of about 50 us, until the times agree or 20 ms are spent; long ones run three times.

On the CPU the time is the least of the groups, because other load only adds time (``stopwatch``). If the
thread waited for a core meanwhile, the key is measured again after the others (``busy``). Times that are
still doubtful are marked in the cache. They are measured again when they are next asked for, until one of
them waits again.

An accelerator times the runs by its own clock (``DeviceTimer``); the lower quartile counts. The time for
which the host works to issue them is kept apart: a step of many small operators may be bound by it.

A few long operators would dominate the time to plan, so runs are added only up to 0.1 s. Where torch's own
operator takes 0.1 s on CPU, its first run is the only one: initialization takes milliseconds.

Where the time is known from other sizes (``times_by_size``), the operator runs for its bytes alone.

Bytes are read from the allocator (``remat_executor.memory.allocator``), so on CUDA they are rounded up to its
blocks. On CPU the first run of 38 operators needed the same workspace as later ones, with one thread or two:
there the bytes of torch's own operators are those of the first run, elsewhere of the last.
"""

import time
from collections.abc import Callable, Container, Mapping

import attrs
import torch

from remat_executor.costs.busy import measured_again
from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.costs.device_timer import DeviceTimer, Seconds
from remat_executor.costs.failures import MeasureError, failures_named
from remat_executor.costs.stopwatch import (
    HostClocks,
    HostStopwatch,
    Request,
    Thunk,
    lower_quartile,
    seconds_of,
    stopwatch,
)
from remat_executor.current_device import as_current
from remat_executor.generator_state import preserved_generators
from remat_executor.memory.allocator import allocator_peak

_LONG_S = 0.1
_SAVE_EVERY_S = 5.0
_BUSY = 0.25  # of the operators waited


def measure(
    requests: Mapping[str, Request],
    device: torch.device | str = "cpu",
    cache: CostCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    clock: HostClocks | None = None,
    replaceable: Container[str] = (),
    estimates: Mapping[str, Seconds] | None = None,
) -> dict[str, MeasuredCost]:
    """Measure operators whose costs the cache does not know, or knows as doubtful.

    Args:
        requests: for each key a factory. It makes input tensors on the device and returns a thunk that runs
            the operator on them once and returns its outputs. A thunk runs many times.
        device: where the operators run.
        cache: known costs; new ones are added to it, also if the work is interrupted.
        on_progress: called with the number of keys done and their total, first with the number of known ones.
        clock: of the host; it times operators on the CPU, and their issuing elsewhere. None: the system's.
        replaceable: keys that are left out if they do not fit in what is free.
        estimates: times that need not be measured, by key; they are not added to the cache.

    Returns:
        The cost of each key, in the order of the requests.

    Raises:
        MeasureError: a factory or a thunk failed; the message names the key.
        ProfilerBusy: on CPU, a profiler is running.

    Warns:
        RematWarning: other processes kept the cores busy, and times are doubtful.
    """
    device, clock, estimates = torch.device(device), clock or HostClocks(), estimates or {}
    known = cache.get(requests) if cache is not None else {}
    found = _Found(cache=cache, costs=dict(known))
    report = on_progress or (lambda done, total: None)
    report(len(known), len(requests))
    try:
        with (
            as_current(device),
            preserved_generators([device]),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            for key, factory in requests.items():
                if key in known:
                    continue
                try:
                    if key in estimates:
                        found.costs[key] = _measure_bytes(key, factory, device, clock, estimates[key])
                    else:
                        found.add({key: _measure_one(key, factory, device, clock)})
                except MeasureError as error:
                    if key not in replaceable or not error.out_of_memory:
                        raise
                report(len(found.costs), len(requests))
            fresh = {
                key: cost for key, cost in found.costs.items() if key not in known and key not in estimates
            }
            waited = {key: cost for key, cost in fresh.items() if cost.doubtful}
            busy = len(waited) > _BUSY * len(fresh)
            again = measured_again(waited, requests, clock, busy)
            found.add(again)
            if any(cost.doubtful for cost in again.values()):
                (cache or CostCache(device)).warn_busy()
            if not busy:
                doubtful = [key for key, cost in known.items() if cost.doubtful]
                found.add(_while_few_wait({key: requests[key] for key in doubtful}, device, clock))
    finally:
        found.save()
        if device.type != "cpu":
            torch.accelerator.empty_cache()  # the tensors are freed, but not the blocks cached for them
    return {key: found.costs[key] for key in requests if key in found.costs}


@attrs.define(kw_only=True, eq=False)
class _Found:
    """Costs, and those among them that are not saved yet."""

    cache: CostCache | None
    costs: dict[str, MeasuredCost]
    unsaved: dict[str, MeasuredCost] = attrs.field(factory=dict)
    saved_at: float = attrs.field(factory=time.monotonic)

    def add(self, costs: Mapping[str, MeasuredCost]) -> None:
        self.costs.update(costs)
        self.unsaved.update(costs)
        if time.monotonic() - self.saved_at > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        if self.cache is not None:
            self.cache.add(self.unsaved)
        self.unsaved, self.saved_at = {}, time.monotonic()


def _while_few_wait(
    requests: Mapping[str, Request], device: torch.device, clock: HostClocks
) -> dict[str, MeasuredCost]:
    """New costs of operators, until several wait for a core or one does not fit.

    Those that wait among many that do not may wait on an idle machine too: they are no longer doubtful,
    unless they wait for milliseconds.
    """
    found: dict[str, MeasuredCost] = {}
    waiting: dict[str, MeasuredCost] = {}
    for key, factory in requests.items():
        try:
            cost = _measure_one(key, factory, device, clock)
        except MeasureError as error:
            if not error.out_of_memory:
                raise
            break
        (waiting if cost.doubtful else found)[key] = cost
        if len(waiting) > max(1, _BUSY * len(found)):
            return found
    if len(waiting) <= _BUSY * len(found):
        found |= measured_again(waiting, requests, clock, busy=False)
    return found


def _measure_one(key: str, factory: Request, device: torch.device, clock: HostClocks) -> MeasuredCost:
    """The cost of an operator; it is doubtful if the thread waited for a core."""
    with failures_named(key):
        thunk, watch = factory(), stopwatch(key, clock)
        time_s, peak_nbytes, end_nbytes = _observed(thunk, device, watch)
        issue_s = 0.0
        sets_up_little = _sets_up_little(key, device)
        if device.type != "cpu":
            time_s, issue_s = seconds_of(thunk, DeviceTimer.of(device, clock.worked), lower_quartile)
        elif time_s < _LONG_S or not sets_up_little:
            watch = stopwatch(key, clock)  # which has not seen the first run: it may have read files
            time_s, _ = seconds_of(thunk, watch)
        if not sets_up_little:
            _, peak_nbytes, end_nbytes = _observed(thunk, device, stopwatch(key, clock))
    cost = _cost(Seconds(time_s, issue_s), peak_nbytes, end_nbytes)
    return attrs.evolve(cost, doubtful=device.type == "cpu" and watch.spoiled)


def _measure_bytes(
    key: str, factory: Request, device: torch.device, clock: HostClocks, seconds: Seconds
) -> MeasuredCost:
    """The cost of an operator whose time is known."""
    with failures_named(key):
        thunk = factory()
        for _ in range(1 if _sets_up_little(key, device) else 2):
            _, peak_nbytes, end_nbytes = _observed(thunk, device, stopwatch(key, clock))
    return _cost(seconds, peak_nbytes, end_nbytes)


def _sets_up_little(key: str, device: torch.device) -> bool:
    """Whether the first run of an operator needs the memory of later ones; others may compile then."""
    return device.type == "cpu" and key.removeprefix("again: ").startswith("aten.")


def _cost(seconds: Seconds, peak_nbytes: int, end_nbytes: int) -> MeasuredCost:
    return MeasuredCost(
        time_s=seconds.run_s,
        workspace_nbytes=max(0, peak_nbytes - max(0, end_nbytes)),
        output_nbytes=max(0, end_nbytes),
        issue_s=seconds.issue_s,
    )


def _observed(thunk: Thunk, device: torch.device, watch: HostStopwatch) -> tuple[float, int, int]:
    """Seconds of one run, and the allocator's bytes at its peak and at its end; its results are freed."""
    results: list[object] = []
    seconds: list[float] = []

    def run() -> object:
        seconds.append(watch.seconds(lambda: results.append(thunk())).run_s)
        return results.pop()

    record = allocator_peak(run, device)
    return seconds[0], record.peak_nbytes, record.end_nbytes
