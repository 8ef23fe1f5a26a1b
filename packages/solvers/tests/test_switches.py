"""Switches are decided by bounds and solved as graphs without any."""

from itertools import chain, combinations

import pytest

from remat_graph import (
    Alternative,
    Graph,
    Implementation,
    Op,
    Schedule,
    Value,
    decide,
    noremat_peak_nbytes,
    relaxed,
    simulate,
    specialize,
    switches_on,
)
from remat_graph.switches.conflicts import conflicting
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import (
    Deadline,
    Problem,
    Status,
    bounds_of,
    get_solver,
    min_budget,
    pareto,
    solve,
    solve_switches,
)
from remat_solvers.bounds import budget_floor, decisions
from remat_solvers.bounds.decisions import (
    MOST_COMBINED,
    DecidedBound,
    combinations_of,
    decided_bound_s,
    time_bound_s,
)
from remat_solvers.bounds.graph_bound import GraphBound

AUTO = get_solver("auto", moves=300)


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_combination_is_found(seed: int, share: float) -> None:
    """The result is that of the best graph without switches; the bound is below it; the referee agrees."""
    graph = with_random_switches(random_graph(seed, 6), seed, most=3)
    budget = int(share * noremat_peak_nbytes(graph))
    problem = Problem(graph, budget)
    found = solve_switches(AUTO, problem)
    combinations, all_of_them = combinations_of(graph)
    assert all_of_them
    each = [AUTO.solve(Problem(specialize(graph, on).graph, budget)) for on in combinations]
    times = [solution.time_s for solution in each if solution.time_s is not None]
    if not times:
        assert found.schedule is None
        assert (found.status is Status.INFEASIBLE) == all(s.status is Status.INFEASIBLE for s in each)
        return
    assert min(times) == found.time_s
    assert graph.time_s == found.base_s
    assert found.schedule is not None
    timeline = simulate(graph, found.schedule)
    assert (found.time_s, found.peak_nbytes) == (timeline.time_s, timeline.peak_nbytes)
    assert timeline.peak_nbytes <= budget
    assert found.lower_bound_s <= found.time_s
    assert found.lower_bound_s >= min(specialize(graph, on).graph.time_s for on in combinations)
    if graph.switches:
        assert found.stats["switched"] == ", ".join(sorted(switches_on(graph, found.schedule)))


@pytest.mark.parametrize("seed", range(12))
def test_with_many_switches_the_relaxed_graph_bounds_all_of_them(seed: int) -> None:
    """No combination is faster or smaller than what the relaxed graph needs at least."""
    graph = with_random_switches(random_graph(seed, 10), seed, most=6)
    tried, all_of_them = combinations_of(graph)
    assert all_of_them == (len(graph.switches) <= MOST_COMBINED)
    least = relaxed(graph)
    budget = int(0.6 * noremat_peak_nbytes(graph))
    bound_s = time_bound_s(least, budget, Deadline())
    (overhead,) = bounds_of(graph, [budget])
    smallest = min_budget(graph)
    for on in tried:
        decided = specialize(graph, on).graph
        assert budget_floor(least).nbytes <= budget_floor(decided).nbytes
        assert smallest.floor_nbytes <= min_budget(decided).nbytes
        solution = AUTO.solve(Problem(decided, budget))
        if solution.time_s is not None:
            assert bound_s <= solution.time_s + 1e-9
            assert overhead <= solution.time_s / graph.time_s - 1 + 1e-9
    found = solve_switches(AUTO, Problem(graph, budget))
    if found.schedule is not None and found.time_s is not None:
        assert simulate(graph, found.schedule).time_s == found.time_s
        assert found.lower_bound_s <= found.time_s


@pytest.mark.parametrize("seed", [*range(12), 119, 147, 295, 297])
def test_parts_of_the_decisions_bound_all_of_them(seed: int) -> None:
    """From the smallest budget up: no lower than the relaxed graph, and no higher than a schedule."""
    graph = with_random_switches(random_graph(seed, 7), seed, most=5)
    sets = chain.from_iterable(combinations(graph.switches, n) for n in range(len(graph.switches) + 1))
    graphs = [specialize(graph, on).graph for on in sets if not conflicting(graph, on)]
    floor_nbytes, save_all_nbytes = budget_floor(relaxed(graph)).nbytes, noremat_peak_nbytes(graph)
    for budget in {floor_nbytes - 1, floor_nbytes, (floor_nbytes + save_all_nbytes) // 2}:
        relaxed_s = time_bound_s(relaxed(graph), budget, Deadline())
        found = decided_bound_s(graph, budget, Deadline())
        assert found >= relaxed_s
        undecided_s = time_bound_s(relaxed(decide(graph, (), ())), budget, Deadline())
        assert undecided_s == relaxed_s
        times = [AUTO.solve(Problem(each, budget)).time_s for each in graphs]
        known_s = min((time_s for time_s in times if time_s is not None), default=float("inf"))
        assert found <= known_s + 1e-9
        refined = DecidedBound(graph, budget, Deadline())
        refined.branch(float("inf"), Deadline())
        refined.refine(known_s, Deadline())
        assert found <= refined.lower_s <= known_s + 1e-9


@pytest.mark.parametrize("nearer", [False, True])
def test_parts_see_what_the_relaxed_graph_hides(nearer: bool) -> None:
    """A switch that saves bytes and takes time: that graph has the bytes of on and the time of off.

    Also where a switch that changes nothing comes first.
    """
    values = [
        Value(name="x", nbytes=100),
        Value(name="loss", nbytes=0, role="output"),
        Value(name="grad", nbytes=10, role="grad"),
    ]
    large, small = (
        Implementation(inputs=[0], outputs=[2], time_s=time_s, workspace_nbytes=nbytes)
        for time_s, nbytes in ((1.0, 200), (4.0, 0))
    )
    make = Implementation(inputs=[], outputs=[0], time_s=1)
    ops = [
        Op(
            name="make",
            target="make",
            implementations=[make, make],
            alternatives=[Alternative(switch="other.make", first=1, again=1)] if nearer else [],
        ),
        Op(name="lose", target="lose", implementations=[Implementation(inputs=[0], outputs=[1], time_s=1)]),
        Op(
            name="back",
            target="back",
            backward=True,
            implementations=[large, small],
            alternatives=[Alternative(switch="slow.back", first=1, again=1)],
        ),
    ]
    graph = Graph(name="hidden", values=values, ops=ops)
    relaxed_s = time_bound_s(relaxed(graph), 150, Deadline())
    assert relaxed_s == 3.0
    assert decided_bound_s(graph, 150, Deadline()) == 6.0
    assert decided_bound_s(graph, 150, Deadline(), enough_s=3.0) == 3.0
    assert decided_bound_s(graph, 50, Deadline()) == float("inf")


@pytest.mark.parametrize("most", [32, 9])
@pytest.mark.parametrize("raised_s", [0.0, 1.0])
def test_parts_are_divided_while_that_raises_a_bound(
    monkeypatch: pytest.MonkeyPatch, raised_s: float, most: int
) -> None:
    """And until as many are bounded as may be: the halves by one or two switches at a time."""
    found: list[float] = []

    def bound(self: GraphBound, deadline: Deadline) -> float:
        found.append(raised_s * len(found))
        return found[-1]

    monkeypatch.setattr(decisions, "MOST_PARTS", most)
    monkeypatch.setattr(GraphBound, "cut_s", bound)
    graph = with_random_switches(random_graph(3, 40), 3, most=20)
    decided_bound_s(graph, 0, Deadline())
    bounded = len(found) - 1
    if raised_s:
        assert most <= bounded < most + 4
    else:
        assert bounded in (2, 4)


@pytest.mark.parametrize("seed", range(8))
def test_the_smallest_budget_is_that_of_the_best_combination(seed: int) -> None:
    """Its schedule runs on the graph with switches."""
    graph = with_random_switches(random_graph(seed, 6), seed, most=3)
    found = min_budget(graph)
    each = [min_budget(specialize(graph, on).graph) for on in combinations_of(graph)[0]]
    assert min(one.nbytes for one in each) == found.nbytes
    assert min(one.floor_nbytes for one in each) == found.floor_nbytes
    assert found.nbytes == simulate(graph, found.schedule).peak_nbytes


def test_every_entry_point_decides_switches() -> None:
    """`solve` and `pareto` reach the smallest budget, which needs one."""
    graphs = (with_random_switches(random_graph(seed, 6), seed, most=3) for seed in range(40))
    for graph in graphs:
        small, off = min_budget(graph), min_budget(specialize(graph, ()).graph)
        if small.nbytes < off.floor_nbytes:
            break
    else:
        pytest.fail("no graph whose smallest budget needs a switch")
    solution = solve(graph, small.nbytes, moves=300)
    assert solution.schedule is not None
    assert switches_on(graph, solution.schedule)
    points = pareto(graph, [small.nbytes, off.nbytes], moves=300)
    assert all(point.solution.schedule is not None for point in points)


def test_other_methods_run_on_every_combination() -> None:
    """A method that knows nothing of switches solves what was decided."""
    graph = with_random_switches(random_graph(3, 6), 3, most=3)
    budget = noremat_peak_nbytes(graph)
    for name in ("noremat", "twremat", "chen_greedy", "search"):
        found = solve_switches(get_solver(name), Problem(graph, budget))
        assert found.schedule is not None, name
        assert simulate(graph, found.schedule).peak_nbytes <= budget


def test_no_switches_change_nothing() -> None:
    """The solver gets the problem itself."""
    graph = random_graph(5, 8)
    problem = Problem(graph, noremat_peak_nbytes(graph))
    assert solve_switches(AUTO, problem).schedule == Schedule.unplanned(graph)
