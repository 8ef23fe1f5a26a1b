"""Training steps on a device: peaks, times and traces, for the benchmarks that run on an accelerator.

Everything here also runs on the CPU, to test the benchmarks.
"""

import datetime
import importlib.util
import platform
import re
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # documented, not in its `__all__`
from torch.profiler import ProfilerActivity, profile, record_function

from remat_executor import StepOverBudget, allocator_peak
from remat_executor.torch_private.tensors import is_out_of_memory
from remat_facade import BudgetAboveDevice, InfeasibleBudget, NoRoom, NotFound
from remat_graph import Measured, load_platform, save_platform
from remat_graph.platforms.measured import Measurement

IN_A_ROW = 4  # steps without a wait in between
_WARM_UPS = 2
_MARK = "remat: one step"
_TOO_SMALL = (BudgetAboveDevice, InfeasibleBudget, NoRoom, NotFound, StepOverBudget)
_PREPARING = {"aten::empty", "aten::empty_strided", "aten::detach"}  # no work of the step


def current_device() -> torch.device:
    """The accelerator of this machine, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # none may be visible
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def device_name(device: torch.device) -> str:
    """What people call it, fit for a file's name."""
    name = platform.machine()
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_properties(device).name
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()


def wait(device: torch.device) -> None:
    """Wait until the device has computed all that was issued."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def first_line(error: Exception) -> str:
    """An error as a note of a row."""
    line = (str(error).strip().splitlines() or [""])[0][:400]
    return f"{type(error).__name__}: {line}"


def too_small(error: Exception) -> bool:
    """Whether an error says that a budget or a memory is too small, so that a row has no figures.

    Any other error is a failure: of remat, of what it is compared with, or of the benchmark.
    """
    cause = error.__cause__  # an operator that does not fit the device cannot be measured
    return any(
        isinstance(each, _TOO_SMALL) or is_out_of_memory(each)
        for each in (error, cause)
        if isinstance(each, Exception)
    )


def without_inductor(device: torch.device) -> str:
    """Why Inductor cannot run here; "" if it can."""
    if device.type == "cpu":
        return "" if shutil.which("g++") else "Inductor needs g++ on the CPU"
    return "" if importlib.util.find_spec("triton") else "Inductor needs triton, which is not installed"


@attrs.frozen(eq=False)
class Side:
    """One way to run a step: what to call, on what, and whose gradients it leaves."""

    call: Callable[..., Tensor]
    owner: nn.Module
    sample: Any

    def step(self) -> Tensor:
        """Forward and backward into new gradients; returns the loss."""
        self.owner.zero_grad()
        loss = self.call(self.sample)
        loss.backward()
        return loss

    def forget(self) -> None:
        """Drop the gradients."""
        self.owner.zero_grad()


# -- memory


def peak_nbytes(side: Side, device: torch.device) -> tuple[int, int | None]:
    """Of a step, the allocator's peak, and the peak of what was asked of it: blocks may be larger."""
    side.step()  # what is set up once
    side.forget()
    before_nbytes = requested_nbytes(device, "current")
    nbytes = allocator_peak(side.step, device).peak_nbytes
    after_nbytes = requested_nbytes(device, "peak")
    side.forget()
    if before_nbytes is None or after_nbytes is None:
        return nbytes, None
    return nbytes, after_nbytes - before_nbytes


def requested_nbytes(device: torch.device, reading: str) -> int | None:
    """What tensors asked of the device's allocator, "current" or "peak"; None if it does not count that."""
    if device.type == "cpu":
        return None
    nbytes: int | None = torch.accelerator.memory_stats(device).get(f"requested_bytes.all.{reading}")
    return nbytes


def reserved_nbytes(device: torch.device) -> int | None:
    """The most that the allocator has taken from the device; None on the CPU."""
    return int(torch.accelerator.max_memory_reserved()) if device.type != "cpu" else None


def release(device: torch.device) -> None:
    """Give cached blocks back to the device."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


# -- time


def interleaved_s(
    sides: Sequence[Side], device: torch.device, steps: int, *, in_a_row: int = 1
) -> tuple[float, ...]:
    """Medians of a step of each side, which take turns; several in a row are waited for together."""
    taken: list[list[float]] = [[] for _ in sides]
    for i in range(-_WARM_UPS, steps):
        for times, side in zip(taken, sides, strict=True):
            wait(device)
            start_s = time.perf_counter()
            for _ in range(in_a_row):
                side.step()
            wait(device)
            if i >= 0:
                times.append((time.perf_counter() - start_s) / in_a_row)
            side.forget()
    return tuple(map(statistics.median, taken))


@attrs.frozen(kw_only=True)
class Trace:
    """One step as the profiler saw it.

    Attributes:
        step_s: from its begin until the device had finished.
        before_first_s: until the first kernel began, or on a CPU the first operator.
        busy_s: of the device, in kernels and copies.
        idle_s: of the device, between the first and the last.
        after_last_s: from the end of the last.
        kernels: how many.
        launches: calls of the runtime that launched them.
        launching_s: of the host in these calls.
        by_operator: seconds by the operator that was called, of the device, or of the CPU.
    """

    step_s: float
    before_first_s: float
    busy_s: float
    idle_s: float
    after_last_s: float
    kernels: int
    launches: int
    launching_s: float
    by_operator: Mapping[str, float]


def traced(side: Side, device: torch.device) -> Trace:
    """Run one step under the profiler, after one that is not recorded."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda" and ProfilerActivity.CUDA in torch.profiler.supported_activities():
        activities.append(ProfilerActivity.CUDA)
    side.step()
    side.forget()
    wait(device)
    with profile(activities=activities) as session, record_function(_MARK):
        side.step()
        wait(device)
    side.forget()
    return _trace(session.events() or [])


def _trace(events: Sequence[Any]) -> Trace:
    """Of the events of one step; times of the profiler are microseconds."""
    (mark,) = (e for e in events if e.name == _MARK and e.device_type == DeviceType.CPU)
    begin, end = mark.time_range.start, mark.time_range.end
    on_device = [
        e for e in events if e.device_type != DeviceType.CPU and not getattr(e, "is_user_annotation", False)
    ]
    called = [e for e in events if e.device_type == DeviceType.CPU and _is_called(e)]
    launches = [e for e in events if "LaunchKernel" in e.name]
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_device or called)
    busy = idle = 0.0
    last = spans[0][0] if spans else begin
    for start, stop in spans:
        idle += max(0.0, start - last)
        busy += max(0.0, stop - max(start, last))
        last = max(last, stop)
    by_operator: dict[str, float] = defaultdict(float)
    for e in called:
        by_operator[operator_name(e.name)] += (e.device_time_total if on_device else e.cpu_time_total) / 1e6
    return Trace(
        step_s=(end - begin) / 1e6,
        before_first_s=((spans[0][0] if spans else end) - begin) / 1e6,
        busy_s=busy / 1e6,
        idle_s=idle / 1e6,
        after_last_s=max(0.0, end - last) / 1e6,
        kernels=len(spans),
        launches=len(launches),
        launching_s=sum(e.time_range.end - e.time_range.start for e in launches) / 1e6,
        by_operator=dict(by_operator),
    )


def _is_called(event: Any) -> bool:
    """Whether it is an operator that no other operator calls, and that does some work."""
    if not event.name.startswith("aten::") or event.name in _PREPARING:
        return False
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith("aten::"):
            return False
        parent = parent.cpu_parent
    return True


def operator_name(name: str) -> str:
    """One name for the forms of an operator: ``aten::add_`` and ``aten.add.Tensor`` are both ``add``."""
    name = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
    return name.strip("_").removesuffix("_functional")


# -- platforms


def keep(folder: Path, measurements: Sequence[Measurement], device: torch.device) -> None:
    """Add measured operators to the platform file of the device."""
    if not measurements:
        return
    path = folder / f"{device_name(device)}.json"
    known = load_platform(path) if path.exists() else None
    platform_of_all = Measured(
        device=device_name(device),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        measurements=[*(known.measurements.values() if known is not None else ()), *measurements],
        links=None if known is None else known.links,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_platform(platform_of_all, path)
