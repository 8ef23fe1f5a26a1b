"""Times at a new size are scaled from a measured one; bytes are measured at each size."""

from pathlib import Path

import pytest
import torch

from remat_executor.costs.cache import CostCache, MeasuredCost
from remat_executor.costs.device_timer import Seconds
from remat_executor.costs.measure import measure
from remat_executor.costs.scaled import MOST_SIZES, ScaledTimes

KEYS = {(0, 0): "mm", (1, 0): "relu", (2, 0): "view"}


def costs(**seconds: float) -> dict[str, MeasuredCost]:
    """Costs of keys by their seconds."""
    return {key: MeasuredCost(time_s=s, workspace_nbytes=8, output_nbytes=4) for key, s in seconds.items()}


def measured() -> ScaledTimes:
    """One measured size."""
    scaled = ScaledTimes()
    work = {(0, 0): 100.0, (1, 0): 10.0, (2, 0): 0.0}
    scaled.remember("step", work, KEYS, costs(mm=2.0, relu=1.0, view=0.5), frozenset())
    return scaled


def test_times_follow_the_work() -> None:
    """Each by its own ratio; without any work the time stays."""
    work = {(0, 0): 150.0, (1, 0): 12.0, (2, 0): 0.0}
    found = measured().expected("step", work, KEYS)
    assert found == {
        "mm": Seconds(3.0, 0.0),
        "relu": Seconds(pytest.approx(1.2), 0.0),
        "view": Seconds(0.5, 0.0),
    }


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_size_that_is_far_is_measured(factor: float) -> None:
    """In either direction; and so is another step."""
    work = {(0, 0): 100.0 * factor, (1, 0): 10.0 * factor, (2, 0): 0.0}
    assert measured().expected("step", work, KEYS) == {}
    assert measured().expected("another", {(0, 0): 100.0}, KEYS) == {}


def test_scaled_times_are_not_scaled_again() -> None:
    """They are kept by key; the nearest of the measured sizes counts, of which the latest are kept."""
    scaled = measured()
    near = {(0, 0): 180.0, (1, 0): 18.0, (2, 0): 0.0}
    scaled.remember("step", near, KEYS, costs(mm=9.0, relu=9.0, view=9.0), frozenset({"mm"}))
    assert set(scaled.kept["step"]) == {"mm"}
    assert scaled.expected("step", near, KEYS)["mm"].run_s == pytest.approx(3.6)
    for i in range(2 * MOST_SIZES):
        scaled.remember("step", {(0, 0): 1000.0 + i}, KEYS, costs(mm=1.0), frozenset())
    assert len(scaled.sizes["step"]) == MOST_SIZES


def test_a_key_whose_time_is_known_runs_once(tmp_path: Path) -> None:
    """For its bytes; its time is at most that of the run, and is not saved."""
    now_s, runs = 0.0, 0

    def operator() -> torch.Tensor:
        nonlocal now_s, runs
        now_s += 1e-3
        runs += 1
        return torch.empty(100)

    cache = CostCache(folder=tmp_path)
    expected = {"aten.quick": Seconds(2e-4, 0.0), "aten.slow": Seconds(5.0, 0.0)}
    found = measure(
        {key: lambda: operator for key in expected}, cache=cache, clock=lambda: now_s, expected=expected
    )
    assert runs == len(expected)
    assert [cost.time_s for cost in found.values()] == [2e-4, pytest.approx(1e-3)]
    assert [cost.output_nbytes for cost in found.values()] == [400, 400]
    assert cache.get(expected) == {}
