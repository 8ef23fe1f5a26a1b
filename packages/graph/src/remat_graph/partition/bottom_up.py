"""Group forward ops bottom-up: start with single ops, and merge adjacent groups.

This follows HiRemate's partitioner (hierarchical rematerialization). Each round merges the two adjacent
groups whose union has the smallest score: the bytes that cross its two ends, times its number of ops; an end
of the graph counts like the other end. So groups end where few bytes cross, and of equally narrow groups the
smaller one grows first. Equal layers have equal scores, so they are grouped alike until the last few merges.
The merging stops at `most` groups.

Groups are intervals of the trace; HiRemate merges any two nodes whose union leaves the graph acyclic.
O(ops log ops).
"""

from heapq import heapify, heappop, heappush

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, crossing_nbytes, cut


def grouped(graph: Graph, most: int) -> Partition:
    """Merge single ops into at most `most` groups."""
    crossing = crossing_nbytes(graph)
    ops = len(crossing) - 1
    end = list(range(1, ops + 1))  # per group, which is named by its first op: the op after its last
    begin = list(range(-1, ops))  # per group, the group before it
    alive = [True] * ops
    left = ops

    def candidate(first: int, stop: int) -> tuple[int, int, int]:
        ends = [crossing[place] for place in (first, stop) if 0 < place < ops]
        return max(1, sum(ends) * (3 - len(ends))) * (stop - first), first, stop

    heap = [candidate(first, first + 2) for first in range(ops - 1)]
    heapify(heap)
    while heap and left > most:
        _, first, stop = heappop(heap)
        second = end[first]
        if not alive[first] or second >= ops or end[second] != stop:
            continue  # one of the two groups has grown since
        alive[second] = False
        end[first] = stop
        left -= 1
        if stop < ops:
            begin[stop] = first
            heappush(heap, candidate(first, end[stop]))
        if begin[first] >= 0:
            heappush(heap, candidate(begin[first], stop))
    return cut(graph, [first for first in range(1, ops) if alive[first]])
