"""`pofo` beside brute force, beside rotor, and at the ends of what links can be."""

from itertools import count, pairwise

import attrs
import numpy as np
import pytest

from remat_graph import Graph, Links, Start, noremat_peak_nbytes, simulate
from remat_graph.partition import at_articulations
from remat_graph.testing.random_graphs import random_chain, random_graph
from remat_graph.testing.random_training import random_links, streamed
from remat_solvers import Deadline, Problem, Solution, Status
from remat_solvers.chain.offload_labels import FIELDS, drain, held, in_both_queues, join, undominated, waits
from remat_solvers.methods.pofo import Pofo
from remat_solvers.methods.rotor import Rotor
from remat_solvers.testing import chain, mobile, unet
from remat_solvers.transfers.idle_intervals import idle_intervals
from remat_solvers.transfers.placement import schedule_transfers

from . import lane_oracle, plan_oracle
from .test_robust import GRAPHS

FARTHEST = 0.04  # from the optimum, as a ratio of the time; seen once on 192 chains of 3 stages


def both(to_host: float, to_device: float) -> Links:
    return Links(to_host_nbytes_per_s=to_host, to_device_nbytes_per_s=to_device)


def problem(seed: int, stages: int, fraction: float) -> Problem:
    graph = random_chain(seed, stages)
    return Problem(graph, int(fraction * noremat_peak_nbytes(graph)), random_links(graph, seed))


def check(given: Problem, solution: Solution) -> None:
    """What it says is what the referee says."""
    assert solution.schedule is not None
    timeline = simulate(given.graph, solution.schedule, links=given.links)
    assert (timeline.time_s, timeline.peak_nbytes) == (solution.time_s, solution.peak_nbytes)
    assert timeline.peak_nbytes <= given.budget_nbytes
    assert given.host_budget_nbytes is None or timeline.host_peak_nbytes <= given.host_budget_nbytes


@pytest.mark.parametrize("seed", range(16))
def test_close_to_brute_force_and_never_better(seed: int) -> None:
    """Over rotor's orders with any copies at any time; three stages in two budgets."""
    for fraction in (0.7, 0.85):
        given = problem(seed, 3, fraction)
        solution = Pofo().solve(given)
        groups = at_articulations(given.graph, 64)
        plans = plan_oracle.chain_plans(0, len(groups))
        orders = plan_oracle.orders(groups, plans, plan_oracle.whole(groups))
        assert given.links is not None
        if solution.time_s is None:
            assert solution.schedule is None
            continue
        check(given, solution)
        above_s = solution.time_s * (1 + 1e-9)  # the oracle has to come below this by itself
        best_s = lane_oracle.fastest_of(given.graph, orders, given.budget_nbytes, given.links, above_s)
        assert best_s < above_s
        assert solution.time_s <= best_s * (1 + FARTHEST)


@pytest.mark.parametrize("seed", range(6))
def test_more_memory_or_faster_links_are_no_worse(seed: int) -> None:
    """On six stages, but for what the rounding of the table may cost."""
    times = [Pofo().solve(problem(seed, 6, fraction)).time_s for fraction in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    found = [time_s for time_s in times if time_s is not None]
    assert times[-len(found) :] == found
    assert all(more <= less * 1.01 for less, more in pairwise(found))
    given = problem(seed, 6, 0.7)
    assert given.links is not None
    by_rate = []
    for factor in (0.25, 1.0, 4.0, 16.0):
        to_host, to_device = given.links.to_host_nbytes_per_s, given.links.to_device_nbytes_per_s
        links = both(to_host * factor, to_device * factor)
        by_rate.append(Pofo().solve(attrs.evolve(given, links=links)).time_s)
    if None not in by_rate:
        assert all(more <= less * 1.01 for less, more in pairwise(by_rate))


@pytest.mark.parametrize("links", [None, both(1e-9, 25e9), both(25e9, 1e-9), both(1e-9, 1e-9)])
def test_without_a_link_it_is_rotor(links: Links | None) -> None:
    """No link, one that carries nothing, one that carries next to nothing."""
    for seed in range(4):
        given = attrs.evolve(problem(seed, 6, 0.7), links=links)
        expected, found = Rotor().solve(given), Pofo().solve(given)
        assert expected.order == found.order
        assert expected.time_s == found.time_s


@pytest.mark.parametrize("seed", range(6))
def test_a_fast_link_costs_nothing(seed: int) -> None:
    """If the schedule that swaps every movable value fits, nothing is recomputed."""
    graph = random_chain(seed, 10)
    order, links = range(len(graph.ops)), both(1e15, 1e15)
    least = simulate(
        graph, schedule_transfers(graph, order, idle_intervals(graph, order), 0, links), links=links
    ).peak_nbytes
    solution = Pofo().solve(Problem(graph, least, links))
    assert solution.overhead is not None
    assert solution.overhead < 1e-6


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_the_host_budget_is_kept(share: float) -> None:
    """A part of what moves without one; with none of it nothing moves."""
    for seed in range(4):
        given = problem(seed, 8, 0.6)
        free = Pofo().solve(given)
        assert free.schedule is not None
        used = simulate(given.graph, free.schedule, links=given.links).host_peak_nbytes
        tight = attrs.evolve(given, host_budget_nbytes=int(share * used))
        found = Pofo().solve(tight)
        check(tight, found)
        assert found.time_s is not None
        assert free.time_s <= found.time_s * 1.01
        if share == 0.0:
            assert found.schedule is not None
            assert not any(isinstance(step, Start) for step in found.schedule.steps)


@pytest.mark.parametrize("graph", [unet(3), mobile(5), chain(24, skips=4), chain(30)], ids=lambda g: g.name)
def test_any_graph_is_as_good_as_rotor_or_better(graph: Graph) -> None:
    """Chain or not."""
    peak = noremat_peak_nbytes(graph)
    rate = 2 * peak / graph.time_s
    for fraction in (0.5, 0.8):
        given = Problem(graph, int(fraction * peak), both(rate, rate))
        plain, found = Rotor().solve(given), Pofo().solve(given)
        if plain.time_s is not None:
            assert found.time_s is not None
            assert found.time_s <= plain.time_s
        if found.feasible:
            check(given, found)


@pytest.mark.parametrize("name", GRAPHS)
def test_odd_costs(name: str) -> None:
    """Zeros, huge sizes, one op, no backward, random graphs with everything the memory rule knows."""
    graph = GRAPHS[name]()
    peak = noremat_peak_nbytes(graph)
    rate = 1.0 + peak / max(graph.time_s, 1e-12)
    for budget in {0, peak // 2, int(0.8 * peak)}:
        given = Problem(graph, budget, both(rate, rate))
        solution = Pofo().solve(given)
        if solution.feasible:
            check(given, solution)


def test_weights_on_the_host_are_streamed_in() -> None:
    """Nothing else could run them, and they are no activations of the plan."""
    for seed in range(4):
        graph = streamed(random_graph(seed, 12), seed)
        given = Problem(graph, 2 * noremat_peak_nbytes(random_graph(seed, 12)) + 2000, both(500.0, 500.0))
        solution = Pofo().solve(given)
        check(given, solution)


def test_moving_beats_making_again_alone() -> None:
    """On thirty unlike stages in half the memory."""
    given = problem(3, 30, 0.5)
    plain, found = Rotor().solve(given).overhead, Pofo().solve(given).overhead
    assert plain is not None
    assert found is not None
    assert found < 0.6 * plain


def test_twice_the_same() -> None:
    """Step by step."""
    given = problem(1, 12, 0.6)
    assert Pofo().solve(given).schedule == Pofo().solve(given).schedule


def test_past_its_deadline_it_is_rotor() -> None:
    """The best plan so far, if rotor had time; its checks of the deadline are counted here."""
    given, clock = problem(1, 12, 0.6), count(0.0)
    rotor = Rotor().solve(given, Deadline(1e9, clock=clock.__next__))
    looks, clock = next(clock), count(0.0)
    deadline = Deadline(looks, clock=clock.__next__)
    assert rotor.time_s == Pofo().solve(given, deadline).time_s is not None
    assert deadline.hit


def test_what_fits_is_not_planned() -> None:
    """The unplanned step is optimal."""
    given = problem(0, 6, 1.0)
    assert Status.OPTIMAL is Pofo().solve(given).status


# The queues of the table.


def test_a_queue_goes_through_in_turn() -> None:
    """First in, first out; a value is held whole until it is copied; a full queue merges the oldest."""
    labels = np.zeros(1, FIELDS)
    for name, nbytes in enumerate((10, 20, 30)):
        join(labels, "out", nbytes, name)
    assert 60 == held(labels, "out").sum()
    assert [0] == waits(labels["out_left"], held(labels, "out"), np.array([60.0]))
    assert [10] == waits(labels["out_left"], held(labels, "out"), np.array([55.0]))
    assert [30] == waits(labels["out_left"], held(labels, "out"), np.array([30.0]))
    assert [np.inf] == waits(labels["out_left"], held(labels, "out"), np.array([-1.0]))
    drain(labels, "out", 15.0)
    assert 50 == held(labels, "out").sum()
    assert 45 == labels["out_left"].sum()
    for name in range(3, 8):
        join(labels, "out", 1, name)
    assert 55 == held(labels, "out").sum()
    assert [45] == waits(labels["out_left"], held(labels, "out"), np.array([5.0]))


def test_a_small_value_goes_ahead_of_a_large_one_that_has_not_begun() -> None:
    """Only of the last one, and not if it is larger itself."""
    labels = np.zeros(1, FIELDS)
    for name, nbytes in enumerate((10, 30, 20)):
        join(labels, "out", nbytes, name, overtakes=True)
    assert [0, 2, 1] == labels["out_name"][0, -3:].tolist()
    drain(labels, "out", 35.0)
    join(labels, "out", 5, 3, overtakes=True)
    assert [2, 1, 3] == labels["out_name"][0, -3:].tolist()
    assert [0, 25, 5] == labels["out_left"][0, -3:].tolist()
    join(labels, "back", 30, 1)
    assert [False, True, False] == in_both_queues(labels, "out")[0, -3:].tolist()


def test_labels_that_others_beat_go() -> None:
    """In time or bytes every one that is left is ahead of every other."""
    rng = np.random.default_rng(0)
    labels = np.zeros(400, FIELDS)
    labels["lost_s"], labels["kept"] = rng.integers(0, 50, 400), rng.integers(0, 50, 400)
    found = undominated(labels, 50, 300, np.inf, host=False)
    pairs = set(zip(labels["lost_s"], labels["kept"], strict=True))
    front = {p for p in pairs if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in pairs)}
    assert front == set(zip(found["lost_s"], found["kept"], strict=True))
    assert len(front) == len(found)
    assert len(undominated(labels, 50, 3, np.inf, host=False)) <= 3
