"""Odd costs and odd graphs break no solver: a valid answer within the budget or none, and twice the same."""

from collections.abc import Callable

import attrs
import pytest

from remat_graph import Graph, Implementation, Op, Value, noremat_peak_nbytes, simulate
from remat_solvers import Deadline, Problem, Status, get_solver, solver_names
from remat_solvers.testing import random_graph

QUICK: dict[str, dict[str, object]] = {
    "auto": {"moves": 1000},
    "search": {"moves": 1000},
    "hiremate": {"moves": 200, "leaf": 6, "levels": 2},
    "rockmate": {"levels": 2},
    "hilp": {"leaf": 6, "levels": 2, "segments": 3},
}


def scaled(graph: Graph, time: float | None = None, nbytes: int | None = None) -> Graph:
    """Every time or size multiplied; 0 makes them all zero."""

    def way(found: Implementation) -> Implementation:
        return attrs.evolve(
            found,
            time_s=found.time_s if time is None else found.time_s * time,
            workspace_nbytes=found.workspace_nbytes * (1 if nbytes is None else nbytes),
        )

    return attrs.evolve(
        graph,
        values=[attrs.evolve(v, nbytes=v.nbytes * (1 if nbytes is None else nbytes)) for v in graph.values],
        ops=[attrs.evolve(op, implementations=[way(w) for w in op.implementations]) for op in graph.ops],
    )


def one_op() -> Graph:
    """Nothing to decide."""
    op = Op(name="f", target="f", implementations=[Implementation(inputs=[], outputs=[0], time_s=1.0)])
    return Graph(name="one", values=[Value(name="v", nbytes=8)], ops=[op])


def forward_only() -> Graph:
    """A chain without a backward."""
    values = [Value(name=f"v{i}", nbytes=4 + i) for i in range(5)]
    ops = [
        Op(
            name=f"f{i}",
            target="f",
            implementations=[Implementation(inputs=[i - 1] if i else [], outputs=[i], time_s=1.0)],
        )
        for i in range(5)
    ]
    return Graph(name="forward", values=values, ops=ops)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain": lambda: random_graph(3, ops=12),
    "no_time": lambda: scaled(random_graph(4, ops=10), time=0.0),
    "tiny_times": lambda: scaled(random_graph(5, ops=10), time=1e-15),
    "no_bytes": lambda: scaled(random_graph(6, ops=10), nbytes=0),
    "huge_bytes": lambda: scaled(random_graph(7, ops=10, fancy=False), nbytes=10**15),
    "one_op": one_op,
    "forward_only": forward_only,
}


@pytest.mark.parametrize("name", solver_names())
@pytest.mark.parametrize("graph", GRAPHS)
def test_odd_costs(name: str, graph: str) -> None:
    """Within the budget, with true claims, and the same again."""
    made = GRAPHS[graph]()
    peak = noremat_peak_nbytes(made)
    for budget in {0, peak // 2, int(0.8 * peak), peak}:
        first, second = (
            get_solver(name, **QUICK.get(name, {})).solve(Problem(made, budget), Deadline(20))
            for _ in range(2)
        )
        assert first.order == second.order
        if first.schedule is not None:
            assert simulate(made, first.schedule).peak_nbytes <= budget
            assert first.time_s is not None
            assert first.time_s >= first.lower_bound_s * (1 - 1e-12)
        if first.status is Status.INFEASIBLE:
            assert first.schedule is None
        if budget == peak:
            assert first.status is Status.OPTIMAL
