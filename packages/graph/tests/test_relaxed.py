"""Whatever a decision of the switches allows, the relaxed graph allows, as fast and as small."""

from collections.abc import Iterator
from itertools import chain, combinations

import attrs
import pytest

from remat_graph import (
    Alternative,
    Compute,
    Graph,
    Implementation,
    Op,
    Role,
    Schedule,
    Specialized,
    Value,
    relaxed,
    simulate,
    specialize,
    verify,
)
from remat_graph.switches.conflicts import conflicting
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_switches import NOTHING, with_random_switches


def split_graph(*, in_place: bool = False) -> Graph:
    """A backward op that makes dx and dw; its switch makes dw by an added op."""
    values = [
        Value(name="x", nbytes=100),
        Value(name="loss", nbytes=0, role="output"),
        Value(name="grad", nbytes=100),
        Value(name="dx", nbytes=100),
        Value(name="dw", nbytes=40, role="grad"),
        Value(name="end", nbytes=0, role="grad"),
    ]
    both = Implementation(
        inputs=[0, 2], outputs=[3, 4], time_s=4, workspace_nbytes=30, reuses=[(3, 2)] if in_place else ()
    )
    one = Implementation(inputs=[2], outputs=[3], time_s=3, workspace_nbytes=10)
    other = Implementation(inputs=[0, 2], outputs=[4], time_s=2, workspace_nbytes=20)
    way = Alternative(switch="split.back", first=1, again=1)

    def op(name: str, *runs: Implementation, backward: bool = True, switched: bool = False) -> Op:
        return Op(
            name=name,
            target=name,
            backward=backward,
            implementations=runs,
            alternatives=[way] if switched else [],
        )

    ops = [
        op("make", Implementation(inputs=[], outputs=[0], time_s=1), backward=False),
        op("lose", Implementation(inputs=[0], outputs=[1], time_s=1), backward=False),
        op("seed", Implementation(inputs=[], outputs=[2], time_s=1)),
        op("back", both, one, switched=True),
        op("added", NOTHING, other, switched=True),
        op("last", Implementation(inputs=[3], outputs=[5], time_s=1)),
    ]
    return Graph(name="split", values=values, ops=ops)


def subsets(graph: Graph) -> Iterator[tuple[str, ...]]:
    """All sets of switches that can be on together."""
    every = chain.from_iterable(combinations(graph.switches, n) for n in range(len(graph.switches) + 1))
    return (on for on in every if not conflicting(graph, on))


def carried_over(graph: Graph, decided: Specialized, order: list[int], least: Graph) -> list[int]:
    """The sequence in the relaxed graph: an added op that runs nothing comes before the op in its place."""
    place = {op.name: n for n, op in enumerate(least.ops)}
    sequence: list[int] = []
    seen: set[int] = set()
    voids = [void.run.op for void in decided.voids if graph.ops[void.run.op].name in place]
    made_by = {
        i: {v for run in least.ops[place[graph.ops[i].name]].implementations for v in run.outputs}
        for i in voids
    }
    for n in order:
        op = decided.graph.ops[n]
        run = op.first if n not in seen or op.rerun is None else op.implementations[op.rerun]
        for i in voids:
            pinned = n in seen and all(graph.values[v].pinned for v in made_by[i])
            if not made_by[i].isdisjoint(run.outputs) and not pinned:
                sequence.append(place[graph.ops[i].name])
        if op.name in place:
            sequence.append(place[op.name])
        seen.add(n)
    missing = [n for n in range(len(least.ops)) if n not in sequence]  # they run nothing here
    forward = [n for n in missing if not least.ops[n].backward]
    return [*forward, *sequence, *(n for n in missing if least.ops[n].backward)]


@pytest.mark.parametrize("seed", range(80))
def test_every_schedule_of_every_decision_is_possible(seed: int) -> None:
    """It takes no longer there, and its peak is no higher."""
    graph = with_random_switches(random_graph(seed, 7), seed, most=5)
    least = relaxed(graph)
    verify(least)
    for on in subsets(graph):
        decided = specialize(graph, on)
        order = random_order(decided.graph, seed)
        there = simulate(decided.graph, Schedule.from_order(decided.graph, order))
        here = simulate(least, Schedule.from_order(least, carried_over(graph, decided, order, least)))
        assert here.time_s <= there.time_s
        assert here.peak_nbytes <= there.peak_nbytes


def test_an_added_op_keeps_its_reads() -> None:
    """So the bound knows that x is read, whichever op reads it; its time is that of the faster decision."""
    graph = split_graph()
    verify(graph)
    least = relaxed(graph)
    back, added = least.ops[3:5]
    assert ((2,), (3,)) == (back.first.inputs, back.first.outputs)
    assert ((0, 2), (4,), 0) == (added.first.inputs, added.first.outputs, added.first.workspace_nbytes)
    assert graph.time_s == least.time_s == 8


def test_an_added_op_does_not_read_what_the_other_overwrites() -> None:
    """With the switch off it runs first, and then the other op still overwrites its input."""
    graph = split_graph(in_place=True)
    least = relaxed(graph)
    assert (0,) == least.ops[4].first.inputs
    order = [0, 1, 2, 4, 3, 5]
    peak = simulate(graph, Schedule.unplanned(graph)).peak_nbytes
    assert simulate(least, Schedule.from_order(least, order)).peak_nbytes <= peak


def test_values_that_no_added_op_makes_have_no_bytes() -> None:
    """Here the other op makes one more value of its own."""
    graph = split_graph()
    own = attrs.evolve(graph.ops[4].implementations[0], outputs=[6])
    added = attrs.evolve(
        graph.ops[4], implementations=[own, attrs.evolve(graph.ops[4].implementations[1], outputs=[4, 6])]
    )
    values = [*graph.values, Value(name="own", nbytes=8)]
    graph = attrs.evolve(graph, values=values, ops=[*graph.ops[:4], added, graph.ops[5]])
    verify(graph)
    least = relaxed(graph)
    verify(least)
    assert (0, Role.GRAD) == (least.values[4].nbytes, least.values[4].role)
    assert Compute(0) in Schedule.unplanned(least).steps


def test_a_switch_saves_no_more_than_it_does_as_a_whole() -> None:
    """One that makes one op faster and another slower saves the difference; one that costs saves nothing."""
    graph = split_graph()
    fast = attrs.evolve(graph.ops[3].implementations[1], time_s=1)
    back = attrs.evolve(graph.ops[3], implementations=[graph.ops[3].first, fast])
    quick = attrs.evolve(graph, ops=[*graph.ops[:3], back, *graph.ops[4:]])
    assert 8 == relaxed(graph).time_s
    assert 7 == relaxed(quick).time_s == specialize(quick, quick.switches).graph.time_s
