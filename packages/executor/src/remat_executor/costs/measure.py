"""What each operator costs on this device: seconds, scratch bytes, bytes of its outputs.

Each key is measured once, with inputs of that key alone, and these are gone before the next key's are made:
so the operators of a model larger than the device can be measured. A first run warms up what is set up once
(oneDNN's primitives, cuBLAS' workspace, code to be compiled); times are of the runs after it. Short
operators run in groups of some 50 us, until the times agree or 20 ms are spent; long ones run three
times. The time is the lower quartile of the groups, because a busy machine only ever adds: on two cores at a
load of four, eight measurements of one operator differed by up to 13 times with the median, and by up to 3
with the lower quartile.

A handful of long operators would be most of what planning costs, so no more runs are added than end within
0.1 s; and where torch's own operator takes 0.1 s on CPU, its first run is the only one: what it sets up,
milliseconds, is little beside that.

Bytes are the allocator's (``remat_executor.memory.allocator``), so on CUDA they are rounded up to its blocks.
On CPU the first run of 38 operators took no other scratch than later ones, with one thread or two: there the
bytes of torch's own operators are those of the first run, elsewhere of the last.
"""

import time
from collections.abc import Callable, Mapping

import attrs
import torch

from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.memory.allocator import ProfilerBusy, allocator_peak
from remat_executor.rng import preserved_generators
from remat_graph import RematError
from remat_graph.errors import text_of

Thunk = Callable[[], object]

_GROUP_S = 50e-6
_ENOUGH_S = 20e-3
_AGREE = 0.03  # the runs agree when the fastest quarter of them is within 3 %
_FEW, _MANY = 3, 40  # samples
_MOST_S = 0.1  # of samples, unless there is only one
_LONG_S = 0.1
_SAVE_EVERY_S = 5.0


@attrs.frozen(kw_only=True, str=False)
class MeasureError(RematError):
    """An operator could not be measured."""

    key: str
    problem: str

    def __str__(self) -> str:
        advice = "if the model alone takes these inputs, plan the parts around this operator and report it"
        return f"cannot measure {self.key}: {self.problem}; {advice}"


def measure(
    requests: Mapping[str, Callable[[], Thunk]],
    device: torch.device | str = "cpu",
    cache: CostCache | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, MeasuredCost]:
    """Measure operators, except those whose costs the cache knows.

    Args:
        requests: for each key a factory. It makes input tensors on the device and returns a thunk that runs
            the operator on them once and returns its outputs. A thunk runs many times.
        device: where the operators run.
        cache: costs measured before; what is measured now is added to it, also if the work is interrupted.
        on_progress: called with the number of keys done and their total, first with what the cache knew.

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
        with preserved_generators([device]), torch.no_grad(), torch.autocast(device.type, enabled=False):
            for key, factory in requests.items():
                if key in known:
                    continue
                fresh[key] = _measure_one(key, factory, device)
                report(len(known) + len(fresh), len(requests))
                if cache is not None and time.monotonic() - saved_at > _SAVE_EVERY_S:
                    cache.add(dict(list(fresh.items())[saved:]))
                    saved, saved_at = len(fresh), time.monotonic()
    finally:
        if cache is not None:
            cache.add(dict(list(fresh.items())[saved:]))
        if device.type != "cpu":
            torch.accelerator.empty_cache()  # the tensors are gone, the blocks kept for them are not
    return {key: known[key] if key in known else fresh[key] for key in requests}


def _measure_one(key: str, factory: Callable[[], Thunk], device: torch.device) -> MeasuredCost:
    try:
        thunk = factory()
        time_s, peak_nbytes, end_nbytes = _observed(thunk, device)
        # Others may compile themselves at their first run.
        sets_up_little = device.type == "cpu" and key.removeprefix("again: ").startswith("aten.")
        if time_s < _LONG_S or not sets_up_little:
            time_s = _time(thunk, device)
        if not sets_up_little:
            _, peak_nbytes, end_nbytes = _observed(thunk, device)
    except ProfilerBusy:
        raise
    except Exception as error:  # whatever the operator raises, the key must be told
        problem = text_of(error).strip().partition("\n")[0]
        raise MeasureError(key=key, problem=f"{type(error).__name__}: {problem}") from error
    return MeasuredCost(
        time_s=time_s,
        workspace_nbytes=max(0, peak_nbytes - max(0, end_nbytes)),
        output_nbytes=max(0, end_nbytes),
    )


def _observed(thunk: Thunk, device: torch.device) -> tuple[float, int, int]:
    """Seconds of one run, and the allocator's bytes at its peak and its end; what it returned is gone."""
    seconds: list[float] = []

    def run() -> object:
        start = time.perf_counter()
        result = thunk()
        seconds.append(time.perf_counter() - start)
        return result

    record = allocator_peak(run, device)
    return seconds[0], record.peak_nbytes, record.end_nbytes


def _time(thunk: Thunk, device: torch.device) -> float:
    """Seconds that a run takes, after a first one that is not counted."""
    clock = _wall_clock if device.type == "cpu" else _device_clock
    once = clock(thunk, 1, device)
    group = max(1, int(_GROUP_S / max(once, 1e-7)))
    samples = [once] if group == 1 else []
    spent = once
    while len(samples) < _MANY and not (len(samples) >= _FEW and spent + group * samples[-1] > _ENOUGH_S):
        if samples and spent + group * samples[-1] > _MOST_S:
            break
        samples.append(clock(thunk, group, device))
        spent += group * samples[-1]
        if len(samples) >= _FEW + 2 and _agree(samples):
            break
    return _lower_quartile(samples)


def _agree(samples: list[float]) -> bool:
    return _lower_quartile(samples) <= (1 + _AGREE) * min(samples)


def _lower_quartile(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _wall_clock(thunk: Thunk, runs: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        thunk()
    return (time.perf_counter() - start) / runs


def _device_clock(thunk: Thunk, runs: int, device: torch.device) -> float:
    start = torch.Event(device, enable_timing=True)
    end = torch.Event(device, enable_timing=True)
    start.record()
    for _ in range(runs):
        thunk()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / runs
