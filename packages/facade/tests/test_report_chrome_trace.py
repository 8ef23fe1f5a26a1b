"""The Chrome trace has the times, the bytes and the names of the plan."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from remat_facade.report.chrome_trace import chrome_trace, write_trace
from remat_graph import Compute, Graph, Plan, Schedule, simulate
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.random_training import random_links


def moving(seed: int) -> tuple[Graph, Plan]:
    """A plan with repeats and copies, of a graph whose ops know their layers."""
    graph = random_graph(seed, forward_ops=4 + seed % 9)
    graph = attrs.evolve(graph, ops=[attrs.evolve(op, layer=f"h.{i % 3}") for i, op in enumerate(graph.ops)])
    schedule = Schedule.from_order(graph, random_order(graph, seed))
    schedule = random_moves(graph, schedule, seed, moves=3)
    links = random_links(graph, seed)
    peak = simulate(graph, schedule).peak_nbytes
    return graph, Plan.from_schedule(
        graph, schedule, budget_nbytes=peak, lower_bound_s=0.0, solver="hand", links=links
    )


def of(trace: dict[str, Any], phase: str, name: str = "") -> list[dict[str, Any]]:
    """The events of one phase, with a name or all."""
    return [e for e in trace["traceEvents"] if e["ph"] == phase and name in ("", e["name"])]


@pytest.mark.parametrize("seed", range(20))
def test_times_and_bytes_are_the_plans(seed: int) -> None:
    """The last event ends when the step does; the counter peaks at the predicted peak; every run is there."""
    graph, plan = moving(seed)
    trace = chrome_trace(graph, plan)
    works = of(trace, "X")
    assert plan.time_s == pytest.approx(max(e["ts"] + e["dur"] for e in works) / 1e6)
    assert plan.peak_nbytes == max(e["args"]["bytes"] for e in of(trace, "C", "device memory"))
    assert len(plan.schedule.order) == sum(e["tid"] == 1 for e in works)
    repeats = len(plan.schedule.order) - len(graph.ops)
    assert repeats == sum(e["args"].get("run") == "repeat" for e in works)


def test_names_are_layers_and_operators() -> None:
    """An op has its layer, its operator, its bytes and whether it runs first; a copy its value and bytes."""
    graph, plan = moving(6)
    trace = chrome_trace(graph, plan)
    first = next(e for e in of(trace, "X") if e["args"].get("op") == graph.ops[0].name)
    step = next(step for step in plan.schedule.computes() if step.op == 0)
    assert isinstance(step, Compute)
    assert f"h.0 {graph.ops[0].target}" == first["name"]
    made = graph.ops[0].implementations[step.implementation].outputs
    assert sum(map(graph.allocated_nbytes, made)) == first["args"]["bytes"]
    copies = [e for e in of(trace, "X") if e["cat"] == "copy"]
    assert {2, 3} == {e["tid"] for e in copies}
    sizes = {value.name: value.nbytes for value in graph.values}
    assert all(sizes[e["name"].split()[-1]] == e["args"]["bytes"] for e in copies)


def test_every_track_has_a_name() -> None:
    """Compute, two directions of copies, and the host."""
    names = [e["args"]["name"] for e in of(chrome_trace(*moving(1)), "M", "thread_name")]
    assert ["compute", "copies to the host", "copies to the device", "updates on the host"] == names


def test_a_graph_without_times_has_ops_of_a_microsecond(tmp_path: Path) -> None:
    """The file is JSON, and no op is invisible."""
    graph, plan = moving(2)
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(i, time_s=0.0) for i in op.implementations])
        for op in graph.ops
    ]
    graph = attrs.evolve(graph, ops=ops)
    written = json.loads(write_trace(tmp_path / "trace.json", graph, plan).read_text())
    assert chrome_trace(graph, plan) == written
    assert all(e["dur"] == pytest.approx(1.0) for e in of(written, "X") if e["tid"] == 1)
    assert written["otherData"]["has_times"] is False
