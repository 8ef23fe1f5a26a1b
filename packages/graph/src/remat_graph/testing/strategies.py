"""Hypothesis strategies for graphs and schedules."""

from typing import TYPE_CHECKING

from remat_graph.ir import Graph
from remat_graph.schedule import Schedule
from remat_graph.testing.random_graphs import random_graph
from remat_graph.testing.random_schedules import random_order

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def graphs(max_forward_ops: int = 12) -> "SearchStrategy[Graph]":
    """Strategy of `random_graph`; it shrinks towards few ops."""
    from hypothesis import strategies as st

    return st.builds(random_graph, st.integers(0, 2**32 - 1), st.integers(1, max_forward_ops))


def schedules(max_forward_ops: int = 12) -> "SearchStrategy[tuple[Graph, Schedule]]":
    """Strategy of graphs with a schedule that recomputes values."""
    from hypothesis import strategies as st

    def with_order(graph: Graph, seed: int, forget: float) -> tuple[Graph, Schedule]:
        return graph, Schedule.from_order(graph, random_order(graph, seed, forget=forget))

    forget = st.sampled_from((0.0, 0.1, 0.3, 0.6))
    return st.builds(with_order, graphs(max_forward_ops), st.integers(0, 2**32 - 1), forget)
