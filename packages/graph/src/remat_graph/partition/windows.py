"""Cut the forward into groups of about equal length: once in each of n windows, where fewest bytes cross.

This works for every graph; use it for a fast method that needs many groups. O(ops + values).
"""

from itertools import pairwise

import numpy as np

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, crossing_nbytes, cut


def at_narrow_places(graph: Graph, most: int) -> Partition:
    """Cut once in each of `most` >= 1 windows, where fewest bytes cross; at most `most + 1` groups."""
    crossing = np.array(crossing_nbytes(graph))
    ops = len(crossing) - 1
    edges = np.linspace(1, ops, min(most, ops) + 1).astype(int).tolist()
    places = {int(a + np.argmin(crossing[a:b])) for a, b in pairwise(edges) if b > a}
    return cut(graph, sorted(places - {0, ops}))
