"""Times from other sizes: between two that are near each other, of the same operator, else none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from remat_executor.costs.device_timer import Seconds
from remat_executor.costs.measure import measure
from remat_executor.costs.times_by_size import MOST_APART, NEAR, TimesBySize
from remat_graph import OpCost


def key(rows: int, operator: str = "aten.relu.default") -> str:
    return f"{operator}(float32[{rows}, 64][64, 1]@cpu) on cpu"


def cost(rows: int) -> OpCost:
    return OpCost(read_nbytes=256 * rows, written_nbytes=256 * rows, key=key(rows))


def with_times(times: dict[int, float], device: str = "cpu") -> TimesBySize:
    sizes = TimesBySize.on(device)
    for rows, run_s in times.items():
        sizes.add(sizes.kind("layer", key(rows)), cost(rows), Seconds(run_s, 1e-6))
    return sizes


def estimated_s(
    sizes: TimesBySize, rows: int, layer: str = "layer", operator: str = "aten.relu.default"
) -> float:
    found = sizes.estimate(sizes.kind(layer, key(rows, operator)), cost(rows))
    return -1.0 if found is None else found.run_s


def test_between_two_sizes() -> None:
    """Exact for a power of the work, and for a size that is known."""
    sizes = with_times({100: 100.0**1.5, 300: 300.0**1.5})
    for rows in (100, 150, 299, 300):
        assert estimated_s(sizes, rows) == pytest.approx(rows**1.5, rel=1e-9)


def test_the_nearest_sizes_count() -> None:
    """Of several, those just below and above."""
    sizes = with_times({100: 1.0, 200: 8.0, 400: 9.0})
    assert 8.0 < estimated_s(sizes, 300) < 9.0


def test_too_far_apart_or_outside() -> None:
    """Nothing is said of these; a size that is nearly the same is enough alone."""
    far = int(100 * MOST_APART) + 100
    assert estimated_s(with_times({100: 1.0, far: 2.0}), 300) == -1.0
    sizes = with_times({1000: 3.0})
    assert estimated_s(sizes, 1200) == estimated_s(sizes, 500) == -1.0
    near = int(1000 * NEAR)
    assert estimated_s(sizes, near) == pytest.approx(3.0 * near / 1000)


def test_other_operators() -> None:
    """The layer, the operator, and its place among alike ones are kept apart."""
    sizes = with_times({100: 1.0, 200: 2.0})
    assert estimated_s(sizes, 150) > 0
    assert estimated_s(sizes, 150, layer="other") == -1.0
    assert estimated_s(sizes, 150, operator="aten.tanh.default") == -1.0
    kind = sizes.kind("layer", key(150))
    assert sizes.estimate(kind._replace(place=1), cost(150)) is None


def test_dtypes_and_names_are_no_sizes() -> None:
    """A number within a word stays."""
    sizes = TimesBySize.on("cpu")
    one, other = (f"aten.conv2d.default({dtype}[4, 8]@cpu) on cpu" for dtype in ("float32", "float16"))
    assert sizes.kind("", one) != sizes.kind("", other)
    assert sizes.kind("", one) == sizes.kind("", one.replace("4, 8", "5, 9"))


def test_powers_of_two_on_an_accelerator() -> None:
    """Its kernels for them are others."""
    sizes = with_times({96: 1.0, 160: 2.0}, "cuda")
    assert estimated_s(sizes, 128) > 0
    assert estimated_s(sizes, 120) == estimated_s(sizes, 127) == -1.0


def test_times_of_zero() -> None:
    """They have no logarithm."""
    assert estimated_s(with_times({100: 0.0, 200: 2.0}), 150) == pytest.approx(2.0 * 0.585, rel=1e-2)


def test_an_estimate_replaces_the_timing_alone() -> None:
    """Bytes are measured in one run; the cache gets nothing."""
    runs: list[int] = []

    def request() -> Callable[[], object]:
        x = torch.randn(1000)

        def run() -> object:
            runs.append(1)
            return torch.relu(x)

        return run

    found = measure({"aten.relu": request}, estimates={"aten.relu": Seconds(7.0, 0.5)})["aten.relu"]
    assert (found.time_s, found.issue_s, found.output_nbytes, len(runs)) == (7.0, 0.5, 4000, 1)
    assert measure({"aten.relu": request})["aten.relu"].time_s < 1.0
