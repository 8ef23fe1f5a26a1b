"""On tiny graphs no solver is below a brute force over any order, and no lower bound above it."""

import importlib.util
from pathlib import Path

import pytest

from remat_graph import Schedule, simulate
from remat_solvers import Problem, Status, get_solver
from remat_solvers.bounds import budget_floor, lower_bound
from remat_solvers.families import random_graph

_spec = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("oracle.py"))
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

SOLVERS = ("noremat", "chen_sqrt", "greedy", "interval_dp", "search", "auto")


@pytest.mark.parametrize("seed", range(40))
def test_solvers_and_bounds_against_brute_force(seed: int) -> None:
    """Every method at four budgets."""
    graph = random_graph(seed, ops=2 + seed % 6, fancy=False)
    peak = simulate(graph, Schedule.from_order(graph, range(len(graph.ops)))).peak_nbytes
    for fraction in (0.5, 0.7, 0.85, 1.0):
        budget = int(fraction * peak)
        least = oracle.fastest_s(graph, budget)
        assert lower_bound(graph, budget) <= least + 1e-9
        if least < float("inf"):
            assert budget_floor(graph).nbytes <= budget
        for name in SOLVERS:
            parameters = {"moves": 2000} if name in ("search", "auto") else {}
            solution = get_solver(name, **parameters).solve(Problem(graph, budget))
            assert solution.lower_bound_s <= least + 1e-9
            if solution.time_s is not None:
                assert solution.peak_nbytes is not None
                assert solution.peak_nbytes <= budget
                assert solution.time_s >= least - 1e-9
            if solution.status is Status.OPTIMAL:
                assert solution.time_s == pytest.approx(least)
            if solution.status is Status.INFEASIBLE:
                assert least == float("inf")
