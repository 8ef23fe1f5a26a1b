"""Bottom-to-top grouping: from single ops to a few groups, by merging neighbours that talk to each other.

After HiRemate's partitioner (hierarchical rematerialization): every forward op begins as a group, and again
and again the two neighbours are merged whose union has the smallest score: the bytes that cross its two ends,
times its number of ops; an end of the graph counts like the other end. So groups close around what is wide
inside and end where little crosses, and of equally narrow ones the smaller grow first. Equal layers meet
equal scores, so they are grouped alike until the last few merges. It ends at `most` groups, or when no union
is small enough.

Groups are stretches of the trace: HiRemate merges any two nodes of the graph whose union leaves it acyclic.
O(ops log ops).
"""

from heapq import heapify, heappop, heappush

from remat_graph.ir import Graph
from remat_graph.partition.groups import Partition, crossing_nbytes, cut


def grouped(graph: Graph, most: int, most_ops: int | None = None) -> Partition:
    """Merge single ops into groups.

    Args:
        graph: the graph.
        most: groups to stop at, at least 1; there are more if the size does not allow fewer.
        most_ops: forward ops in a group; None for no limit.
    """
    crossing = crossing_nbytes(graph)
    ops = len(crossing) - 1
    limit = ops if most_ops is None else most_ops
    end = list(range(1, ops + 1))  # per group, named by its first op, where it ends
    begin = list(range(-1, ops))  # per group, the one before it
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
        if not alive[first] or second >= ops or end[second] != stop or stop - first > limit:
            continue  # of groups that have grown since
        alive[second] = False
        end[first] = stop
        left -= 1
        if stop < ops:
            begin[stop] = first
            heappush(heap, candidate(first, end[stop]))
        if begin[first] >= 0:
            heappush(heap, candidate(begin[first], stop))
    return cut(graph, [first for first in range(1, ops) if alive[first]])
