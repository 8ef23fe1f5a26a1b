"""Plans for steps that find a `.grad` for every parameter: valid, within the budget, never worse."""

import attrs
import pytest

from remat_graph import (
    Compute,
    Deliver,
    Free,
    Grads,
    Graph,
    Role,
    Schedule,
    Value,
    noremat_peak_nbytes,
    simulate,
    verify,
)
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order
from remat_graph.testing.random_switches import with_random_switches
from remat_graph.testing.small_graphs import small_graph
from remat_solvers import (
    Problem,
    Status,
    get_solver,
    min_budget,
    min_present_budget,
    solve_present,
    solve_switches,
)
from remat_solvers.present_gradients import freed_when_made, with_deliveries


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_for_solvers_is_one_of_the_graph(seed: int) -> None:
    """Each gradient is delivered once; memory is that of solvers unless a parameter is used later."""
    graph = random_graph(seed, seed % 9 + 2, dropped=seed % 3 == 0)
    view = freed_when_made(graph)
    verify(view)
    assert len(view.gradients) < len(graph.gradients) or not graph.gradients
    for variant in range(4):
        order = random_order(view, seed + 100 * variant, forget=0.2 * variant)
        given = Schedule.from_order(view, order)
        schedule = with_deliveries(graph, given)
        timeline = simulate(graph, schedule, grads=Grads.PRESENT)
        assert timeline.time_s == simulate(view, given).time_s
        assert timeline.peak_nbytes >= simulate(view, given).peak_nbytes
        assert order == list(schedule.order)
        delivered = [step.value for step in schedule.steps if isinstance(step, Deliver)]
        assert sorted(delivered) == sorted(graph.gradients)
        assert schedule.order[: order.index(0) + 1]


def test_a_gradient_is_delivered_after_the_last_use_of_its_parameter() -> None:
    """A hook of the optimizer may change the parameter then."""
    values = [
        Value(name="w", nbytes=50, external=True, role=Role.PARAM),
        Value(name="y", nbytes=7, role=Role.OUTPUT),
        Value(name="t", nbytes=7, role=Role.TANGENT, of=1),
        Value(name="g", nbytes=50, role=Role.GRAD, of=0),
        Value(name="d", nbytes=30),
        Value(name="h", nbytes=30, role=Role.GRAD),
    ]
    ops = [((0,), (1,)), ((2,), (3,)), ((0, 2), (4,)), ((4,), (5,))]
    graph = small_graph("late", values, ops, forward=1)
    made = with_deliveries(graph, Schedule.unplanned(freed_when_made(graph)))
    assert made.steps == (
        Compute(0),
        Compute(1),
        Compute(2),
        Free(2),
        Deliver(3),
        Compute(3),
        Free(4),
        Deliver(5),
    )
    assert made.boundary == 1
    assert 7 + 7 + 50 + 30 == simulate(graph, made, grads=Grads.PRESENT).peak_nbytes
    # Solvers see less than what the rule costs: what they find for less is not believed.
    view = freed_when_made(graph)
    assert 7 + 30 + 30 == simulate(view, Schedule.unplanned(view)).peak_nbytes
    assert solve_present(get_solver("auto"), Problem(graph, 93)).status is Status.NOT_FOUND
    assert solve_present(get_solver("auto"), Problem(graph, 94)).peak_nbytes == 94


def budgets(graph: Graph) -> tuple[int, int]:
    least = min_present_budget(graph)
    verify(graph, least.schedule)
    assert least.nbytes == simulate(graph, least.schedule, grads=Grads.PRESENT).peak_nbytes
    assert least.floor_nbytes <= least.nbytes
    peak = simulate(graph, Schedule.unplanned(graph), grads=Grads.PRESENT).peak_nbytes
    return least.nbytes, (least.nbytes + peak) // 2


@pytest.mark.parametrize("seed", range(12))
def test_plans_fit_and_are_no_slower_than_those_for_new_gradients(seed: int) -> None:
    """Gradients take nothing of the budget once they are delivered."""
    graph = random_graph(seed, seed % 6 + 4, dropped=seed % 4 == 0)
    least_nbytes, middle_nbytes = budgets(graph)
    assert least_nbytes <= min_budget(graph).nbytes
    for budget_nbytes in (least_nbytes, middle_nbytes, noremat_peak_nbytes(graph)):
        found = solve_present(get_solver("auto"), Problem(graph, budget_nbytes))
        safe = solve_switches(get_solver("auto"), Problem(graph, budget_nbytes))
        assert found.time_s is not None or budget_nbytes == least_nbytes
        if found.schedule is None or found.time_s is None:
            continue
        timeline = simulate(graph, found.schedule, grads=Grads.PRESENT)
        assert timeline.peak_nbytes == found.peak_nbytes
        assert timeline.peak_nbytes <= budget_nbytes
        assert timeline.time_s == found.time_s
        assert found.lower_bound_s <= found.time_s * (1 + 1e-9)
        if safe.time_s is not None:
            assert found.time_s <= safe.time_s


@pytest.mark.parametrize("seed", range(6))
def test_switches_are_decided_too(seed: int) -> None:
    """The schedule runs the implementations of the switches that it has on."""
    graph = with_random_switches(random_graph(seed, 6), seed)
    _, middle_nbytes = budgets(graph)
    found = solve_present(get_solver("auto"), Problem(graph, middle_nbytes))
    assert found.schedule is not None
    assert simulate(graph, found.schedule, grads=Grads.PRESENT).peak_nbytes <= middle_nbytes


def test_no_bound_is_above_a_schedule_that_holds_a_gradient() -> None:
    """It makes the gradient before the last use of its parameter, because that frees more than it holds."""
    values = [
        Value(name="w", nbytes=10, external=True, role=Role.PARAM),
        Value(name="a", nbytes=100),
        Value(name="loss", nbytes=0, role=Role.OUTPUT),
        Value(name="t", nbytes=10, role=Role.TANGENT, of=2),
        Value(name="g", nbytes=10),
        Value(name="gw", nbytes=10, role=Role.GRAD, of=0),
        Value(name="gx", nbytes=5),
    ]
    ops = [((), (1,)), ((1, 0), (2,)), ((0, 3), (4,)), ((1, 3), (5,)), ((4,), (6,))]
    graph = small_graph("held", values, ops, forward=2)
    scratch = attrs.evolve(graph.ops[2].first, workspace_nbytes=100)
    uses = attrs.evolve(graph.ops[2], implementations=(scratch,))
    graph = attrs.evolve(graph, ops=(*graph.ops[:2], uses, *graph.ops[3:]))
    schedule = Schedule(
        [
            *(Compute(0), Compute(1), Compute(3), Free(1), Compute(2)),
            *(Free(3), Deliver(5), Compute(4), Free(4), Free(6)),
        ],
        2,
    )
    held = simulate(graph, schedule, grads=Grads.PRESENT)
    solution = solve_present(get_solver("auto"), Problem(graph, held.peak_nbytes))
    assert solution.lower_bound_s <= held.time_s
    assert solution.time_s is not None
    assert (solution.status is Status.OPTIMAL) == (solution.time_s == solution.lower_bound_s)
    assert min_present_budget(graph).floor_nbytes <= held.peak_nbytes
