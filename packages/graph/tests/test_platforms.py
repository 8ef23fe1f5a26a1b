"""Platforms give seconds from FLOPs and bytes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from remat_graph import (
    BadFile,
    Links,
    Measured,
    OpCost,
    Platform,
    Roofline,
    UnknownPlatform,
    find_platform,
    get_platform,
    load_platform,
    platform_names,
    save_platform,
    with_platform,
)
from remat_graph.platforms.base import Flops, links_of, with_times
from remat_graph.platforms.data_sheets import h200
from remat_graph.platforms.measured import Measurement
from remat_graph.testing.random_graphs import random_graph


def test_flops_count_flops_alone() -> None:
    """Ratios of times are ratios of FLOPs, whatever bytes an op moves."""
    heavy, light = OpCost(flops=4e9, read_nbytes=10**12), OpCost(flops=1e9)
    assert 4.0 == Flops().time_s(heavy) / Flops().time_s(light)
    assert 0.0 == Flops().time_s(OpCost(read_nbytes=10**12, written_nbytes=10**12))


def test_a_roofline_takes_the_longer_and_launches() -> None:
    """Computing and moving overlap; the launch is added."""
    device = Roofline(flops_per_s=100, nbytes_per_s=10, launch_s=0.5)
    assert 2.5 == device.time_s(OpCost(flops=200, read_nbytes=5, written_nbytes=5))
    assert 3.5 == device.time_s(OpCost(flops=200, read_nbytes=10, written_nbytes=20))
    assert 0.5 == device.time_s(OpCost())


@pytest.mark.parametrize(
    "options", [{"flops_per_s": 0}, {"nbytes_per_s": -1}, {"launch_s": -1}, {"flops_per_s": math.nan}]
)
def test_rates_are_positive(options: dict[str, Any]) -> None:
    """Zero and negative rates are refused."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Roofline(**options)


def test_platforms_are_found_by_name() -> None:
    """Through the entry-point group, with options."""
    assert {"flops", "roofline"} <= set(platform_names())
    assert Flops() == get_platform("flops")
    assert Roofline(launch_s=1e-6) == get_platform("roofline", launch_s=1e-6)
    for name in platform_names():
        assert isinstance(get_platform(name), Platform)


def test_an_unknown_platform_names_the_known() -> None:
    """The message is one line."""
    with pytest.raises(
        UnknownPlatform, match=r"no cost platform 'abacus': choose one of .*h200-spec, .*roofline"
    ):
        get_platform("abacus")
    with pytest.raises(UnknownPlatform, match=r"no cost platform 'h1000-spec' \(did you mean h100-spec\?\)"):
        get_platform("h1000-spec")


def test_times_are_replaced_where_named() -> None:
    """All other times stay."""
    graph = random_graph(4)
    timed = with_times(graph, {(0, 0): 7.0})
    assert 7.0 == timed.ops[0].first.time_s
    assert graph.ops[1:] == timed.ops[1:]
    costs = {(i, 0): OpCost(flops=i) for i in range(len(graph.ops))}
    assert 2e-12 == with_platform(graph, costs, Flops()).ops[2].first.time_s


def measured(launch_s: Any = 1e-6) -> Measured:
    """A device of 100 FLOP/s and 10 B/s after a launch, on which `slow` takes three times as long."""
    device = Roofline(flops_per_s=100.0, nbytes_per_s=10.0, launch_s=launch_s)
    measurements = []
    for size in (0, 50, 100, 1000):
        for name, factor in (("mm", 1), ("add", 1), ("slow", 3)):
            flops = 1000.0 * size if name == "mm" else 0.0
            key, kind = f"{name}(float32[{size}])", "float32" if flops else ""
            cost = OpCost(flops=flops, read_nbytes=size, written_nbytes=size, key=key, arithmetic=kind)
            time_s = device.time_s(cost) * (factor if size else 1)
            measurements.append(Measurement(cost=cost, time_s=time_s, workspace_nbytes=size))
    return Measured(device="abacus", date="2026-11-22", versions={"torch": "2"}, measurements=measurements)


def test_what_was_measured_is_taken_and_the_rest_fitted() -> None:
    """Known keys are exact; others use the fitted rates and the slowdown of their name."""
    device = measured()
    for each in device.measurements.values():
        assert each.time_s == device.time_s(each.cost)
    unknown = {"flops": 5e4, "read_nbytes": 10, "written_nbytes": 10}
    assert 500.0 == pytest.approx(device.time_s(OpCost(**unknown, key="mm(float64[7])")), rel=1e-3)
    moved = OpCost(read_nbytes=700, written_nbytes=300)
    assert 100.0 == pytest.approx(device.time_s(attrs.evolve(moved, key="add(int8[1])")), rel=1e-3)
    assert 300.0 == pytest.approx(device.time_s(attrs.evolve(moved, key="again: slow(int8[1])")), rel=1e-3)
    assert 100.0 == pytest.approx(device.time_s(attrs.evolve(moved, key="other(int8[1])")), rel=1e-3)
    assert device.name == "abacus, measured 2026-11-22"


def test_a_platform_without_measurements_is_a_roofline() -> None:
    """Its rates are those of the corpus."""
    cost = OpCost(flops=1e12, read_nbytes=10**9)
    empty = Measured(device="none", date="2026-11-22", measurements=[])
    assert empty.time_s(cost) == Roofline().time_s(cost)


def test_a_platform_survives_its_file(tmp_path: Path) -> None:
    """It is equal when it is found by its path; names are found as before."""
    path = tmp_path / "abacus.json"
    save_platform(measured(), path)
    assert measured() == load_platform(path) == find_platform(str(path))
    assert find_platform("flops") == Flops()


def test_a_platform_may_have_links(tmp_path: Path) -> None:
    """They are found, or None; a file keeps measured ones."""
    expected = Links(to_host_nbytes_per_s=55e9, to_device_nbytes_per_s=55e9, host_nbytes_per_s=150e9)
    assert expected == links_of(h200())
    assert links_of(Roofline()) is None
    assert links_of(None) is None
    path = tmp_path / "abacus.json"
    save_platform(attrs.evolve(measured(), links=expected), path)
    assert expected == links_of(load_platform(path))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("measurements"), "'measurements' is missing"),
        (lambda d: d.update(format="remat-plan"), "its format is 'remat-plan', 'remat-platform' was wanted"),
        (lambda d: d.update(version=9), "version 9, newer than our 1"),
        (lambda d: d["measurements"]["mm(float32[0])"].update(time_s=-1), "a finite number from 0 to"),
        (lambda d: d["measurements"]["mm(float32[0])"].update(time_s=9e18), "no operator takes 9e\\+18 s"),
        (
            lambda d: d["measurements"]["mm(float32[0])"].update(time_s=5e-324),
            "no operator takes 4.94.*e-324 s",
        ),
        (
            lambda d: d["measurements"]["mm(float32[0])"].update(workspace_nbytes=2**63 - 1),
            "no device has 92",
        ),
        (lambda d: d["measurements"]["mm(float32[0])"].update(workspace_nbytes=2**63), "a whole number"),
        (
            lambda d: d["measurements"]["mm(float32[0])"].update(flops=1e-300),
            "no operator has 1e-300",
        ),
        (
            lambda d: [m.update(flops=1.0, time_s=1e6) for m in d["measurements"].values()],
            "no device takes 1e-06",
        ),
        (lambda d: d["measurements"].update(x=3), "an object was wanted"),
        (lambda d: d.update(links={"to_host_nbytes_per_s": 0}), "at least 0.001 bytes a second were wanted"),
        (lambda d: d.update(links={"to_host_nbytes_per_s": 1e-320}), "at least 0.001 bytes a second"),
        (lambda d: d.update(links={"to_moon": 1}), "links: unknown key 'to_moon'"),
        (lambda d: d["measurements"]["mm(float32[0])"].update(read_nbytes=2**60), "bytes were wanted"),
    ],
)
def test_a_bad_platform_file_is_one_line(tmp_path: Path, change: Callable[..., Any], problem: str) -> None:
    """The message names the file and the place."""
    path = tmp_path / "abacus.json"
    save_platform(measured(), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BadFile, match=problem) as caught:
        find_platform(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
