"""On tiny graphs no solver is below a brute force over any order, and no lower bound above it."""

import pytest

from remat_graph import noremat_peak_nbytes
from remat_solvers import Problem, Status, get_solver
from remat_solvers.bounds import budget_floor, lower_bound, tight_bound
from remat_solvers.testing import random_graph

from . import oracle

SOLVERS = (
    *("noremat", "checkpoint_ap", "chen_sqrt", "chen_sqrt_linear", "chen_greedy", "chen_greedy_linear"),
    *("greedy", "griewank", "mincut", "interval_dp", "rotor", "twremat", "search", "auto"),
)
PROGRAMS = ("checkmate", "checkmate_lp", "monet", "moccasin", "rockmate", "hilp", "hiremate")
QUICK: dict[str, dict[str, object]] = {
    "search": {"moves": 2000},
    "auto": {"moves": 2000},
    "rockmate": {"levels": 2},
    "hilp": {"leaf": 4, "levels": 2, "segments": 3},
    "hiremate": {"leaf": 4, "levels": 2, "moves": 200},
}


@pytest.mark.parametrize("seed", range(40))
def test_solvers_and_bounds_against_brute_force(seed: int) -> None:
    """Every method that needs no integer program, at the floor, below it, and between it and the peak."""
    compare(seed, SOLVERS)


@pytest.mark.parametrize("seed", range(10))
def test_integer_programs_against_brute_force(seed: int) -> None:
    """The others, on fewer graphs."""
    compare(seed, PROGRAMS)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40, 540))
def test_all_against_brute_force(seed: int) -> None:
    """All of them on 500 more."""
    compare(seed, (*SOLVERS, *PROGRAMS))


def compare(seed: int, names: tuple[str, ...]) -> None:
    """No answer below the brute force over any order, no bound above it, no false claim."""
    graph = random_graph(seed, ops=2 + seed % 11, fancy=False)
    peak = noremat_peak_nbytes(graph)
    floor = budget_floor(graph).nbytes
    for budget in (floor - 1, *(floor + int(part * (peak - floor)) for part in (0.0, 0.4, 0.8))):
        least = oracle.fastest_s(graph, budget)
        assert lower_bound(graph, budget) <= least + 1e-9
        assert tight_bound(graph, budget) <= least + 1e-9
        if budget < floor:
            assert least == float("inf")
        for name in names:
            solution = get_solver(name, **QUICK.get(name, {})).solve(Problem(graph, budget))
            assert solution.lower_bound_s <= least + 1e-9
            if solution.time_s is not None:
                assert solution.peak_nbytes is not None
                assert solution.peak_nbytes <= budget
                assert solution.time_s >= least - 1e-9
            if solution.status is Status.OPTIMAL:
                assert solution.time_s == pytest.approx(least)
            if solution.status is Status.INFEASIBLE:
                assert least == float("inf")
