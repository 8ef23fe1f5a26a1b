"""Measure operators on this device: seconds, workspace bytes, output bytes.

Each key is measured once, with inputs of that key alone, which are freed before the next key's are made. So
the operators of a model larger than the device can be measured. A first run initializes what is initialized
once (oneDNN's primitives, cuBLAS' workspace, compiled code); later runs are timed. Short operators run in
groups of about 50 us, until the times agree or 20 ms are spent; long ones run three times. The time is the
lower quartile of the groups, because other load only adds time: on two cores at a load of four, eight
measurements of one operator differed by up to 13 times with the median, and by up to 3 with the lower
quartile. An accelerator times the runs by its own clock (``DeviceTimer``). The time in which the host issues
them is kept apart: a step of many small operators may be bound by it.

A few long operators would dominate the time to plan, so runs are added only up to 0.1 s. Where torch's own
operator takes 0.1 s on CPU, its first run is the only one: initialization takes milliseconds.

Bytes are read from the allocator (``remat_executor.memory.allocator``), so on CUDA they are rounded up to its
blocks. On CPU the first run of 38 operators needed the same workspace as later ones, with one thread or two:
there the bytes of torch's own operators are those of the first run, elsewhere of the last.
"""

import time
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import ClassVar

import attrs
import torch

from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.costs.device_timer import DeviceTimer, Seconds
from remat_executor.current_device import as_current
from remat_executor.generator_state import preserved_generators
from remat_executor.memory.allocator import ProfilerBusy, allocator_peak
from remat_executor.torch_private.tensors import is_out_of_memory
from remat_graph.errors import ProblemError, text_of

Thunk = Callable[[], object]
"""Runs an operator once."""
Request = Callable[[], Thunk]
"""Makes the arguments of an operator, and a function that runs it on them."""

_GROUP_S = 50e-6
_ENOUGH_S = 20e-3
_AGREE = 0.03  # the fastest quarter of the samples is within 3 %
_FEW, _MANY = 3, 40  # samples
_MOST_S = 0.1  # for all samples, unless there is only one
_LONG_S = 0.1
_SAVE_EVERY_S = 5.0
_REPORT = "if the model alone takes these inputs, plan the parts around this operator and report it"
_MORE_MEMORY = (
    "this operator alone, with its inputs and outputs, must fit in what is free: free memory, also that of "
    "other processes, or take a smaller batch"
)


@attrs.frozen(kw_only=True, str=False)
class MeasureError(ProblemError):
    """An operator could not be measured.

    Attributes:
        key: the operator with its arguments.
        out_of_memory: whether it did not fit in what was free.
    """

    prefix: ClassVar[str] = "cannot measure {0.key}: "
    key: str
    out_of_memory: bool = False


def measure(
    requests: Mapping[str, Request],
    device: torch.device | str = "cpu",
    cache: CostCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    replaceable: Container[str] = (),
) -> dict[str, MeasuredCost]:
    """Measure operators whose costs the cache does not know.

    Args:
        requests: for each key a factory. It makes input tensors on the device and returns a thunk that runs
            the operator on them once and returns its outputs. A thunk runs many times.
        device: where the operators run.
        cache: known costs; new ones are added to it, also if the work is interrupted.
        on_progress: called with the number of keys done and their total, first with the number of known ones.
        clock: seconds now, of the host; it times operators on the CPU, and their issuing elsewhere.
        replaceable: keys that are left out if they do not fit in what is free.

    Returns:
        The cost of each key, in the order of the requests.

    Raises:
        MeasureError: a factory or a thunk failed; the message names the key.
        ProfilerBusy: on CPU, a profiler is running.
    """
    device = torch.device(device)
    known = cache.get(requests) if cache is not None else {}
    fresh: dict[str, MeasuredCost] = {}
    saved = 0
    saved_at = time.monotonic()
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
                    fresh[key] = _measure_one(key, factory, device, clock)
                except MeasureError as error:
                    if key not in replaceable or not error.out_of_memory:
                        raise
                report(len(known) + len(fresh), len(requests))
                if cache is not None and time.monotonic() - saved_at > _SAVE_EVERY_S:
                    cache.add(dict(list(fresh.items())[saved:]))
                    saved, saved_at = len(fresh), time.monotonic()
    finally:
        if cache is not None:
            cache.add(dict(list(fresh.items())[saved:]))
        if device.type != "cpu":
            torch.accelerator.empty_cache()  # the tensors are freed, but not the blocks cached for them
    found = {**known, **fresh}
    return {key: found[key] for key in requests if key in found}


def _measure_one(
    key: str, factory: Request, device: torch.device, clock: Callable[[], float]
) -> MeasuredCost:
    try:
        thunk = factory()
        time_s, peak_nbytes, end_nbytes = _observed(thunk, device, clock)
        issue_s = 0.0
        # Other operators may compile at their first run.
        sets_up_little = device.type == "cpu" and key.removeprefix("again: ").startswith("aten.")
        if time_s < _LONG_S or not sets_up_little:
            time_s, issue_s = _time(thunk, device, clock)
        if not sets_up_little:
            _, peak_nbytes, end_nbytes = _observed(thunk, device, clock)
    except ProfilerBusy:
        raise
    except Exception as error:  # whatever the operator raises, the message names its key
        problem = text_of(error).strip().partition("\n")[0]
        full = is_out_of_memory(error)
        raise MeasureError(
            key=key,
            problem=f"{type(error).__name__}: {problem}",
            advice=_MORE_MEMORY if full else _REPORT,
            out_of_memory=full,
        ) from error
    return MeasuredCost(
        time_s=time_s,
        workspace_nbytes=max(0, peak_nbytes - max(0, end_nbytes)),
        output_nbytes=max(0, end_nbytes),
        issue_s=issue_s,
    )


def _observed(thunk: Thunk, device: torch.device, clock: Callable[[], float]) -> tuple[float, int, int]:
    """Seconds of one run, and the allocator's bytes at its peak and at its end; its results are freed."""
    seconds: list[float] = []

    def run() -> object:
        began_s = clock()
        result = thunk()
        seconds.append(clock() - began_s)
        return result

    record = allocator_peak(run, device)
    return seconds[0], record.peak_nbytes, record.end_nbytes


def _time(thunk: Thunk, device: torch.device, clock: Callable[[], float]) -> Seconds:
    """Seconds of a run, after a first one that is not counted."""
    seconds = partial(_wall_seconds, clock) if device.type == "cpu" else DeviceTimer.of(device, clock).seconds
    once = seconds(thunk, 1)
    group = max(1, int(_GROUP_S / max(once.run_s, 1e-7)))
    samples, issued = ([once.run_s], [once.issue_s]) if group == 1 else ([], [])
    spent = once.run_s
    while len(samples) < _MANY and not (len(samples) >= _FEW and spent + group * samples[-1] > _ENOUGH_S):
        if samples and spent + group * samples[-1] > _MOST_S:
            break
        run_s, issue_s = seconds(thunk, group)
        samples.append(run_s)
        issued.append(issue_s)
        spent += group * samples[-1]
        if len(samples) >= _FEW + 2 and _lower_quartile(samples) <= (1 + _AGREE) * min(samples):
            break
    return Seconds(_lower_quartile(samples), _lower_quartile(issued))


def _lower_quartile(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _wall_seconds(clock: Callable[[], float], thunk: Thunk, runs: int) -> Seconds:
    """The mean seconds of several runs on the CPU, which issues nothing."""
    began_s = clock()
    for _ in range(runs):
        thunk()
    return Seconds((clock() - began_s) / runs, 0.0)
