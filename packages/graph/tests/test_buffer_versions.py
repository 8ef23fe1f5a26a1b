"""A buffer that the model overwrites has versions; no op may read or write the wrong version."""

import pytest

from remat_graph import (
    Compute,
    Free,
    Graph,
    Implementation,
    InvalidSchedule,
    Op,
    Role,
    Schedule,
    Value,
    simulate,
)


def norms() -> Graph:
    """Two batch norms on one pair of statistics: versions 0, 1, 2; `peek` reads version 1."""
    values = [
        Value(name=f"stat{i}", nbytes=8, external=True, role=Role.BUFFER, replaces=i - 1 if i else None)
        for i in range(3)
    ]
    values += [Value(name=n, nbytes=100) for n in ("y0", "y1", "z")]

    def op(name: str, *ways: tuple[tuple[int, ...], tuple[int, ...]], rerun: int | None) -> Op:
        made = tuple(Implementation(inputs=reads, outputs=makes) for reads, makes in ways)
        return Op(name=name, target="f", implementations=made, rerun=rerun)

    ops = [
        op("norm0", ((0,), (3, 1)), ((), (3,)), rerun=1),
        op("peek", ((1,), (5,)), rerun=0),
        op("norm1", ((1, 3), (4, 2)), ((3,), (4,)), rerun=1),
        op("blind", ((), (5,)), rerun=0),
    ]
    return Graph(name="norms", values=values, ops=ops[:3])


def test_a_repeat_leaves_the_statistics_alone():
    """The implementation for repeats neither reads nor writes them."""
    graph = norms()
    schedule = Schedule.from_order(graph, [0, 1, 0, 2, 0, 2])
    assert [0, 0, 1, 0, 1, 1] == [run.implementation for run in schedule.computes()]
    simulate(graph, schedule)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([Compute(0), Compute(2), Compute(1)], "peek reads stat1, which has been overwritten"),
        ([Compute(1)], "peek reads stat1, which has not been written yet"),
        ([Compute(0), Free(3), Compute(0, 0)], "norm0 repeats implementation 0; only 1 may"),
    ],
)
def test_the_wrong_version_is_caught(steps, problem):
    """A read or write that is too early, too late, or repeated."""
    with pytest.raises(InvalidSchedule, match=problem):
        simulate(norms(), Schedule(steps, len(steps)))


def test_a_blind_write_keeps_its_place():
    """A write that reads nothing still follows the version it replaces, and happens once."""
    values = [
        Value(name=f"b{i}", nbytes=8, external=True, role=Role.BUFFER, replaces=i - 1 if i else None)
        for i in range(3)
    ]
    ops = [
        Op(name=f"set{i}", target="f", implementations=(Implementation(inputs=(), outputs=(i,)),))
        for i in (1, 2)
    ]
    graph = Graph(name="blind", values=values, ops=ops)
    simulate(graph, Schedule([Compute(0), Compute(1)], 2))
    with pytest.raises(InvalidSchedule, match="set2 writes b2 before b1"):
        simulate(graph, Schedule([Compute(1), Compute(0)], 2))
    with pytest.raises(InvalidSchedule, match="writes b1 a second time"):
        simulate(graph, Schedule([Compute(0), Compute(1), Compute(0)], 3))
