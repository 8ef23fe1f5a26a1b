"""Seconds from FLOPs and bytes."""

import math

import pytest

from remat_graph import (
    Flops,
    OpCost,
    Platform,
    Roofline,
    UnknownPlatform,
    get_platform,
    platform_names,
    with_platform,
    with_times,
)
from remat_graph.testing import random_graph


def test_flops_count_flops_alone():
    """Ratios of times are ratios of FLOPs, whatever else an op moves."""
    heavy, light = OpCost(flops=4e9, read_nbytes=10**12), OpCost(flops=1e9)
    assert 4.0 == Flops().time_s(heavy) / Flops().time_s(light)
    assert 0.0 == Flops().time_s(OpCost(read_nbytes=10**12, written_nbytes=10**12))


def test_a_roofline_takes_the_longer_and_launches():
    """Computing and moving overlap, the launch does not."""
    device = Roofline(flops_per_s=100, nbytes_per_s=10, launch_s=0.5)
    assert 2.5 == device.time_s(OpCost(flops=200, read_nbytes=5, written_nbytes=5))
    assert 3.5 == device.time_s(OpCost(flops=200, read_nbytes=10, written_nbytes=20))
    assert 0.5 == device.time_s(OpCost())


@pytest.mark.parametrize(
    "options", [{"flops_per_s": 0}, {"nbytes_per_s": -1}, {"launch_s": -1}, {"flops_per_s": math.nan}]
)
def test_rates_are_positive(options):
    """A device that does nothing per second is none."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Roofline(**options)


def test_platforms_are_found_by_name():
    """Through the entry-point group, with options."""
    assert {"flops", "roofline"} <= set(platform_names())
    assert Flops() == get_platform("flops")
    assert Roofline(launch_s=1e-6) == get_platform("roofline", launch_s=1e-6)
    for name in platform_names():
        assert isinstance(get_platform(name), Platform)


def test_an_unknown_platform_names_the_known():
    """One line."""
    with pytest.raises(UnknownPlatform, match=r"no cost platform 'abacus': choose one of .*flops, roofline"):
        get_platform("abacus")


def test_times_are_replaced_where_named():
    """Everything else stays."""
    graph = random_graph(4)
    timed = with_times(graph, {(0, 0): 7.0})
    assert 7.0 == timed.ops[0].first.time_s
    assert graph.ops[1:] == timed.ops[1:]
    costs = {(i, 0): OpCost(flops=i) for i in range(len(graph.ops))}
    assert 2e-12 == with_platform(graph, costs, Flops()).ops[2].first.time_s
