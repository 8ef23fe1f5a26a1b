"""The snapshot of a plan is one that torch's viewer reads, and its bytes are the plan's."""

import pickle
import pickletools
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch.cuda import _memory_viz

from remat_facade.report.snapshot import memory_snapshot, write_snapshot
from remat_graph import Grads, Graph, Plan, Role, Schedule, Value, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.small_graphs import small_graph


def plan_of(graph: Graph, schedule: Schedule, grads: Grads = Grads.NEW) -> Plan:
    """The plan of a schedule, with its peak as budget."""
    peak = simulate(graph, schedule, grads=grads).peak_nbytes
    return Plan.from_schedule(
        graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="hand", grads=grads
    )


def layered() -> tuple[Graph, Plan]:
    """Three ops in layers, the first of which is recomputed; a gradient and an output stay."""
    values = [
        Value(name="x", nbytes=100, external=True),
        Value(name="a", nbytes=10),
        Value(name="out", nbytes=5, role=Role.OUTPUT),
        Value(name="t", nbytes=5, role=Role.TANGENT, of=2),
        Value(name="g", nbytes=7, role=Role.GRAD, of=0),
    ]
    graph = small_graph("step", values, [((0,), (1,)), ((1,), (2,)), ((3, 1), (4,))], forward=2, time_s=1)
    layers = ("h.0.mlp", "h.1.mlp", "h.0.mlp")
    ops = [attrs.evolve(op, layer=layer) for op, layer in zip(graph.ops, layers, strict=True)]
    graph = attrs.evolve(graph, ops=ops)
    return graph, plan_of(graph, Schedule.from_order(graph, [0, 1, 0, 2]))


def levels(snapshot: dict[str, Any]) -> list[int]:
    """Bytes that are allocated and not freed, event by event."""
    signs = {"alloc": 1, "free_completed": -1}
    return list(accumulate(signs.get(e["action"], 0) * e["size"] for e in snapshot["device_traces"][0]))


@pytest.mark.parametrize("seed", range(20))
def test_the_live_bytes_peak_where_the_plan_does(seed: int) -> None:
    """The most that is allocated at once is the predicted peak; what is left is in the segment."""
    graph = random_graph(seed, forward_ops=2 + seed % 9)
    schedule = Schedule.from_order(graph, random_order(graph, seed))
    schedule = random_moves(graph, schedule, seed, moves=seed % 3)
    plan = plan_of(graph, schedule, Grads.PRESENT if seed % 2 else Grads.NEW)
    snapshot = memory_snapshot(graph, plan)
    assert plan.peak_nbytes == max(levels(snapshot))
    for segment in snapshot["segments"]:
        assert levels(snapshot)[-1] == segment["allocated_size"]
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])


@pytest.mark.parametrize("seed", range(20))
def test_live_blocks_never_overlap(seed: int) -> None:
    """Each block has addresses of its own while it lives."""
    graph = random_graph(seed, forward_ops=2 + seed % 9)
    plan = plan_of(graph, Schedule.from_order(graph, random_order(graph, seed)))
    live: dict[int, int] = {}
    for event in memory_snapshot(graph, plan)["device_traces"][0]:
        if event["action"] == "alloc":
            live[event["addr"]] = event["addr"] + event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] + event["size"] == live.pop(event["addr"])
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(live.items())))


def test_torch_reads_it(tmp_path: Path) -> None:
    """Torch's own plots, its listing and its summary accept the written file."""
    graph, plan = layered()
    written = pickle.loads(write_snapshot(tmp_path / "plan.pickle", graph, plan).read_bytes())
    assert memory_snapshot(graph, plan) == written
    assert "MemoryViz.js" in _memory_viz.trace_plot(written)
    assert "MemoryViz.js" in _memory_viz.segment_plot(written)
    assert "segments: 1" in _memory_viz.segsum(written)
    listing = _memory_viz.trace(written)
    assert sum(e["action"] == "alloc" for e in written["device_traces"][0]) == listing.count(" = ")
    flames = _memory_viz.memory(written, format_flamegraph=str)
    assert "layer:0:h;layer:0:h.0;layer:0:h.0.mlp" in flames


def test_frames_name_layers_and_recomputation() -> None:
    """Frames lead from the value over the op and its layers to the phase; the category is its pattern."""
    graph, plan = layered()
    trace = memory_snapshot(graph, plan)["device_traces"][0]
    frames = [[frame["name"] for frame in e["frames"]] for e in trace if e["action"] == "alloc"]
    (again,) = (each for each in frames if each[-1] == "recomputed")
    assert ["a", graph.ops[0].name, "h.0.mlp", "h.0", "h", "recomputed"] == again
    assert ["h.*.mlp"] * len(frames) == [e["category"] for e in trace if e["action"] == "alloc"]
    assert ["forward", "forward", "tangent", "recomputed", "backward"] == [each[-1] for each in frames]


def test_the_viewer_finds_the_category_that_it_wants() -> None:
    """The viewer fails on snapshots with categories of which none is "unknown"."""
    assert "unknown" in {e["category"] for e in memory_snapshot(*layered())["device_traces"][0]}


def test_the_viewer_knows_every_opcode(tmp_path: Path) -> None:
    """The viewer has an unpickler of its own, with these opcodes only."""
    graph = random_graph(5, forward_ops=40)
    plan = plan_of(graph, Schedule.from_order(graph, random_order(graph, 5)))
    used = {
        op.name for op, _, _ in pickletools.genops(write_snapshot(tmp_path / "p", graph, plan).read_bytes())
    }
    assert used <= {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "SHORT_BINUNICODE", "BINUNICODE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE"),
    }
