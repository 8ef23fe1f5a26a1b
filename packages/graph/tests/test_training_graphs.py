"""Training graphs: parameters, states and updates; gradients on the host; steps in the optimizer's call."""

import pytest

from remat_graph import (
    BadFile,
    Compute,
    Deliver,
    Free,
    Grads,
    Graph,
    Implementation,
    InvalidSchedule,
    Lane,
    Links,
    Op,
    OptimizerStep,
    Placement,
    Plan,
    Role,
    Schedule,
    Start,
    Transfer,
    Value,
    Wait,
    load_plan,
    save_plan,
    simulate,
    verify,
)
from remat_graph.serialization.plans import plan_from_data, plan_to_data
from remat_graph.serialization.schedules import schedule_from_data, schedule_to_data
from remat_graph.training import Optimized, accumulating, persistent, training_graph, with_placement


def captured() -> Graph:
    """One weight of 40 bytes and a frozen one of 8, as in a captured graph."""
    values = [
        Value(name="w", nbytes=40, role=Role.PARAM, external=True),
        Value(name="frozen", nbytes=8, role=Role.PARAM, external=True),
        Value(name="y", nbytes=4, role=Role.OUTPUT),
        Value(name="g", nbytes=40, role=Role.GRAD, of=0),
    ]
    ways = [((0, 1), (2,), False), ((0,), (3,), True)]
    ops = [
        Op(
            name=f"f{i}",
            target="f",
            backward=b,
            implementations=(Implementation(inputs=r, outputs=m, time_s=1),),
        )
        for i, (r, m, b) in enumerate(ways)
    ]
    return Graph(name="step", values=values, ops=ops)


def trained() -> Graph:
    """With a momentum of 40 bytes, and a workspace of 16 on the device."""
    return training_graph(captured(), [Optimized(param=0, states=(("m", 40),), workspace_nbytes=16)])


SEND = Transfer(3, Lane.TO_HOST)
FETCH = Transfer(0, Lane.TO_DEVICE)
ON_HOST = [
    Start(FETCH),
    Wait(FETCH),
    Compute(0),
    Compute(1),
    Free(0),
    Start(SEND),
    Wait(SEND),
    Free(3),
    Deliver(3),
    OptimizerStep(0, Lane.CPU_OPTIMIZER),
]


def test_what_persists_is_charged():
    """Parameters, also frozen ones, and states are counted; captured values keep their indices."""
    graph = trained()
    verify(graph)
    assert captured().ops == graph.ops
    assert [0, 1, 4] == list(persistent(graph, Placement.DEVICE))
    assert ("w.m", 0) == (graph.values[4].name, graph.values[4].of)
    steps = [Compute(0), Compute(1), Deliver(3), OptimizerStep(0, Lane.COMPUTE)]
    timeline = simulate(graph, Schedule(steps, 1, 3))
    assert 40 + 8 + 40 + 4 + 40 + 16 == timeline.peak_nbytes
    assert 3 == timeline.peak_step


def test_a_gradient_handed_over_on_the_host():
    """It stays on the host until the next step; accumulated, it is added and freed."""
    graph = with_placement(trained(), {0, 4})
    schedule = Schedule(ON_HOST, 3, 9)
    new = simulate(graph, schedule)
    assert (8 + 40 + 4 + 40, 40 + 40 + 40) == (new.peak_nbytes, new.host_peak_nbytes)
    again = simulate(accumulating(graph), schedule, grads=Grads.ACCUMULATE)
    assert (new.peak_nbytes, 40 + 40 + 40 + 40) == (again.peak_nbytes, again.host_peak_nbytes)


@pytest.mark.parametrize(
    ("steps", "end", "problem"),
    [
        (ON_HOST, 8, "computes or delivers, but runs in the optimizer's call"),
        (ON_HOST, 11, "end 11 lies outside"),
        (ON_HOST, 2, "end 2 lies outside"),
        ([*ON_HOST[:6], Free(3), *ON_HOST[8:]], None, "freed while its transfer is pending"),
        ([*ON_HOST[:6], Deliver(3), *ON_HOST[9:]], None, "delivered while its transfer"),
        ([*ON_HOST[:9], Deliver(3)], None, "is not a live gradient"),
        ([*ON_HOST, OptimizerStep(0, Lane.CPU_OPTIMIZER)], None, "updated twice"),
    ],
)
def test_each_mistake_is_named(steps, end, problem):
    """The end of the backward, deliveries, repeated updates."""
    with pytest.raises(InvalidSchedule, match=problem):
        simulate(with_placement(trained(), {0, 4}), Schedule(steps, 3, end))


def test_plans_with_homes_survive_a_file(tmp_path):
    """Values on the host, their bytes, and where the optimizer's call begins."""
    graph = with_placement(trained(), {0, 4})
    schedule = Schedule(ON_HOST, 3, 9)
    assert schedule == schedule_from_data(schedule_to_data(schedule), graph=graph)
    plan = Plan.from_schedule(graph, schedule, budget_nbytes=100, lower_bound_s=0.0, solver="by hand")
    assert ((0, 4), 120) == (plan.on_host, plan.host_peak_nbytes)
    save_plan(plan, tmp_path / "plan.json")
    assert plan == load_plan(tmp_path / "plan.json")
    assert plan == load_plan(tmp_path / "plan.json", graph)
    assert "links" not in plan_to_data(plan)


def test_plans_with_links_are_judged_by_them(tmp_path):
    """A plan for slow links takes as long after it is read; an invalid rate is named."""
    graph, path = with_placement(trained(), {0, 4}), tmp_path / "plan.json"
    options = {"budget_nbytes": 100, "lower_bound_s": 0.0, "solver": "by hand", "periods": 3}
    slow, quick = (
        Plan.from_schedule(graph, Schedule(ON_HOST, 3, 9), links=Links(to_host_nbytes_per_s=rate), **options)
        for rate in (0.5, 5e9)
    )
    save_plan(slow, path)
    assert slow == load_plan(path, graph)
    assert slow.time_s > quick.time_s + 1.0
    for links, said in (
        ({"to_host_nbytes_per_s": 0}, "at least 0.001 bytes a second were wanted"),
        ({"to_host": 1.0}, "unknown key 'to_host'"),
        ([1.0], "an object was wanted"),
    ):
        with pytest.raises(BadFile, match=said):
            plan_from_data({**plan_to_data(slow), "links": links})
    with pytest.raises(BadFile, match="periods: a whole number from 1 to 16"):
        plan_from_data({**plan_to_data(slow), "periods": 0})
