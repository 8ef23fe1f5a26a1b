"""What a caller may rely on: determinism, deadlines, helpful infeasibility, odd costs."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import attrs
import pytest

from remat_graph import Graph, load_graph, noremat_peak_nbytes, simulate
from remat_solvers import Deadline, InfeasibleBudget, Problem, Status, get_solver, min_budget, solve
from remat_solvers.testing import chain, random_graph, unet

from .corpus import GRAPHS


def test_same_seed_same_schedule() -> None:
    """Two runs with the same work limit agree op for op."""
    graph = unet(4)
    problem = Problem(graph, int(0.7 * noremat_peak_nbytes(graph)))
    first, second = (get_solver("auto", moves=30_000, seed=3).solve(problem) for _ in range(2))
    assert first.order is not None
    assert first.order == second.order


def test_a_deadline_is_kept_and_recorded(
    hang_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    """Past it the best valid schedule comes back, and `hit` says so."""
    graph = chain(40)
    problem = Problem(graph, int(0.3 * noremat_peak_nbytes(graph)))
    get_solver("auto", moves=1000).solve(problem)  # compile
    deadline = Deadline(0.5)
    with hang_limit(3):
        solution = get_solver("auto", moves=10**9, gap=0.0).solve(problem, deadline)
    assert solution.feasible
    assert deadline.hit


@pytest.mark.parametrize("graph", [unet(4), chain(24), random_graph(5, ops=12)], ids=lambda graph: graph.name)
def test_the_smallest_budget_works_and_less_than_the_floor_is_refused(graph: Graph) -> None:
    """What the error names can be used as it stands."""
    smallest = min_budget(graph)
    assert smallest.floor_nbytes <= smallest.nbytes <= noremat_peak_nbytes(graph)
    assert simulate(graph, smallest.schedule).peak_nbytes == smallest.nbytes
    assert solve(graph, smallest.nbytes, moves=1000).feasible
    too_small = smallest.floor_nbytes - 1
    assert get_solver("auto").solve(Problem(graph, too_small)).status is Status.INFEASIBLE
    with pytest.raises(InfeasibleBudget, match="no schedule can fit it") as caught:
        solve(graph, too_small)
    assert smallest.nbytes == caught.value.smallest_nbytes
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("budget_nbytes", "said"), [(20, '"20GiB" is a size, "20%" a share'), (1024, "raise the")]
)
def test_only_a_bare_number_is_taken_for_a_missing_unit(budget_nbytes: int, said: str) -> None:
    """1 KiB, which the user wrote with a unit, is not answered with 1024 GiB."""
    graph = chain(6)
    error = min_budget(graph).as_error(budget_nbytes, graph)
    assert said in str(attrs.evolve(error, smallest_nbytes=2**30))


@pytest.mark.parametrize("factor", [0, 10**15])
def test_odd_sizes_and_costs(factor: int) -> None:
    """Costs of zero and sizes of 1e15 bytes break nothing."""
    plain = chain(12)
    values = [attrs.evolve(value, nbytes=value.nbytes * max(1, factor // 10**3)) for value in plain.values]
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(op.first, time_s=op.first.time_s * factor)])
        for op in plain.ops
    ]
    graph = Graph(name="odd", values=values, ops=ops)
    solution = get_solver("auto", moves=5000).solve(Problem(graph, int(0.6 * noremat_peak_nbytes(graph))))
    assert solution.time_s is not None
    assert solution.time_s >= solution.lower_bound_s


@pytest.mark.parametrize(
    ("name", "fraction"),
    [("gpt2", 0.553), ("vgg16", 0.5), pytest.param("gpt2_nohead", 0.07, marks=pytest.mark.full)],
)
def test_budgets_that_must_be_met(name: str, fraction: float) -> None:
    """Near the floor of real graphs a schedule is found, with little search."""
    graph = load_graph(GRAPHS / f"{name}.json")
    budget = int(fraction * noremat_peak_nbytes(graph))
    solution = get_solver("auto", moves=1000).solve(Problem(graph, budget))
    assert solution.schedule is not None
    assert simulate(graph, solution.schedule).peak_nbytes <= budget
