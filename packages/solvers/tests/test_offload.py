"""`offload` against the referee, against every placement, and at the limits of its input."""

import random
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import attrs
import pytest

from remat_graph import (
    Grads,
    Graph,
    Implementation,
    Lane,
    Links,
    Op,
    OptimizerStep,
    Placement,
    Role,
    Schedule,
    Start,
    Value,
    noremat_peak_nbytes,
    simulate,
)
from remat_graph.testing.random_graphs import random_chain, random_graph
from remat_graph.testing.random_training import random_links, random_training
from remat_graph.training import Optimized, accumulating, training_graph, with_placement
from remat_solvers import Deadline, Problem, Solution, Status
from remat_solvers.methods.pofo import Pofo
from remat_solvers.offload.candidate import PERIODS
from remat_solvers.offload.candidates import WORTH
from remat_solvers.offload.optimizer_updates import optimizer_call_steps
from remat_solvers.offload.parameter_groups import params_of
from remat_solvers.offload.placement_neighbors import host_choices, placement_neighbors
from remat_solvers.offload.solver import Offload

FARTHEST = 0.02  # above the best homes, as a ratio of the time; not moving is worth as much (`offload.WORTH`)
FROM_TABLE = 0.03  # above the chain DP's time

Style = dict[str, Any]
STYLES: tuple[Style, ...] = tuple(
    {"in_backward": in_backward, "accumulate": accumulate, "micro_batches": micro_batches}
    for in_backward, accumulate, micro_batches in product((False, True), (False, True), (1, 3))
)


def all_held_nbytes(graph: Graph) -> int:
    """Peak of the step with everything on the device and gradients there already."""
    order = Schedule.unplanned(graph)
    return simulate(graph, order).peak_nbytes


def problem(seed: int, layers: int, fraction: float, host_fraction: float | None = None) -> Problem:
    """A random step with a part of what it takes on the device, and on links of any kind."""
    graph = random_training(seed, layers)
    peak, rng = all_held_nbytes(graph), random.Random(seed)
    links = random_links(graph, seed)
    to_host, to_device = links.to_host_nbytes_per_s, links.to_device_nbytes_per_s
    if rng.random() < 0.4:
        slower = rng.choice((0.5, 0.8))
        links = attrs.evolve(
            links,
            to_host_duplex_nbytes_per_s=to_host * slower,
            to_device_duplex_nbytes_per_s=to_device * slower,
        )
    if rng.random() < 0.4:
        links = attrs.evolve(links, host_nbytes_per_s=4 * max(to_host, to_device))
    host = None if host_fraction is None else int(host_fraction * peak)
    return Problem(graph, int(fraction * peak), links, host)


def check(given: Problem, style: Style, solution: Solution) -> None:
    """Valid by the referee, in the state of ``.grad`` that needs most, and what it says of itself."""
    assert solution.schedule is not None
    graph = with_placement(given.graph, solution.on_host)
    steps: dict[str, Any] = {"links": given.links, "periods": PERIODS}
    if style["micro_batches"] > 1:
        readings = [
            simulate(
                accumulating(graph),
                solution.schedule,
                grads=Grads.ACCUMULATE,
                passes=style["micro_batches"],
                **steps,
            )
        ]
    else:
        readings = [simulate(graph, solution.schedule, **steps)]
        if style["accumulate"] and not style["in_backward"]:
            readings.append(
                simulate(accumulating(graph), solution.schedule, grads=Grads.ACCUMULATE, links=given.links)
            )
    assert readings[0].time_s == solution.time_s
    assert max(reading.peak_nbytes for reading in readings) == solution.peak_nbytes
    assert solution.peak_nbytes <= given.budget_nbytes
    host_nbytes = max(reading.host_peak_nbytes for reading in readings)
    assert given.host_budget_nbytes is None or host_nbytes <= given.host_budget_nbytes
    assert solution.lower_bound_s <= solution.time_s
    inside = [step for step in solution.schedule.steps[: solution.schedule.end] if is_update(step)]
    behind = [step for step in solution.schedule.steps[len(inside) :] if is_update(step)]
    assert len(given.graph.updates) == len(inside if style["in_backward"] else behind)


def is_update(step: object) -> bool:
    return isinstance(step, OptimizerStep)


def moves(solution: Solution) -> list[Start]:
    assert solution.schedule is not None
    return [step for step in solution.schedule.steps if isinstance(step, Start)]


def homes(graph: Graph) -> Iterator[frozenset[int]]:
    """Every fate of every parameter."""
    for chosen in product(*(host_choices(param) for param in params_of(graph))):
        yield frozenset().union(*chosen)


# What a plan keeps.


@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_plans_are_what_they_say(style: Style) -> None:
    """In every style, at several budgets of device and host, on every kind of links; most have a plan."""
    found = 0
    for seed in range(2):
        for fraction, host_fraction in ((0.7, None), (0.8, 1.0), (1.0, 0.3)):
            given = problem(seed, 4, fraction, host_fraction)
            solution = Offload(**style).solve(given)
            if solution.feasible:
                check(given, style, solution)
                found += 1
    assert found >= 3


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_more_plans_are_what_they_say(seed: int) -> None:
    """Up to 12 layers, each in a style of its own."""
    rng = random.Random(seed)
    style = rng.choice(STYLES)
    for fraction in (0.4, 0.6, 0.8, 1.0):
        given = problem(seed, rng.randint(1, 12), fraction, rng.choice((None, 0.3, 0.6, 1.0)))
        solution = Offload(**style).solve(given)
        if solution.feasible:
            check(given, style, solution)


def test_any_graph_in_training() -> None:
    """Repeats, views, pairs of implementations, tied outputs, and parameters that nothing updates."""
    found = 0
    for seed in range(6):
        graph = random_graph(seed, 8)
        weights = [i for i, value in enumerate(graph.values) if value.role is Role.PARAM]
        values = [attrs.evolve(v, nbytes=max(v.nbytes, 64)) for v in graph.values]
        optimized = [Optimized(param=w, states=(("m", 128),), cpu_time_s=0.125) for w in weights]
        trained = training_graph(attrs.evolve(graph, values=values), optimized)
        given = Problem(trained, int(0.8 * all_held_nbytes(trained)), random_links(graph, seed))
        for style in (STYLES[0], STYLES[-1]):
            solution = Offload(**style).solve(given)
            if solution.feasible:
                assert solution.time_s is not None
                found += 1
    assert found > 0


# Beside brute force.


@pytest.mark.parametrize("seed", [2, 10, 33, 39, 47, 51, 58, 87, 99, 106])
def test_close_to_the_best_homes(seed: int) -> None:
    """Compared with each placement, solved separately.

    Seen on 120 steps of 2 to 4 layers in every style, 104 of them solvable: every one is solved, the median
    answer is the best one, 9 of 10 are within 0.2 % of it and the worst is 1.4 % above. By the program
    alone, without `placement_neighbors`, 13 were not solved and 14 were 2 to 43 % above: half of these
    seeds are such.
    """
    near_the_best(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200, 300))
def test_close_to_the_best_homes_everywhere(seed: int) -> None:
    """Likewise."""
    near_the_best(seed)


def near_the_best(seed: int) -> None:
    rng = random.Random(seed)
    style, layers = rng.choice(STYLES), rng.randint(2, 4)
    given = problem(seed, layers, rng.uniform(0.7, 1.3), rng.choice((None, 0.3, 0.6, 1.0)))
    answers = (Offload(on_host=chosen, **style).solve(given).time_s for chosen in homes(given.graph))
    times = [time_s for time_s in answers if time_s is not None]
    solution = Offload(**style).solve(given)
    if not times:
        assert solution.time_s is None or solution.on_host
        return
    assert solution.time_s is not None
    # What need not leave stays, though the CPU could take its update off the device.
    updates_s = 0.0 if solution.on_host else sum(update.device_time_s for update in given.graph.updates)
    assert solution.time_s - updates_s <= min(times) * (1 + FARTHEST)


@pytest.mark.parametrize("seed", [2, 3, 6, 15, 18, 22, 23, 31, 33, 36])
def test_close_to_the_chain_dp(seed: int) -> None:
    """On chains without parameters, some where greedy eviction's orders alone were up to 12 % above.

    The whole is `benchmarks/offload_chains.py`.
    """
    rng = random.Random(seed)
    graph = random_chain(seed, rng.choice((5, 8, 12)))
    budget = int(rng.choice((0.5, 0.6, 0.7, 0.8, 0.9)) * noremat_peak_nbytes(graph))
    given = Problem(graph, budget, random_links(graph, seed))
    by_table, found = Pofo().solve(given).time_s, Offload().solve(given)
    if by_table is not None:
        check(given, STYLES[2], found)
        assert found.time_s <= by_table * (1 + FROM_TABLE)


def test_placement_neighbors_differ_in_up_to_three_parameters() -> None:
    """Each choice once, those that differ least first."""
    params = params_of(random_training(3, 4))
    chosen = list(placement_neighbors(params, frozenset()))
    assert len(set(chosen)) == len(chosen)
    counts = [sum(bool(homes & {p.index, *p.states}) for p in params) for homes in chosen]
    assert sorted(counts) == counts
    assert {1, 2, 3} == set(counts)
    every = set(homes(random_training(3, 4)))
    assert set(chosen) <= every - {frozenset()}


def test_states_leave_room_for_the_update_that_runs() -> None:
    """States fetched for later updates fill the device, but not what an update needs while it runs."""
    values = []
    ops = []
    optimized = []
    count = 6
    for i in range(count):
        values.append(Value(name=f"w{i}", nbytes=100, role=Role.PARAM, external=True))
    for i in range(count):
        values.append(Value(name=f"g{i}", nbytes=100, role=Role.GRAD, of=i))
    values.append(Value(name="y", nbytes=1, role=Role.OUTPUT))
    y = 2 * count
    forward = Implementation(inputs=range(count), outputs=(y,), time_s=1.0)
    ops.append(Op(name="f", target="f", implementations=[forward]))
    for i in range(count):
        only = Implementation(inputs=(i,), outputs=(count + i,), time_s=1.0)
        ops.append(Op(name=f"b{i}", target="b", backward=True, implementations=[only]))
        times = {"device_time_s": 0.1, "cpu_time_s": 50.0}
        workspace_nbytes = 90 if i < 2 else 10  # later ones need less, and are fetched while these wait
        optimized.append(Optimized(param=i, states=(("m", 100),), workspace_nbytes=workspace_nbytes, **times))
    graph = training_graph(Graph(name="s", values=values, ops=ops), optimized)
    on_host = {i for i, value in enumerate(graph.values) if value.role is Role.OPTIMIZER_STATE}
    placed = with_placement(graph, on_host)
    begun = Schedule.unplanned(placed)
    left_nbytes = simulate(placed, begun).live_nbytes[-1]
    links = Links(to_host_nbytes_per_s=100.0, to_device_nbytes_per_s=100.0)
    for headroom_nbytes in range(190, 700, 10):
        tail = optimizer_call_steps(placed, headroom_nbytes, links)
        schedule = Schedule([*begun.steps, *tail], begun.boundary, len(begun.steps))
        assert simulate(placed, schedule).peak_nbytes <= left_nbytes + headroom_nbytes


# What moves, and what does not.


def test_nothing_moves_where_all_fits_at_ease() -> None:
    """Whatever the links and the style."""
    for seed in range(6):
        for style in (STYLES[1], STYLES[4]):
            given = problem(seed, 5, 3.0)
            solution = Offload(**style).solve(given)
            assert solution.schedule is not None
            assert frozenset() == solution.on_host
            assert [] == moves(solution)
            assert given.graph.time_s * style["micro_batches"] <= solution.time_s
            assert 0 == solution.stats["moved_activations_nbytes"]


def test_nothing_moves_without_links() -> None:
    """What does not fit is then not found, and what fits is recomputed."""
    for seed in range(4):
        for fraction in (0.3, 2.0):
            given = attrs.evolve(problem(seed, 5, fraction), links=None)
            solution = Offload().solve(given)
            assert solution.feasible == (fraction > 1.0)
            assert not solution.on_host
            if solution.feasible:
                assert [] == moves(solution)


def test_a_slow_link_carries_what_it_must_and_no_more() -> None:
    """The same budget, links slower and slower: no sooner done, and with all the room in the world none."""
    for seed in (0, 2):
        given = problem(seed, 4, 0.8)
        times = []
        for rate in (1e15, 64.0, 4.0):
            links = Links(to_host_nbytes_per_s=rate, to_device_nbytes_per_s=rate)
            solution = Offload().solve(attrs.evolve(given, links=links))
            assert solution.time_s is not None
            times.append(solution.time_s)
        assert all(slower >= faster * (1 - WORTH) for faster, slower in pairwise(times))
        assert times[0] <= given.graph.time_s * 1.25  # updates alone are left
        assert [] == moves(Offload().solve(attrs.evolve(given, budget_nbytes=10**9)))


def test_states_pass_through_the_device_where_the_cpu_is_slow() -> None:
    """Fast links, and updates on the CPU that take as long as the step: of what is updated, states leave."""
    streams = 0
    for seed in range(4):
        graph = random_training(seed, 4)
        updates = [attrs.evolve(update, cpu_time_s=graph.time_s) for update in graph.updates]
        graph = attrs.evolve(graph, updates=updates)
        states = sum(value.nbytes for value in graph.values if value.role is Role.OPTIMIZER_STATE)
        budget = all_held_nbytes(accumulating(graph)) - states // 2
        links = Links(to_host_nbytes_per_s=1e6, to_device_nbytes_per_s=1e6)
        for style in (STYLES[0], STYLES[4]):
            given = Problem(graph, budget, links)
            solution = Offload(**style).solve(given)
            check(given, style, solution)
            assert not solution.on_host & {update.param for update in updates}
            streams += any(graph.values[v].role is Role.OPTIMIZER_STATE for v in solution.on_host)
    assert streams > 0


def test_frozen_parameters_leave_first_where_updates_are_dear() -> None:
    """They need no update: on links that carry all, a CPU that is slow makes them the ones to go."""
    for seed in (2, 5, 7):
        graph = random_training(seed, 6)
        updates = [
            attrs.evolve(update, cpu_time_s=graph.time_s, device_time_s=graph.time_s)
            for update in graph.updates
        ]
        graph = attrs.evolve(graph, updates=updates)
        updated = {update.param for update in graph.updates}
        frozen = {p.index for p in params_of(graph)} - updated
        assert frozen
        spare = min(graph.values[v].nbytes for v in frozen)
        links = Links(to_host_nbytes_per_s=1e6, to_device_nbytes_per_s=1e6)
        given = Problem(graph, all_held_nbytes(accumulating(graph)) - spare // 2, links)
        solution = Offload().solve(given)
        check(given, STYLES[2], solution)
        assert not solution.on_host & updated


def test_homes_that_are_settled_stay() -> None:
    """None, some, all; on the device is what was not named."""
    for seed in range(4):
        given = problem(seed, 4, 2.0)
        params = params_of(given.graph)
        some = frozenset((params[-1].index, *params[-1].states))
        everything = frozenset(v for param in params for v in (param.index, *param.states))
        for settled in (frozenset[int](), some, everything):
            solution = Offload(on_host=settled).solve(given)
            check(given, STYLES[2], solution)
            assert settled == solution.on_host
            there = with_placement(given.graph, settled)
            assert {i for i, v in enumerate(there.values) if v.placement is Placement.HOST} == settled


# Shortage, growth, time.


def test_a_shortage_names_budgets_that_work() -> None:
    """Of the device, of both; in every style."""
    short = 0
    for seed, style in enumerate(STYLES):
        for fraction, host_fraction in ((0.2, None), (0.6, 0.2)):
            given = problem(seed, 3, fraction, host_fraction)
            refused = Offload(**style).solve(given)
            if refused.feasible:
                continue
            short += 1
            assert Status.NOT_FOUND is refused.status
            assert (None, None) == (refused.schedule, refused.time_s)
            assert () == refused.explanation
            assert refused.shortage is not None
            assert refused.shortage.sufficient
            enough = attrs.evolve(given, budget_nbytes=refused.shortage.nbytes)
            if host_fraction is not None:
                enough = attrs.evolve(enough, host_budget_nbytes=refused.shortage.host_nbytes)
            assert enough.budget_nbytes >= given.budget_nbytes
            check(enough, style, Offload(**style).solve(enough))
    assert short >= 8


def test_a_fixed_placement_that_does_not_fit_is_reported() -> None:
    """With the budget that it needs."""
    for seed in range(4):
        given = problem(seed, 4, 0.4)
        refused = Offload(on_host=frozenset()).solve(given)
        assert not refused.feasible
        assert refused.shortage is not None
        enough = attrs.evolve(given, budget_nbytes=refused.shortage.nbytes)
        assert Offload(on_host=frozenset()).solve(enough).feasible


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_is_no_worse(seed: int) -> None:
    """But for what not moving is worth; what had a plan has one."""
    style = STYLES[seed]
    times = [
        Offload(**style).solve(problem(seed, 4, fraction)).time_s for fraction in (0.6, 0.7, 0.85, 1.0, 1.2)
    ]
    found = [time_s for time_s in times if time_s is not None]
    assert times[-len(found) :] == found
    assert len(found) >= 3
    assert all(more <= less * (1 + FARTHEST) for less, more in pairwise(found))


def test_past_its_deadline_it_answers_with_the_first_plan() -> None:
    """The plan is valid, and the result says that the deadline ended the search."""
    for seed, style in enumerate(STYLES):
        given, deadline = problem(seed, 4, 1.0), Deadline(0.0)
        first, whole = Offload(**style).solve(given, deadline), Offload(**style).solve(given)
        assert whole.time_s is not None
        assert first.time_s is not None
        check(given, style, first)
        assert first.stats["tried"] <= whole.stats["tried"]
        assert deadline.hit
        assert first.stats["deadline"]
        assert not whole.stats["deadline"]


def test_better_plans_are_told_as_they_come() -> None:
    """Each faster than the one before but for what not moving is worth; the last is the answer."""
    told: list[float] = []
    given = problem(4, 4, 0.8)
    deadline = Deadline(on_progress=lambda progress: told.append(progress.time_s or 0.0))
    solution = Offload().solve(given, deadline)
    assert solution.time_s == told[-1] == min(told)


def test_why_everything_is_where_it_is() -> None:
    """The lines name placements: without offloading, with values on the host, with streamed states."""
    at_ease = Offload().solve(problem(1, 4, 3.0))
    first, *rest = at_ease.explanation
    assert "all of it stays on the device" in first
    assert any("activations: none is swapped out; nothing is recomputed" in line for line in rest)
    tight = Offload().solve(problem(0, 4, 0.7))
    lines = tight.explanation
    assert "more than the device budget of" in lines[0] or "a part moves to the host" in lines[0]
    assert any("placed on the host" in line for line in lines)
    assert any("copies to the device" in line for line in lines)
    assert tight.stats["device_weights_nbytes"] + tight.stats["host_weights_nbytes"] == sum(
        value.nbytes for value in problem(0, 4, 0.7).graph.values if value.role is Role.PARAM
    )
    for lane in (Lane.TO_HOST, Lane.TO_DEVICE, Lane.CPU_OPTIMIZER):
        assert tight.stats[f"{lane.value}_hidden_s"] >= 0.0


@pytest.mark.parametrize("field", ["micro_batches", "candidates"])
def test_numbers_below_one_are_refused(field: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=field):
        Offload(**{field: 0})
