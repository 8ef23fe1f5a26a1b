"""The allocator holds more than the tensors: sizes are rounded up, and kernels need workspaces."""

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import Graph, Implementation, Op, Schedule, Value, simulate
from remat_graph.testing.strategies import schedules


def two(rounding: int, workspaces: tuple[int, int]) -> Graph:
    ways = [
        Implementation(inputs=(), outputs=(0,), workspace_nbytes=workspaces[0]),
        Implementation(inputs=(0,), outputs=(1,), workspace_nbytes=workspaces[1]),
    ]
    ops = [Op(name=f"f{i}", target="f", implementations=(way,)) for i, way in enumerate(ways)]
    values = [Value(name="a", nbytes=513), Value(name="b", nbytes=1)]
    return Graph(name="two", values=values, ops=ops, rounding_nbytes=rounding)


def test_each_storage_is_rounded_up():
    """The allocator's peak is rounded, the live peak is not."""
    timeline = simulate(two(512, (0, 0)), Schedule.from_order(two(512, (0, 0)), range(2)))
    assert (1024 + 512, 513 + 1) == (timeline.peak_nbytes, timeline.live_peak_nbytes)


def test_a_workspace_lives_while_its_op_runs():
    """It is added to the inputs and outputs of its own op only."""
    first, second = two(1, (10_000, 0)), two(1, (0, 10_000))
    for graph, expected, step in ((first, 513 + 10_000, 0), (second, 514 + 10_000, 1)):
        timeline = simulate(graph, Schedule.from_order(graph, range(2)))
        assert (expected, 514) == (timeline.peak_nbytes, timeline.live_peak_nbytes)
        assert step == timeline.peak_step


@settings(deadline=None)
@given(schedules(), st.sampled_from((1, 2, 512, 2**21)))
def test_rounding_never_lowers_a_peak(case, rounding):
    """It adds less than one granule per value."""
    graph, schedule = case
    rounded = attrs.evolve(graph, rounding_nbytes=rounding)
    exact, seen = simulate(attrs.evolve(graph, rounding_nbytes=1), schedule), simulate(rounded, schedule)
    assert exact.live_peak_nbytes == seen.live_peak_nbytes
    assert exact.live_peak_nbytes <= exact.peak_nbytes <= seen.peak_nbytes
    assert seen.peak_nbytes < exact.peak_nbytes + rounding * (len(graph.values) + 1)
