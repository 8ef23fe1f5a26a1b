"""An output that the caller drops lives to the end of the forward, and is an activation after that."""

import attrs
import pytest

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Graph,
    InvalidGraph,
    InvalidSchedule,
    Role,
    Schedule,
    Value,
    simulate,
    verify,
)
from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.small_graphs import small_graph
from remat_graph.training import with_dropped

LOGITS, LOSS, MASK = 1, 2, 3


def captured() -> Graph:
    """logits = f(w), loss = g(logits), mask = h(logits); the backward reads the logits and the mask."""
    values = [
        Value(name="w", nbytes=10, external=True, role=Role.PARAM),
        Value(name="logits", nbytes=100, role=Role.OUTPUT),
        Value(name="loss", nbytes=4, role=Role.OUTPUT),
        Value(name="mask", nbytes=30),
        Value(name="t", nbytes=4, role=Role.TANGENT, of=LOSS),
        Value(name="d", nbytes=100),
        Value(name="dw", nbytes=10, role=Role.GRAD, of=0),
    ]
    ops = [
        ((0,), (LOGITS,)),
        ((LOGITS,), (LOSS,)),
        ((LOGITS,), (MASK,)),
        ((4, LOGITS, MASK), (5,)),
        ((0, 5), (6,)),
    ]
    return small_graph("step", values, ops, names=("f", "g", "h", "g_back", "f_back"), forward=3)


def dropped() -> Graph:
    """The same, without the logits for the caller."""
    return with_dropped(captured(), [LOGITS])


def test_the_last_op_of_the_forward_reads_it_after_all_others() -> None:
    """Ops that do not lead to it are tied to that op by values without bytes."""
    graph = dropped()
    verify(graph)
    assert [op.name for op in graph.ops] == ["f", "g", "h", "return_outputs", "g_back", "f_back"]
    read = [graph.values[v].name for v in graph.ops[3].first.inputs]
    assert read == ["logits", "h_ran", "g_ran"]
    assert graph.dropped == (LOGITS,)
    assert graph.outputs == (LOSS,)


def test_it_counts_to_its_last_use_and_not_to_the_end() -> None:
    """Kept, the logits and their gradient and the mask add up; dropped, the logits may be freed."""
    for graph, logits_nbytes in ((captured(), 100), (dropped(), 0)):
        schedule = Schedule.unplanned(graph)
        timeline = simulate(graph, schedule)
        assert 100 + 4 + 30 + 4 + 100 == timeline.peak_nbytes  # the backward reads them too
        last = schedule.steps.index(Compute(len(graph.ops) - 1))
        assert logits_nbytes + 4 + 100 + 10 == timeline.during_nbytes[last]
        assert logits_nbytes + 4 + 10 == timeline.live_nbytes[-1]


def test_it_may_be_recomputed_instead_of_kept() -> None:
    """Then it is not there when the backward begins."""
    graph = dropped()
    schedule = Schedule.from_order(graph, (0, 1, 2, 3, 0, 4, 5))
    at = schedule.steps.index(Free(LOGITS))
    assert at < schedule.boundary
    assert 4 + 30 == simulate(graph, schedule).live_nbytes[schedule.boundary - 1]


def test_it_may_not_be_freed_before_the_forward_ends() -> None:
    """The caller would get nothing."""
    graph = dropped()
    steps = [Compute(0), Compute(1), Compute(2), Free(LOGITS), Compute(3)]
    with pytest.raises(InvalidSchedule, match="return_outputs reads logits, which is not live"):
        simulate(graph, Schedule(steps, 5))
    loose = small_graph(
        "loose",
        [
            Value(name="y", nbytes=8, role=Role.DROPPED),
            Value(name="z", nbytes=8, role=Role.OUTPUT),
            Value(name="g", nbytes=8, role=Role.GRAD),
        ],
        [((), (0,)), ((), (1,)), ((), (2,))],
        forward=2,
    )
    with pytest.raises(InvalidSchedule, match="output y is not live when the forward ends"):
        simulate(loose, Schedule([Compute(0), Free(0), Compute(1), Compute(2), Deliver(2)], 3))
    with pytest.raises(InvalidGraph, match="not read by a last forward op that runs once"):
        verify(loose)


def test_an_op_that_could_run_after_the_last_one_is_refused() -> None:
    """Where the order of the graph is the only reason why an op is not the last."""
    graph = dropped()
    ops = list(graph.ops)
    last = ops[3]
    alone = attrs.evolve(last.first, inputs=(LOGITS,))
    ops[3] = attrs.evolve(last, implementations=(alone,))
    with pytest.raises(InvalidGraph, match="h: may run after the forward's last op"):
        verify(attrs.evolve(graph, ops=tuple(ops)))


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_drop_outputs(seed: int) -> None:
    """Graphs and random orders on them are valid; the file gives the same graph."""
    graph = random_graph(seed, seed % 9 + 3, dropped=True)
    again = graph_from_data(graph_to_data(graph))
    assert (graph.values, graph.ops) == (again.values, again.ops)
    verify(graph)
    for variant in range(4):
        order = random_order(graph, seed + 100 * variant, forget=variant * 0.2)
        verify(graph, Schedule.from_order(graph, order))
