"""Mistakes that the test device must show: each check passes, and finds the mistake when it is planted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remat_executor.costs import measure as measuring
from remat_executor.generator_state import replay
from remat_executor.lowering import lower
from remat_executor.module import pipeline
from remat_graph import Lane
from remat_offload import CudaMachine, HostPool
from remat_offload.copy_lanes.threaded import Job
from tests.device.plugin import Device
from tests.helpers.on_device import (
    dropout_distance,
    first_step_excess_nbytes,
    offmate_distance,
    other_device_ratio,
    reused_block_distance,
    round_trip_distance,
    straight_back_distance,
)

pytestmark = pytest.mark.cuda
Patch = pytest.MonkeyPatch


def copying(waits_for_compute: bool, waits_for_copies: bool) -> Callable[..., Any]:
    """`CudaMachine._copying` without one of its waits."""

    def _copying(self: Any, lane: Lane, destination: Tensor, source: Tensor) -> Callable[..., Any]:
        stream = self._streams[lane]
        computed = torch.cuda.current_stream(self.device).record_event()

        def issue(jobs: Sequence[Job]) -> Any:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream), torch.inference_mode():
                if waits_for_compute:
                    stream.wait_event(computed)
                for job in jobs:
                    if job.event is not None and waits_for_copies:
                        stream.wait_event(job.event)
                destination.data.copy_(source.data, non_blocking=True)
                return stream.record_event()

        return issue

    return _copying


def work_at_once(self: Any, function: Callable[[], object], after: Any = (), name: str = "") -> Job:
    """`work` that waits until copies are issued, but not until they are done."""
    job: Job = self._put(Lane.CPU_OPTIMIZER, name, lambda jobs: (function(), None)[1], after)
    return job


def forgotten_wait(self: Any, ticket: Any) -> None:
    """`wait_on_compute` that drops the event."""
    ticket.issued()


def found(device: Device, check: Callable[[], float]) -> bool:
    """Whether numbers are wrong, or accesses unordered."""
    worst = check()
    return worst > 1e-4 or device.take_races() != []


moving = partial(offmate_distance, "llama", "35%", in_backward=True, steps=2)


def test_the_planted_copy_is_the_projects(test_device: Device, monkeypatch: Patch) -> None:
    """With both waits it finds nothing, so what is found below is the missing wait."""
    monkeypatch.setattr(CudaMachine, "_copying", copying(True, True))
    assert not found(test_device, round_trip_distance)


@pytest.mark.parametrize("early", [False, True])
def test_nothing_is_found_without_a_mistake(test_device: Device, early: bool) -> None:
    after = partial(offmate_distance, "llama", "35%", in_backward=False, steps=2)
    with test_device.early_copies() if early else contextlib.nullcontext():
        for check in (round_trip_distance, straight_back_distance, reused_block_distance, moving, after):
            assert check() <= (1e-5 if check is after else 0.0)  # its updates are rounded in another order
            assert test_device.take_races() == []


def test_compute_that_forgets_a_copy(test_device: Device, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CudaMachine, "wait_on_compute", forgotten_wait)
    assert round_trip_distance() > 1e-4
    races = test_device.take_races()
    assert any("reads memory that aten::copy_" in race for race in races)
    assert any("writes memory that aten::copy_" in race for race in races)


def test_copies_that_do_not_wait_for_compute(test_device: Device, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CudaMachine, "_copying", copying(False, True))
    with test_device.early_copies():
        assert round_trip_distance() > 1e-4
    assert any("aten::copy_" in race for race in test_device.take_races())


def test_copies_that_do_not_wait_for_copies(test_device: Device, monkeypatch: Patch) -> None:
    """On the same host block, in two directions."""
    monkeypatch.setattr(CudaMachine, "_copying", copying(True, False))
    assert straight_back_distance() > 1e-4
    assert any(race.count("aten::copy_") == 2 for race in test_device.take_races())


def test_work_on_the_host_that_does_not_wait_for_copies(test_device: Device, monkeypatch: Patch) -> None:
    """The update reads a gradient that has not arrived; no race of the device, but wrong numbers."""
    monkeypatch.setattr(CudaMachine, "work", work_at_once)
    assert moving() > 1e-4
    test_device.take_races()


def test_a_host_block_that_is_released_early(monkeypatch: Patch) -> None:
    release = HostPool.release
    monkeypatch.setattr(HostPool, "release", lambda pool, tensor, after=None: release(pool, tensor))
    assert reused_block_distance() > 1e-4


def test_a_generator_that_is_advanced_once_too_often(monkeypatch: Patch, tmp_path: Path) -> None:
    assert dropout_distance(tmp_path) == 0.0

    def once_more(state: Any, device: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        made = replay(state, device, target, *args, **kwargs)
        torch.rand(1, device=device)
        return made

    monkeypatch.setattr(lower, "replay", once_more)
    assert dropout_distance(tmp_path) > 1e-4


def test_a_current_device_that_is_ignored(monkeypatch: Patch) -> None:
    assert other_device_ratio() == pytest.approx(1.0)
    monkeypatch.setattr(measuring, "as_current", lambda device: contextlib.nullcontext())
    assert other_device_ratio() != pytest.approx(1.0, rel=0.5)


def test_workspaces_that_a_step_takes(monkeypatch: Patch, tmp_path: Path) -> None:
    assert first_step_excess_nbytes(tmp_path) == 0
    monkeypatch.setattr(pipeline, "warm_up_libraries", lambda *args: None)
    assert first_step_excess_nbytes(tmp_path) > 1 << 20
