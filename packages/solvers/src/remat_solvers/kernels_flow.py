"""Compiled maximum flow (Dinic 1970) on integer capacities, for the cut bound."""

from remat_solvers.compiled import njit_in_place as njit


@njit
def max_flow(nodes, source, sink, first, edge_next, edge_to, capacity, work):  # type: ignore[no-untyped-def]
    """Value of the maximum flow; `capacity` becomes the residual. Edges i and i ^ 1 are a pair.

    `work` is scratch: 4 rows of nodes + 1.
    """
    level, at, queue, path = work[0], work[1], work[2], work[3]
    total = 0
    while True:
        for x in range(nodes):
            level[x] = -1
            at[x] = first[x]
        level[source] = 0
        queue[0] = source
        head, tail = 0, 1
        while head < tail and level[sink] < 0:
            x = queue[head]
            head += 1
            e = first[x]
            while e >= 0:
                y = edge_to[e]
                if capacity[e] > 0 and level[y] < 0:
                    level[y] = level[x] + 1
                    queue[tail] = y
                    tail += 1
                e = edge_next[e]
        if level[sink] < 0:
            return total
        depth = 0
        x = source
        while True:
            if x == sink:
                push = capacity[path[0]]
                for i in range(depth):
                    push = min(push, capacity[path[i]])
                total += push
                back = 0
                for i in range(depth - 1, -1, -1):
                    capacity[path[i]] -= push
                    capacity[path[i] ^ 1] += push
                    if capacity[path[i]] == 0:
                        back = i
                depth = back
                x = edge_to[path[depth] ^ 1]
                continue
            e = at[x]
            while e >= 0 and not (capacity[e] > 0 and level[edge_to[e]] == level[x] + 1):
                e = edge_next[e]
            at[x] = e
            if e >= 0:
                path[depth] = e
                depth += 1
                x = edge_to[e]
            elif x == source:
                break
            else:
                level[x] = -1
                depth -= 1
                x = edge_to[path[depth] ^ 1]
