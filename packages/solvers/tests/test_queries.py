"""The curve of a graph, the smallest budget, and the largest batch."""

import json

import attrs
import pytest

from remat_graph import Graph, noremat_peak_nbytes
from remat_solvers import (
    Carried,
    Deadline,
    Problem,
    Solution,
    Solver,
    budgets_of,
    max_batch,
    min_budget,
    pareto,
    solve_switches,
)
from remat_solvers.testing import layer_graph, random_graph

from .corpus import ORACLES

VGG19 = ORACLES / "VGG19_flops_b1.json"


def vgg19(batch: int) -> Graph:
    """Checkmate's VGG19 at a batch size: bytes and times grow with it."""
    graph = layer_graph(json.loads(VGG19.read_text()))
    return attrs.evolve(
        graph,
        values=[attrs.evolve(v, nbytes=v.nbytes * batch) for v in graph.values],
        ops=[
            attrs.evolve(
                op, implementations=[attrs.evolve(w, time_s=w.time_s * batch) for w in op.implementations]
            )
            for op in graph.ops
        ],
    )


ROOM = 16_000_000_000 - 1_149_337_920  # what 16e9 bytes leave beside parameters and their gradients


def test_a_curve_falls_and_stays_above_its_bound() -> None:
    """A larger budget never costs more: each begins with the plan of the one before."""
    graph = random_graph(5, ops=24)
    points = pareto(graph, moves=2000)
    overheads = [point.solution.overhead for point in points]
    assert [p.budget_nbytes for p in points] == sorted(budgets_of(graph))
    assert points[0].budget_nbytes == min_budget(graph).nbytes
    assert points[-1].budget_nbytes == noremat_peak_nbytes(graph)
    assert None not in overheads
    assert overheads == sorted(overheads, reverse=True)  # type: ignore[type-var]
    assert overheads[-1] == 0
    for point in points:
        assert point.solution.overhead is not None
        assert point.solution.overhead >= point.solution.lower_bound_overhead - 1e-9


def test_the_largest_batch_without_recomputing() -> None:
    """222 on VGG19 with 16e9 bytes, every value freed after its last use; 223 is refused."""
    found = max_batch(vgg19, ROOM, solver="noremat")
    assert (found.batch, found.refused) == (222, 223)


@pytest.mark.parametrize("accounting", ["referee", "paper"])
def test_the_largest_batch_of_checkmate(accounting: str) -> None:
    """289, Checkmate's published figure, at one extra forward at most; 290 is refused."""
    graph = vgg19(1)
    forward = sum(op.first.time_s for op in graph.ops if not op.backward)
    found = max_batch(
        vgg19,
        ROOM,
        solver="checkmate",
        max_overhead=forward / graph.time_s,
        seconds=60,
        accounting=accounting,
    )
    assert (found.batch, found.refused) == (289, 290)


def test_no_size_is_left_out_and_none_beyond_the_most() -> None:
    """All sizes fit: the most is the answer; a first size that is refused ends it."""
    assert max_batch(vgg19, ROOM, solver="noremat", most=100).batch == 100
    assert max_batch(vgg19, ROOM, solver="noremat", first=3).batch == 222
    assert max_batch(vgg19, ROOM, solver="noremat", first=300).batch == 0


def test_a_carried_plan_has_the_bound_of_the_search() -> None:
    """Also where it is the faster one: it bounds nothing by itself."""
    slow = 1.0  # seconds that the search of the largest size is worse by

    def solve(solver: Solver, problem: Problem, deadline: Deadline | None) -> Solution:
        made = solve_switches(solver, problem, deadline)
        carried = solver.name == "carried"
        return made if carried or made.time_s is None else attrs.evolve(made, time_s=made.time_s + slow)

    budget_nbytes = 40 * noremat_peak_nbytes(vgg19(1))
    found = max_batch(vgg19, budget_nbytes, moves=2000, solve=solve, max_overhead=9.0)
    assert found.solution is not None
    assert found.solution.stats["method"] == "carried"
    assert found.solution.lower_bound_s >= vgg19(found.batch).time_s


def test_larger_batches_begin_with_the_plan_of_the_one_before() -> None:
    """The solver runs for the first size, for those that a carried plan does not fit, and for the largest."""
    runs: list[tuple[int, str]] = []
    budget_nbytes = 40 * noremat_peak_nbytes(vgg19(1))

    def solve(solver: Solver, problem: Problem, deadline: Deadline | None) -> Solution:
        runs.append((noremat_peak_nbytes(problem.graph) // noremat_peak_nbytes(vgg19(1)), solver.name))
        return solve_switches(solver, problem, deadline)

    found = max_batch(vgg19, budget_nbytes, moves=2000, solve=solve)
    alone = max_batch(vgg19, budget_nbytes, moves=2000, solver="search")
    assert found.batch >= alone.batch
    assert found.solution is not None
    assert found.solution.stats["method"] != Carried.name
    searched = [batch for batch, name in runs if name == "auto"]
    assert searched[0] == 1
    assert searched[-1] == found.batch
    assert len(searched) < len({batch for batch, _ in runs})


def test_nothing_fits() -> None:
    """A budget below the floor of one sample."""
    found = max_batch(vgg19, 1000, solver="noremat")
    assert (found.batch, found.solution, found.refused) == (0, None, 1)
