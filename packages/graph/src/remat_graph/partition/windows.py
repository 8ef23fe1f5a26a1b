"""Cuts at narrow places: in each of so many equal windows of the forward, where fewest bytes cross.

Groups of about equal length, whatever the graph looks like: the first choice for a fast method that wants
many of them. O(ops + bytes crossing).
"""

from itertools import pairwise

import numpy as np

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, crossing_nbytes, cut


def narrow_places(graph: Graph, most: int) -> list[int]:
    """One place in the list of forward ops per window."""
    crossing = np.array(crossing_nbytes(graph))
    ops = len(crossing) - 1
    edges = np.linspace(1, ops, min(most, ops) + 1).astype(int).tolist()
    places = {int(a + np.argmin(crossing[a:b])) for a, b in pairwise(edges) if b > a}
    return sorted(places - {0, ops})


def at_narrow_places(graph: Graph, most: int) -> Partition:
    """Cut once in each of `most` windows, where fewest bytes cross.

    Args:
        graph: the graph.
        most: windows, at least 1; there is at most one group more.
    """
    return cut(graph, narrow_places(graph, most))
