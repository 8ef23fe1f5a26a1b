"""Plans say which layers they recompute and which ops run in another way; layers change nothing else."""

import json

import attrs
import pytest

from remat_graph import (
    Alternative,
    BadFile,
    Graph,
    Implementation,
    Op,
    Plan,
    Role,
    Schedule,
    Value,
    fingerprint,
    simulate,
    specialize,
)
from remat_graph.layers.names import Patterns, cut, depth_for, enclosing, folded
from remat_graph.layers.recomputed import layer_groups
from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_switches import with_random_switches


def run(inputs: list[int], outputs: list[int], time_s: float = 1.0) -> Implementation:
    return Implementation(inputs=inputs, outputs=outputs, time_s=time_s)


def blocks(count: int = 3, block: str = "model.blocks.{}.mlp") -> Graph:
    """A chain of blocks and a loss outside of them: block i reads value i and makes value i + 1."""
    values = [Value(name="x", nbytes=0, external=True)]
    values += [Value(name=f"a{i}", nbytes=100 * (i + 1)) for i in range(count)]
    values.append(Value(name="loss", nbytes=4, role=Role.OUTPUT))
    values.append(Value(name="tangent", nbytes=0, role=Role.TANGENT, of=count + 1))
    ops = [
        Op(name=f"f{i}", target="f", layer=block.format(i), implementations=[run([i], [i + 1], 1.0 + i)])
        for i in range(count)
    ]
    ops.append(Op(name="loss", target="sum", implementations=[run([count], [count + 1])]))
    gradient = count + 2
    for i in reversed(range(count)):
        values.append(Value(name=f"d{i}", nbytes=8))
        backward = run([i + 1, gradient], [len(values) - 1])
        layer = block.format(i)
        ops.append(Op(name=f"b{i}", target="b", layer=layer, backward=True, implementations=[backward]))
        gradient = len(values) - 1
    return Graph(name="blocks", values=values, ops=ops)


def planned(graph: Graph, order: list[int]) -> Plan:
    schedule = Schedule.from_order(graph, order)
    peak = simulate(graph, schedule).peak_nbytes
    return Plan.from_schedule(graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="hand")


def recomputing() -> Plan:
    """The last block is kept; the two before are recomputed, the first of them twice."""
    return planned(blocks(), [0, 1, 2, 3, 4, 0, 1, 5, 0, 6])


@pytest.mark.parametrize(
    ("names", "outer"),
    [
        (["h.1.mlp.fc", "h.1.mlp.act"], "h.1.mlp"),
        (["h.1", "h.1.mlp"], "h.1"),
        (["h.1.mlp", "h.10.mlp"], "h"),
        (["h.1.mlp", "head"], ""),
        (["h.2"], "h.2"),
        ([], ""),
    ],
)
def test_the_enclosing_layer(names: list[str], outer: str) -> None:
    """Whole parts of the names are compared."""
    assert outer == enclosing(names)
    assert outer == enclosing(names[::-1])


def test_blocks_are_folded() -> None:
    """Numbers alone; the depth is the largest that gives few patterns."""
    assert "h.*.mlp.fc2" == folded("h.12.mlp.fc2")
    assert "h.12" == cut("h.12.mlp", 2)
    assert "" == cut("", 2)
    names = [f"h.{i}.{part}.{leaf}" for i in range(9) for part in ("mlp", "attn") for leaf in "abcdefg"]
    assert 4 == depth_for(names, most=14)
    assert 3 == depth_for(names, most=13)
    assert 2 == depth_for(names, most=1)
    assert 1 == depth_for([f"layer{i}" for i in range(20)], most=1)


def test_the_layers_of_a_sequential_have_names() -> None:
    """They differ, so each keeps its number, and many are a range; blocks, which have layers, are folded."""
    names = ["body.0", "body.1", "body.2", "h.0.mlp", "h.1.mlp", "h.1", "head", ""]
    few = Patterns(names)
    assert ["body.0", "body.1", "body.2", "h.*.mlp", "h.*.mlp", "h.*", "head", ""] == [few(n) for n in names]
    many = Patterns([f"{i}" for i in range(13)] + [f"h.{i}.fc.{j}" for i in range(2) for j in range(3, 15)])
    assert ["[0-12]", "[0-12]", "h.*.fc.3-14", "h.*.fc"] == [
        many(n) for n in ("0", "12", "h.1.fc.9", "h.1.fc")
    ]
    only = Patterns(["5", "a.b", "a.c"], 1)
    assert ["[5]", "a"] == [only("5"), only("a.c")]


def test_a_plan_counts_by_layer() -> None:
    """Repeats, their seconds, and the bytes that are live when the backward begins."""
    plan = recomputing()
    inside = next(group for group in plan.layers if group.layers == "model.blocks.*.mlp")
    assert (3, 2, 3) == (inside.of, inside.recomputed, inside.repeats)
    assert plan.recomputed_s == inside.repeats_s == 1.0 + 2.0 + 1.0
    assert (600, 300) == (inside.unplanned_nbytes, inside.planned_nbytes)
    outside = next(group for group in plan.layers if not group.layers)
    assert (1, 0, 0, 4, 4) == (
        outside.of,
        outside.recomputed,
        outside.repeats,
        outside.unplanned_nbytes,
        outside.planned_nbytes,
    )
    assert f"recomputed in model.blocks.*.mlp: 2 of 3 ({4 / 10:+.2%})" in plan.summary().splitlines()


def test_the_groups_add_up() -> None:
    """On random graphs with layers: every repeat and every byte at the boundary is in one group."""
    for seed in range(20):
        graph = random_graph(seed)
        ops = [attrs.evolve(op, layer=f"a.{i % 5}.{'bc'[i % 2]}") for i, op in enumerate(graph.ops)]
        graph = attrs.evolve(graph, ops=ops)
        schedule = Schedule.from_order(graph, random_order(graph, seed))
        groups = layer_groups(graph, schedule, Schedule.unplanned(graph))
        timeline = simulate(graph, schedule)
        assert timeline.recomputed_s == pytest.approx(sum(group.repeats_s for group in groups))
        assert len(schedule.order) - len(ops) == sum(group.repeats for group in groups)
        live = timeline.live_nbytes[schedule.boundary - 1]
        assert live == sum(group.planned_nbytes for group in groups)
        assert {"a.*.b", "a.*.c"} == {group.layers for group in groups}


def test_the_plan_of_a_graph_without_layers_says_nothing_of_them() -> None:
    """Neither groups nor a line."""
    graph = blocks(block="")
    plan = planned(graph, [0, 1, 2, 3, 4, 0, 1, 5, 0, 6])
    assert () == plan.layers
    assert "recomputed in" not in plan.summary()


def test_layers_are_saved_and_change_no_fingerprint() -> None:
    """A file without layers loads; a plan comes back with what it says about them."""
    graph, bare = blocks(), blocks(block="")
    assert fingerprint(bare) == fingerprint(graph)
    data = json.loads(json.dumps(graph_to_data(graph)))
    assert graph.ops == graph_from_data(data).ops
    for op in data["ops"]:
        op.pop("layer", None)
    assert bare.ops == graph_from_data(data).ops
    plan = recomputing()
    data = json.loads(json.dumps(plan_to_data(plan)))
    assert plan == plan_from_data(data)
    assert plan == plan_from_data(data, graph=graph)
    assert () == plan_from_data(data, graph=bare).layers
    renamed = plan_from_data(data, graph=blocks(block="encoder.{}")).layers
    assert {"encoder.0", "encoder.1", "encoder.2", ""} == {group.layers for group in renamed}
    del data["layers"]
    assert () == plan_from_data(data).layers
    assert plan == plan_from_data(data, graph=graph)


@pytest.mark.parametrize(
    ("key", "value"), [("of", -1), ("of", 1.5), ("layers", 3), ("repeats_s", "1"), ("colour", 1)]
)
def test_damaged_groups_are_refused(key: str, value: object) -> None:
    """With the place in the file."""
    data = json.loads(json.dumps(plan_to_data(recomputing())))
    data["layers"][0][key] = value
    with pytest.raises(BadFile, match=r"layers\[0\]"):
        plan_from_data(data)


def head() -> Graph:
    """An op makes a wide value for the backward; with its switch on, the backward makes it instead."""
    values = [
        Value(name="x", nbytes=0, external=True),
        Value(name="a", nbytes=100),
        Value(name="wide", nbytes=1000),
        Value(name="gradient", nbytes=100, role=Role.GRAD, of=0),
    ]

    def switched(op: Op, inputs: list[int], outputs: list[int], time_s: float) -> Op:
        other = Alternative(switch="wide.b0", first=1)
        ways = (*op.implementations, run(inputs, outputs, time_s))
        return attrs.evolve(op, implementations=ways, alternatives=[other])

    widen = Op(name="widen", target="aten.exp.default", layer="b.0.act", implementations=[run([1], [2])])
    back = Op(
        name="back", target="aten.mul.Tensor", layer="b.0", backward=True, implementations=[run([2], [3])]
    )
    ops = [
        Op(name="make", target="make", layer="a", implementations=[run([0], [1])]),
        switched(widen, [], [], 0.0),
        switched(back, [1], [3], 3.0),
    ]
    return Graph(name="head", values=values, ops=ops)


def test_a_plan_says_where_ops_run_in_another_way() -> None:
    """The layer that encloses them, what this saves there and what it costs."""
    graph = head()
    decided = specialize(graph, graph.switches)
    schedule = decided.restore(Schedule.unplanned(decided.graph))
    plan = Plan.from_schedule(graph, schedule, budget_nbytes=9999, lower_bound_s=0.0, solver="hand")
    (group,) = plan.ways
    assert ("wide", "b.*", 1, 1) == (group.family, group.layers, group.of, group.on)
    assert ("aten.exp.default", "aten.mul.Tensor") == group.targets
    assert (1100, 200, 900) == (group.usual_nbytes, group.nbytes, group.saved_nbytes)
    assert plan.switched_s == group.extra_s == 1.0
    assert f"other ways to run ops: wide (1) in b.* saves 900 B ({1 / 3:+.2%})" in plan.summary()
    data = json.loads(json.dumps(plan_to_data(plan)))
    assert plan == plan_from_data(data) == plan_from_data(data, graph=graph)
    off = Plan.from_schedule(
        graph, Schedule.unplanned(graph), budget_nbytes=9999, lower_bound_s=0.0, solver="hand"
    )
    assert () == off.ways


def test_the_ways_add_up() -> None:
    """On random graphs: every switch that is on is in one group, and the groups cost what the plan says."""
    seen = 0
    for seed in range(60):
        graph = with_random_switches(random_graph(seed, 6), seed, most=6)
        ops = [attrs.evolve(op, layer=f"a.{i % 5}.{'bc'[i % 2]}") for i, op in enumerate(graph.ops)]
        graph = attrs.evolve(graph, ops=ops)
        on = compatible(conflicts(graph), graph.switches)
        decided = specialize(graph, on)
        schedule = decided.restore(Schedule.unplanned(decided.graph))
        plan = Plan.from_schedule(graph, schedule, budget_nbytes=2**40, lower_bound_s=0.0, solver="hand")
        assert len(on) == sum(group.on for group in plan.ways)
        assert plan.switched_s == pytest.approx(sum(group.extra_s for group in plan.ways))
        assert all(group.on <= group.of for group in plan.ways)
        seen += len(plan.ways)
    assert seen > 60


def inexact(graph: Graph) -> Graph:
    """The same graph, whose ways all round."""
    ops = [
        attrs.evolve(op, alternatives=[attrs.evolve(other, exact=False) for other in op.alternatives])
        for op in graph.ops
    ]
    return attrs.evolve(graph, ops=ops)


def all_on(graph: Graph) -> Plan:
    """The plan with all switches on that can be on together."""
    decided = specialize(graph, compatible(conflicts(graph), graph.switches))
    schedule = decided.restore(Schedule.unplanned(decided.graph))
    return Plan.from_schedule(graph, schedule, budget_nbytes=2**40, lower_bound_s=0.0, solver="hand")


def test_a_plan_says_where_ops_round() -> None:
    """By layer; by op where the graph knows no layers, or where the file is from before."""
    assert () == all_on(head()).rounding_layers
    graph = inexact(head())
    plan = all_on(graph)
    assert (("back", "wide"),) == plan.rounding
    (group,) = plan.rounding_layers
    assert ("wide", "b.*", 1, ("aten.mul.Tensor",)) == attrs.astuple(group)
    line = "not bit-identical, within rounding: wide (1): "
    assert f"{line}1 in b.*" in plan.summary().splitlines()
    data = json.loads(json.dumps(plan_to_data(plan)))
    assert plan == plan_from_data(data) == plan_from_data(data, graph=graph)
    outside = attrs.evolve(graph, ops=[*graph.ops[:2], attrs.evolve(graph.ops[2], layer="")])
    assert f"{line}1 outside of submodules" in all_on(outside).summary().splitlines()
    bare = attrs.evolve(graph, ops=[attrs.evolve(op, layer="") for op in graph.ops])
    assert f"{line}back" in all_on(bare).summary().splitlines()
    del data["rounding_layers"]
    assert f"{line}back" in plan_from_data(data).summary().splitlines()
    assert plan == plan_from_data(data, graph=graph)
    data["rounding_layers"] = [{"family": "wide", "layers": "b.*", "ops": -1, "targets": []}]
    with pytest.raises(BadFile, match=r"rounding_layers\[0\].ops"):
        plan_from_data(data)


def test_the_ops_that_round_add_up() -> None:
    """On random graphs: each is in one group of its family."""
    seen = 0
    for seed in range(40):
        graph = inexact(with_random_switches(random_graph(seed, 6), seed, most=6))
        ops = [attrs.evolve(op, layer=f"a.{i % 5}.{'bc'[i % 2]}") for i, op in enumerate(graph.ops)]
        plan = all_on(attrs.evolve(graph, ops=ops))
        for family in {family for _, family in plan.rounding}:
            count = sum(each == family for _, each in plan.rounding)
            assert count == sum(group.ops for group in plan.rounding_layers if group.family == family)
        seen += len(plan.rounding_layers)
    assert seen > 40


def test_an_op_tells_its_place() -> None:
    """What it calls, in which layer, and its name."""
    forward, _, backward = head().ops
    assert "make in a (make)" == forward.place
    assert "aten.mul.Tensor in the backward of b.0 (back)" == backward.place
    assert "make (make)" == attrs.evolve(forward, layer="").place
