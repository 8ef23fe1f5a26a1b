"""Data that is read equals the data that was written."""

import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import (
    Placement,
    Plan,
    Role,
    Schedule,
    Update,
    Value,
    fingerprint,
    load_graph,
    load_order,
    load_plan,
    save_graph,
    save_order,
    save_plan,
    simulate,
)
from remat_graph.serialization.graphs import graph_from_data, graph_to_data
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.serialization.schedules import schedule_from_data, schedule_to_data
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_moves, random_order
from remat_graph.testing.strategies import graphs, schedules


def fields(graph):
    return attrs.asdict(graph, recurse=False)


def with_everything(graph):
    """Fields that random graphs lack: an optimizer, chunks, placements, conditions."""
    extra = [
        Value(name="chunk", nbytes=5, role=Role.PARAM, chunk_of="whole", placement=Placement.HOST),
        Value(
            name="state", nbytes=9, role=Role.OPTIMIZER_STATE, of=len(graph.values), placement=Placement.HOST
        ),
    ]
    updates = [
        Update(param=len(graph.values), grad=grad, states=(len(graph.values) + 1,), cpu_time_s=0.1)
        for grad in graph.gradients[:1]
    ]
    conditions = (("mode", "train"), ("autocast", "off"))
    return attrs.evolve(graph, values=(*graph.values, *extra), updates=updates, conditions=conditions)


@settings(deadline=None)
@given(graphs())
def test_a_graph_comes_back(graph):
    """Through JSON text every field and the fingerprint are equal."""
    graph = with_everything(graph)
    again = graph_from_data(json.loads(json.dumps(graph_to_data(graph))))
    assert fields(graph) == fields(again)
    assert fingerprint(graph) == fingerprint(again)


@settings(deadline=None)
@given(schedules(), st.integers(0, 2**32 - 1))
def test_a_schedule_comes_back(case, seed):
    """Transfers included."""
    graph, schedule = case
    schedule = random_moves(graph, schedule, seed)
    data = json.loads(json.dumps(schedule_to_data(schedule)))
    assert schedule == schedule_from_data(data)
    assert schedule == schedule_from_data(data, graph=graph)


def plan(graph, schedule):
    peak = simulate(graph, schedule).peak_nbytes
    stats = {"nodes": 3, "trace": [1.5, None], "deep": {"why": "because"}}
    return Plan.from_schedule(
        graph,
        schedule,
        budget_nbytes=peak + 7,
        lower_bound_s=graph.time_s / 2,
        solver="by hand",
        solver_stats=stats,
        versions={"torch": "2.13.0"},
        platform="flops",
        deadline_hit=True,
    )


@settings(deadline=None)
@given(schedules())
def test_a_plan_comes_back(case):
    """With its graph and without."""
    graph, schedule = case
    made = plan(graph, schedule)
    data = json.loads(json.dumps(plan_to_data(made)))
    assert made == plan_from_data(data)
    assert made == plan_from_data(data, graph=graph)


@pytest.mark.parametrize("seed", range(3))
def test_files_come_back(tmp_path, seed):
    """Graph, plan and order, by path as text and as `Path`."""
    graph = random_graph(seed)
    order = random_order(graph, seed)
    made = plan(graph, Schedule.from_order(graph, order))
    save_graph(graph, tmp_path / "graph.json")
    save_plan(made, str(tmp_path / "plan.json"))
    save_order(made.schedule.order, tmp_path / "order.json")
    again = load_graph(str(tmp_path / "graph.json"))
    assert fields(graph) == fields(again)
    assert made == load_plan(tmp_path / "plan.json", again) == load_plan(tmp_path / "plan.json")
    assert tuple(order) == load_order(tmp_path / "order.json", graph)
    assert order == json.loads((tmp_path / "order.json").read_text())
