"""`monet` equals brute force over decisions and stages, and its ablations over those without a family."""

from itertools import chain, combinations

import cvxpy
import numpy as np
import pytest

from remat_graph import Graph, noremat_peak_nbytes, simulate, specialize, switches_on
from remat_graph.errors import UnknownFamily
from remat_graph.switches.conflicts import compatible, conflicts
from remat_graph.switches.families import families_in, without_families
from remat_graph.switches.specialize import family_of
from remat_graph.testing.random_graphs import random_chain
from remat_graph.testing.random_switches import with_random_switches
from remat_solvers import BadParameter, Deadline, Problem, get_solver, solve_switches
from remat_solvers.methods.checkmate import Checkmate
from remat_solvers.methods.monet import Monet
from remat_solvers.mip.cvxpy_backend import is_solution, minimize_with_cvxpy
from remat_solvers.mip.stage_program import stage_program, staged_step
from remat_solvers.testing import random_graph

from . import stage_oracle


def switched(seed: int, ops: int) -> Graph:
    """A random graph or a chain without in-place reuse, with up to three switches."""
    graph = random_chain(seed, 2) if seed % 2 else random_graph(seed, ops=ops, fancy=False)
    return with_random_switches(graph, seed, most=3)


def fastest_s(graph: Graph, budget: int, without: tuple[str, ...] = ()) -> float:
    """Of all decisions."""
    names = [switch for switch in graph.switches if family_of(switch) not in without]
    subsets = chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))
    found = conflicts(graph)
    possible = [on for on in subsets if compatible(found, on) == set(on)]
    return min(stage_oracle.fastest_s(specialize(graph, on).graph, budget) for on in possible)


def compare(seed: int, ops: int, share: float, without: tuple[str, ...] = ()) -> frozenset[str]:
    """The program's optimum beside the brute force's; the switches that are on."""
    graph = switched(seed, ops)
    budget = int(share * noremat_peak_nbytes(graph))
    without = tuple(name for name in without if name in families_in(graph))
    solution = solve_switches(Monet(without=without), Problem(graph, budget))
    least = fastest_s(graph, budget, without)
    if solution.schedule is None or solution.time_s is None:
        assert least == float("inf")
        return frozenset()
    assert least == pytest.approx(solution.time_s)
    timeline = simulate(graph, solution.schedule)
    assert (solution.time_s, solution.peak_nbytes) == (timeline.time_s, timeline.peak_nbytes)
    assert timeline.peak_nbytes <= budget
    assert solution.lower_bound_s <= solution.time_s
    return switches_on(graph, solution.schedule)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_monet_equals_brute_force(seed: int, share: float) -> None:
    """Over decisions and over what is kept from stage to stage."""
    compare(seed, 4 + seed % 4, share)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12, 150))
def test_monet_equals_brute_force_on_many(seed: int) -> None:
    """Of at most 9 ops."""
    for share in (0.5, 0.7, 0.85):
        compare(seed, 4 + seed % 6, share)


def test_switches_of_every_family_are_chosen() -> None:
    """Else the tests above would show little."""
    on = frozenset[str]().union(*(compare(seed, 6, 0.85) for seed in (1, 5, 13, 15, 29, 47, 51)))
    assert {"fused", "other", "mask", "split"} == set(map(family_of, on))


@pytest.mark.parametrize("family", ["fused", "other", "mask", "split"])
def test_ablations_leave_a_family_off(family: str) -> None:
    """And find the best of what remains."""
    for seed in (1, 5, 13, 15, 29, 51):
        on = compare(seed, 6, 0.85, (family,))
        assert family not in set(map(family_of, on))


@pytest.mark.parametrize("seed", [1, 5, 13, 29])
def test_an_ablation_is_the_plan_of_a_graph_without_the_family(seed: int) -> None:
    """As `remat sweep` draws it, for every method."""
    graph = switched(seed, 6)
    budget = int(0.85 * noremat_peak_nbytes(graph))
    for family in families_in(graph):
        one = Monet(without=(family,)).solve(Problem(graph, budget))
        two = solve_switches(Monet(), Problem(without_families(graph, {family}), budget))
        assert one.time_s == pytest.approx(two.time_s)


def test_families_that_the_graph_lacks_are_refused() -> None:
    """Before the work, in one line with what it has; also where it has none at all."""
    graph = switched(1, 6)
    with pytest.raises(UnknownFamily, match=r"'fusde' \(did you mean fused\?\): it has fused, mask"):
        Monet(without=("fusde",)).solve(Problem(graph, 1))
    plain = random_graph(1, ops=6, fancy=False)
    with pytest.raises(UnknownFamily, match="'mask': it has no other ways to run ops"):
        Monet(without=("mask",)).solve(Problem(plain, 1))


@pytest.mark.parametrize("without", ["mask", ("",), (3,), 3])
def test_what_is_no_list_of_families_is_refused(without: object) -> None:
    """A string would be a list of letters."""
    with pytest.raises(BadParameter, match="solver 'monet': "):
        get_solver("monet", without=without)
    assert Monet(without=("mask",)) == get_solver("monet", without=["mask"])


@pytest.mark.parametrize("seed", range(6))
def test_without_switches_it_is_checkmate(seed: int) -> None:
    """The same optimum."""
    graph = random_graph(seed, ops=7, fancy=False)
    problem = Problem(graph, int(0.75 * noremat_peak_nbytes(graph)))
    one, two = Monet().solve(problem), Checkmate().solve(problem)
    assert one.feasible == two.feasible
    assert (two.time_s, two.schedule) == (one.time_s, one.schedule)


def test_below_the_floor_of_every_decision_nothing_is_branched_on() -> None:
    """As in the other exact methods."""
    solution = Monet().solve(Problem(switched(1, 6), 0))
    assert (None, {"proven": True}) == (solution.order, dict(solution.stats))


def test_a_deadline_that_has_passed_is_reported() -> None:
    """Nothing is found, and nothing is proven."""
    graph, deadline = switched(1, 6), Deadline(0.0)
    solution = Monet().solve(Problem(graph, int(0.9 * noremat_peak_nbytes(graph))), deadline)
    assert solution.schedule is None
    assert solution.stats["proven"] is False
    assert deadline.hit


def test_an_unknown_backend_is_refused() -> None:
    """In one line that names those that can."""
    graph = switched(1, 6)
    with pytest.raises(BadParameter, match="no such mixed-integer solver installed"):
        Monet(backend="NOPE").solve(Problem(graph, int(0.9 * noremat_peak_nbytes(graph))))


def test_what_a_stopped_solver_leaves_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose time is up may have a point that breaks its rows: no plan, and no error."""
    graph = switched(3, 7)
    budget = int(0.75 * noremat_peak_nbytes(graph))
    assert solve_switches(Monet(), Problem(graph, budget)).feasible

    def stopped(problem: cvxpy.Problem, **_: object) -> None:
        for variable in problem.variables():
            variable.value = np.zeros(variable.shape)

    monkeypatch.setattr(cvxpy.Problem, "solve", stopped)
    for name in ("monet", "checkmate"):
        assert not solve_switches(get_solver(name), Problem(graph, budget), Deadline(60)).feasible


def test_solutions_are_told_from_other_points() -> None:
    """By rows, limits of variables, and whole numbers."""
    graph = random_graph(3, ops=6, fancy=False)
    program = stage_program(staged_step(graph), noremat_peak_nbytes(graph), Deadline())
    found, _, proven = minimize_with_cvxpy(program, whole=True, solver="HIGHS", deadline=Deadline())
    assert proven
    assert found is not None
    assert is_solution(program, found)
    assert not is_solution(program, np.zeros_like(found))
    assert not is_solution(program, found - 0.01)
    half = found.copy()
    half[program.integral[0]] = 0.5
    assert not is_solution(program, half)
