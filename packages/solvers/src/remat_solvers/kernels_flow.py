"""Compiled maximum flow (Dinic 1970) on integer capacities, for the cut bound."""

from remat_solvers.compiled import njit_inner as inner


@inner
def max_flow(W, nodes, source, sink):  # type: ignore[no-untyped-def]
    """Value of the maximum flow; `capacity` becomes the residual. Edges e and e ^ 1 are a pair."""
    total = 0
    while True:
        for x in range(nodes):
            W.node[x].level = -1
            W.node[x].at = W.node[x].first
        W.node[source].level = 0
        W.node[0].queue = source
        head, tail = 0, 1
        while head < tail and W.node[sink].level < 0:
            x = W.node[head].queue
            head += 1
            e = W.node[x].first
            while e >= 0:
                y = W.edge[e].to
                if W.edge[e].capacity > 0 and W.node[y].level < 0:
                    W.node[y].level = W.node[x].level + 1
                    W.node[tail].queue = y
                    tail += 1
                e = W.edge[e].next
        if W.node[sink].level < 0:
            return total
        depth = 0
        x = source
        while True:
            if x == sink:
                push = W.edge[W.node[0].path].capacity
                for i in range(depth):
                    push = min(push, W.edge[W.node[i].path].capacity)
                total += push
                back = 0
                for i in range(depth - 1, -1, -1):
                    W.edge[W.node[i].path].capacity -= push
                    W.edge[W.node[i].path ^ 1].capacity += push
                    if W.edge[W.node[i].path].capacity == 0:
                        back = i
                depth = back
                x = W.edge[W.node[depth].path ^ 1].to
                continue
            e = W.node[x].at
            deeper = W.node[x].level + 1
            while e >= 0 and not (W.edge[e].capacity > 0 and W.node[W.edge[e].to].level == deeper):
                e = W.edge[e].next
            W.node[x].at = e
            if e >= 0:
                W.node[depth].path = e
                depth += 1
                x = W.edge[e].to
            elif x == source:
                break
            else:
                W.node[x].level = -1
                depth -= 1
                x = W.edge[W.node[depth].path ^ 1].to
