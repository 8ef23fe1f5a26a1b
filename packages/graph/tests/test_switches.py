"""Switches: parts of a step that run in another way, together."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations

import attrs
import pytest

from remat_graph import (
    Alternative,
    Compute,
    ForeignPlan,
    Graph,
    Implementation,
    InvalidGraph,
    InvalidSchedule,
    Op,
    Plan,
    Schedule,
    Specialized,
    Timeline,
    Value,
    decide,
    fingerprint,
    relaxed,
    simulate,
    specialize,
    switches_on,
    verify,
)
from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.switches import data_flow
from remat_graph.switches.conflicts import compatible, conflicting, conflicts
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_switches import NOTHING, with_random_switches


def head() -> Graph:
    """x -> wide -> loss, and backward; the switch computes `wide` inside its two readers."""
    values = [
        Value(name="x", nbytes=100),
        Value(name="wide", nbytes=1000),
        Value(name="loss", nbytes=4, role="output"),
        Value(name="grad", nbytes=100, role="grad"),
    ]

    def op(name: str, first: Implementation, other: Implementation | None, *, backward: bool = False) -> Op:
        if other is None:
            return Op(name=name, target=name, backward=backward, implementations=[first])
        way = Alternative(switch="head.wide", first=1, again=1)
        return Op(
            name=name, target=name, backward=backward, implementations=[first, other], alternatives=[way]
        )

    def run(
        inputs: list[int], outputs: list[int], time_s: float, workspace_nbytes: int = 0
    ) -> Implementation:
        return Implementation(
            inputs=inputs, outputs=outputs, time_s=time_s, workspace_nbytes=workspace_nbytes
        )

    ops = [
        op("make", run([], [0], 1), None),
        op("widen", run([0], [1], 2), run([], [], 0)),
        op("lose", run([1], [2], 1), run([0], [2], 3, 50)),
        op("back", run([1], [3], 1), run([0], [3], 3, 50), backward=True),
    ]
    return Graph(name="head", values=values, ops=ops)


def both() -> tuple[Schedule, Schedule]:
    """The unplanned schedules with the switch off and on."""
    graph = head()
    decided = specialize(graph, ["head.wide"])
    return Schedule.unplanned(graph), decided.restore(Schedule.unplanned(decided.graph))


def test_a_switch_takes_less_memory_and_more_time() -> None:
    """The wide value is never made."""
    off, on = (simulate(head(), schedule) for schedule in both())
    assert (1104, 5.0) == (off.peak_nbytes, off.time_s)
    assert (254, 7.0, 0.0) == (on.peak_nbytes, on.time_s, on.recomputed_s)


def test_a_plan_knows_its_switches_and_what_they_cost() -> None:
    """Its overhead counts them, and a saved plan comes back whole."""
    graph, (_, on) = head(), both()
    plan = Plan.from_schedule(graph, on, budget_nbytes=300, lower_bound_s=6.0, solver="tester")
    assert ("head.wide",) == plan.switched
    assert (2.0, 0.0) == (plan.switched_s, plan.recomputed_s)
    assert 0.4 == pytest.approx(plan.overhead)
    assert 0.2 == pytest.approx(plan.lower_bound_overhead)
    said = "0 repeated ops cost +0.00%, other ways +40.00%; no plan is below +20.00%"
    assert said in plan.summary()
    assert "other ways to run ops: head (1)" in plan.summary()
    data = json.loads(json.dumps(plan_to_data(plan)))
    assert plan == plan_from_data(data)
    assert plan == plan_from_data(data, graph=graph)
    assert {"head.wide"} == switches_on(graph, on)


def test_plans_of_the_graph_without_switches_load() -> None:
    """As saved by a version that knew none; a plan of another graph does not."""
    graph = head()
    before = specialize(graph, ()).graph
    schedule = Schedule.unplanned(before)
    plan = Plan.from_schedule(before, schedule, budget_nbytes=2000, lower_bound_s=5.0, solver="tester")
    read = plan_from_data(json.loads(json.dumps(plan_to_data(plan))), graph=graph)
    assert fingerprint(graph) == read.fingerprint
    assert (plan.schedule, plan.peak_nbytes, ()) == (read.schedule, read.peak_nbytes, read.switched)
    on = specialize(graph, graph.switches).graph
    other = Plan.from_schedule(
        on, Schedule.unplanned(on), budget_nbytes=2000, lower_bound_s=5.0, solver="tester"
    )
    with pytest.raises(ForeignPlan):
        plan_from_data(json.loads(json.dumps(plan_to_data(other))), graph=graph)


def test_a_faster_way_makes_the_overhead_negative() -> None:
    """And the bound below zero counts too."""
    graph = head()
    quick = [
        attrs.evolve(
            op, implementations=[attrs.evolve(run, time_s=run.time_s / 4) for run in op.implementations]
        )
        if op.name == "lose"
        else op
        for op in graph.ops
    ]
    fast = attrs.evolve(
        graph,
        ops=[
            attrs.evolve(op, implementations=[op.first, attrs.evolve(op.implementations[1], time_s=0.25)])
            if op.alternatives
            else op
            for op in quick
        ],
    )
    decided = specialize(fast, fast.switches)
    on = decided.restore(Schedule.unplanned(decided.graph))
    plan = Plan.from_schedule(
        fast, on, budget_nbytes=300, lower_bound_s=relaxed(fast).time_s, solver="tester"
    )
    assert plan.overhead < 0
    assert plan.lower_bound_overhead <= plan.overhead
    assert plan == plan_from_data(json.loads(json.dumps(plan_to_data(plan))), graph=fast)


@pytest.mark.parametrize("mixed", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_ops_of_a_switch_agree(mixed: tuple[int, int, int]) -> None:
    """A schedule with one op in the old way and one in the new is refused, whatever it frees."""
    widen, lose, back = mixed
    steps = [Compute(0), Compute(1, widen), Compute(2, lose), Compute(3, back)]
    with pytest.raises(InvalidSchedule):
        simulate(head(), Schedule(steps, 3))


def test_repeats_run_as_the_switch_says() -> None:
    """An op in its other way is not repeated in the first one."""
    steps = [Compute(0), Compute(1, 1), Compute(1, 0)]
    with pytest.raises(InvalidSchedule, match="widen repeats implementation 0; only 1 may repeat"):
        simulate(head(), Schedule(steps, 3))


def test_first_runs_do_not_use_what_only_repeats() -> None:
    """Where an op has alternatives, its first runs are those of the switches."""
    graph = head()
    lose = attrs.evolve(
        graph.ops[2], implementations=[*graph.ops[2].implementations, graph.ops[2].first], rerun=2
    )
    graph = attrs.evolve(graph, ops=[*graph.ops[:2], lose, graph.ops[3]])
    with pytest.raises(InvalidSchedule, match="lose first runs implementation 2, which is only for repeats"):
        simulate(graph, Schedule([Compute(0), Compute(1), Compute(2, 2)], 3))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"alternatives": [Alternative(switch="head.wide", first=2)]}, "has no implementation 2"),
        ({"alternatives": [Alternative(switch="head.wide", first=1, again=7)]}, "has no implementation 7"),
        ({"alternatives": [Alternative(switch="head.wide", first=0)]}, "a first run of its own"),
        ({"alternatives": [Alternative(switch="", first=1)]}, "needs a name"),
        ({"alternatives": [Alternative(switch="a", first=1)] * 2}, "two alternatives for one switch"),
        ({"alternatives": []}, "back: reads wide before anything makes it"),
    ],
)
def test_broken_switches_are_refused(change: dict[str, object], problem: str) -> None:
    """Also one that leaves a reader without what it reads."""
    graph = head()
    at = 3 if change["alternatives"] == [] else 2
    ops = [attrs.evolve(op, **change) if i == at else op for i, op in enumerate(graph.ops)]
    with pytest.raises(InvalidGraph, match=problem):
        verify(attrs.evolve(graph, ops=ops))


def test_unknown_and_conflicting_switches_are_refused() -> None:
    """By name."""
    graph = head()
    with pytest.raises(ValueError, match="no switch 'tail'"):
        specialize(graph, ["tail"])
    lose = graph.ops[2]
    second = Alternative(switch="other.lose", first=2, again=2)
    more = attrs.evolve(
        lose,
        implementations=[*lose.implementations, lose.first],
        alternatives=[*lose.alternatives, second],
    )
    graph = attrs.evolve(graph, ops=[*graph.ops[:2], more, graph.ops[3]])
    assert conflicting(graph, graph.switches)
    assert not conflicting(graph, ["other.lose"])
    with pytest.raises(ValueError, match=r"lose is changed by 'head\.wide' and by 'other\.lose'"):
        specialize(graph, graph.switches)


@pytest.mark.parametrize("seed", range(60))
def test_random_switches(seed: int) -> None:
    """Every combination is a graph of its own whose schedules the original accepts; files keep all of it."""
    graph = with_random_switches(random_graph(seed, 6), seed)
    verify(graph)
    read = graph_from_data(json.loads(json.dumps(graph_to_data(graph))))
    assert graph.ops == read.ops
    assert fingerprint(graph) == fingerprint(read)
    if graph.switches:
        assert fingerprint(graph) != fingerprint(specialize(graph, ()).graph)
    least = relaxed(graph)
    verify(least)
    for on in subsets(graph):
        if conflicting(graph, on):
            continue
        decided = specialize(graph, on)
        verify(decided.graph)
        order = random_order(decided.graph, seed)
        own = Schedule.from_order(decided.graph, order)
        schedule = decided.restore(own)
        assert frozenset(on) == switches_on(graph, schedule)
        assert without_voids(simulate(graph, schedule), schedule, decided) == simulate(decided.graph, own)
        # What the relaxed graph allows is at least as fast and as small.
        assert least.time_s <= decided.graph.time_s


def subsets(graph: Graph) -> Iterator[tuple[str, ...]]:
    """All sets of switches."""
    return chain.from_iterable(combinations(graph.switches, n) for n in range(len(graph.switches) + 1))


def without_voids(timeline: Timeline, schedule: Schedule, decided: Specialized) -> Timeline:
    """The timeline without the steps of ops that run nothing."""
    void = {each.run for each in decided.voids}
    kept = [n for n, step in enumerate(schedule.steps) if step not in void]
    per_step = ("live_nbytes", "during_nbytes", "host_nbytes")
    shorter = {name: tuple(getattr(timeline, name)[n] for n in kept) for name in per_step}
    return attrs.evolve(timeline, peak_step=bisect_left(kept, timeline.peak_step), **shorter)


@pytest.mark.parametrize("seed", range(40))
def test_switches_conflict_where_their_graph_is_broken(seed: int) -> None:
    """And only there."""
    graph = with_random_switches(random_graph(seed, 6), seed, most=6)
    for on in subsets(graph):
        try:
            verify(specialize(graph, on).graph)
        except (ValueError, InvalidGraph):
            broken = True
        else:
            broken = False
        assert broken == conflicting(graph, on), on


def test_a_switch_conflicts_with_one_that_removes_what_it_reads() -> None:
    """They change different ops."""
    graph = head()
    make, widen, lose, back = graph.ops
    slower = attrs.evolve(make.first, time_s=2)
    way = Alternative(switch="other.make", first=1, again=1)
    make = attrs.evolve(make, implementations=[make.first, slower], alternatives=[way])
    reads_wide = Implementation(inputs=[1], outputs=[4])
    end = Op(
        name="end", target="end", backward=True, implementations=[NOTHING, reads_wide], alternatives=[way]
    )
    values = [*graph.values, Value(name="extra", nbytes=8)]
    graph = attrs.evolve(graph, values=values, ops=[make, widen, lose, back, end])
    verify(graph)
    assert {"head.wide"} == conflicts(graph)["other.make"]
    assert {"other.make"} == compatible(conflicts(graph), ["other.make", "head.wide"])
    with pytest.raises(InvalidGraph, match="end: reads wide before anything makes it"):
        verify(specialize(graph, graph.switches).graph)


def test_random_switches_are_of_every_kind() -> None:
    """Several on one graph, of all families, some in conflict; else the tests above would show little."""
    graphs = [with_random_switches(random_graph(seed, 6), seed) for seed in range(60)]
    families = Counter(switch.partition(".")[0] for graph in graphs for switch in graph.switches)
    assert {"fused", "other", "mask", "split"} == families.keys()
    assert min(families.values()) >= 10
    assert sum(len(graph.switches) > 2 for graph in graphs) > 30
    assert sum(conflicting(graph, graph.switches) for graph in graphs) > 5


@pytest.mark.parametrize("seed", range(12))
def test_added_ops_and_values_leave_old_plans_valid(seed: int) -> None:
    """A plan of the graph before there were switches is one of all off, and its bound is that of any."""
    before = random_graph(seed, 6)
    graph = with_random_switches(before, seed)
    assert fingerprint(before) == fingerprint(specialize(graph, ()).graph)
    schedule = Schedule.from_order(before, random_order(before, seed))
    peak_nbytes = simulate(before, schedule).peak_nbytes
    plan = Plan.from_schedule(
        before, schedule, budget_nbytes=peak_nbytes, lower_bound_s=before.time_s, solver="tester"
    )
    read = plan_from_data(json.loads(json.dumps(plan_to_data(plan))), graph=graph)
    assert fingerprint(graph) == read.fingerprint
    assert (plan.peak_nbytes, plan.time_s, ()) == (read.peak_nbytes, read.time_s, read.switched)
    assert relaxed(graph).time_s == read.lower_bound_s


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ({"inputs": [2], "outputs": [4]}, "added: reads loss before anything makes it, with 'more' on"),
        ({"inputs": [0], "outputs": [1]}, "widen: makes wide, which added makes, with 'more' on"),
    ],
)
def test_added_ops_are_checked(run: dict[str, list[int]], problem: str) -> None:
    """With their switch on."""
    graph = head()
    added = Op(
        name="added",
        target="added",
        implementations=[NOTHING, Implementation(inputs=run["inputs"], outputs=run["outputs"])],
        alternatives=[Alternative(switch="more", first=1)],
    )
    values = [*graph.values, Value(name="extra", nbytes=8)]
    graph = attrs.evolve(graph, values=values, ops=[graph.ops[0], added, *graph.ops[1:]])
    with pytest.raises(InvalidGraph, match=problem):
        verify(graph)


def test_a_switch_leaves_no_buffer_unwritten() -> None:
    """A caller's tensor that the step writes is written whatever is on."""
    values = [
        Value(name="mean", nbytes=4, role="buffer", external=True),
        Value(name="new_mean", nbytes=4, role="buffer", external=True, replaces=0),
        Value(name="loss", nbytes=4, role="output"),
    ]
    op = Op(
        name="norm",
        target="norm",
        rerun=None,
        implementations=[
            Implementation(inputs=[0], outputs=[1, 2]),
            Implementation(inputs=[0], outputs=[2]),
        ],
        alternatives=[Alternative(switch="quiet", first=1)],
    )
    with pytest.raises(InvalidGraph, match="new_mean: must be made by a first implementation, with 'quiet'"):
        verify(Graph(name="norm", values=values, ops=[op]))


def test_a_switch_costs_what_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To verify 100 small switches looks at few more reads than to verify none."""
    looked = 0
    check = data_flow._Decision.problem_of

    def counted(self: data_flow._Decision, op: int, value: int, *, first: bool) -> str | None:
        nonlocal looked
        looked += 1
        return check(self, op, value, first=first)

    monkeypatch.setattr(data_flow._Decision, "problem_of", counted)
    graph = random_graph(0, 400)
    verify(graph)
    without, looked = looked, 0
    switched = with_random_switches(graph, 0, most=100)
    verify(switched)
    assert len(switched.switches) == 100
    assert looked < 3 * without


def outputs(graph: Graph) -> set[int]:
    return {v for op in graph.ops for run in op.implementations for v in run.outputs}


@pytest.mark.parametrize("seed", range(12))
def test_decisions_one_by_one_are_those_at_once(seed: int) -> None:
    """All switches decided, the graph has the ops of the specialized one; what is not decided stays."""
    graph = with_random_switches(random_graph(seed, 10), seed, most=5)
    on = compatible(conflicts(graph), graph.switches[::2])
    made, off = graph, set(graph.switches) - on
    for switch in graph.switches:
        if switch in made.switches:  # none of an op that another switch changes is left
            chosen = {switch} & on
            made = decide(made, chosen, {switch} - chosen)
        assert switch not in made.switches
        assert set(made.switches) <= set(graph.switches)
    at_once = specialize(graph, on).graph
    assert made.ops == at_once.ops == decide(graph, on, off).ops
    gone = outputs(graph) - outputs(at_once)
    for v, (value, same) in enumerate(zip(made.values, at_once.values, strict=False)):
        assert value == (attrs.evolve(same, nbytes=0) if v in gone else same)
    assert decide(graph, (), ()).values == graph.values


def test_only_switches_of_the_graph_are_decided() -> None:
    graph = with_random_switches(random_graph(0, 10), 0, most=5)
    for on, off in ((("none",), ()), ((), ("none",))):
        with pytest.raises(ValueError, match="no switch"):
            decide(graph, on, off)
