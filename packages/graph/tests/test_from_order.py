"""`Schedule.from_order` makes the frees that an order determines."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import Compute, Free, Graph, Implementation, InvalidSchedule, Op, Schedule, Value, simulate
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.strategies import graphs, schedules


@settings(deadline=None, max_examples=200)
@given(graphs(), st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.3, 0.7)))
def test_a_valid_order_makes_a_valid_schedule(graph, seed, forget):
    """The referee accepts it, and the order can be read back."""
    order = random_order(graph, seed, forget=forget)
    schedule = Schedule.from_order(graph, order)
    simulate(graph, schedule)
    assert tuple(order) == schedule.order


@settings(deadline=None, max_examples=150)
@given(schedules(), st.data())
def test_a_later_free_is_never_better(case, data):
    """Delaying a free never lowers the peak."""
    graph, schedule = case
    steps = list(schedule.steps)
    frees = [i for i, step in enumerate(steps) if isinstance(step, Free)]
    position = data.draw(st.sampled_from(frees)) if frees else 0
    if not frees:
        return
    free = steps.pop(position)
    makers = [
        i
        for i in range(position, len(steps))
        if isinstance(steps[i], Compute)
        and free.value in graph.ops[steps[i].op].implementations[steps[i].implementation].outputs
    ]
    later = data.draw(st.integers(position, makers[0] if makers else len(steps)))
    steps.insert(later, free)
    boundary = schedule.boundary - (position < schedule.boundary) + (later < schedule.boundary - 1)
    delayed = Schedule(steps, min(max(boundary, 0), len(steps)))
    assert simulate(graph, schedule).peak_nbytes <= simulate(graph, delayed).peak_nbytes


@settings(deadline=None)
@given(schedules())
def test_recomputed_seconds_are_those_of_the_repeats(case):
    """Every run beyond an op's first counts, with the implementation that it used."""
    graph, schedule = case
    seen, expected = Counter(), 0.0
    for run in schedule.computes():
        expected += graph.ops[run.op].implementations[run.implementation].time_s if seen[run.op] else 0.0
        seen[run.op] += 1
    timeline = simulate(graph, schedule)
    assert expected == timeline.recomputed_s
    assert timeline.time_s == pytest.approx(
        sum(graph.ops[r.op].implementations[r.implementation].time_s for r in schedule.computes())
    )


def chain() -> Graph:
    ways = [Implementation(inputs=() if i == 0 else (i - 1,), outputs=(i,)) for i in range(3)]
    ops = [Op(name=f"f{i}", target="f", implementations=(ways[i],), rerun=0 if i else None) for i in range(3)]
    return Graph(name="chain", values=[Value(name=f"v{i}", nbytes=10) for i in range(3)], ops=ops)


def test_a_value_that_nothing_reads_goes_at_once():
    """It is freed directly after the op that makes it."""
    expected = (Compute(0), Compute(1), Free(0), Compute(2), Free(2), Free(1))
    schedule = Schedule.from_order(chain(), range(3))
    assert sorted(expected, key=repr) == sorted(schedule.steps, key=repr)
    assert 20 == simulate(chain(), schedule).peak_nbytes


@pytest.mark.parametrize(
    ("order", "problem"), [([0, 1, 0, 2], "only once"), ([0, 1, 3], "no op 3"), ([-1], "no op -1")]
)
def test_an_order_that_cannot_be_is_refused(order, problem):
    """A repeat that is not allowed, and an index that is not an op's."""
    with pytest.raises(InvalidSchedule, match=problem):
        Schedule.from_order(chain(), order)
