"""Compiled maximum flow (Dinic 1970) on integer capacities, for the cut bound."""

from remat_solvers.kernels.jit import njit_inner as inner


@inner
def max_flow(W, nodes, source, sink):  # type: ignore[no-untyped-def]
    """Value of the maximum flow; `capacity` becomes the residual. Edges e and e ^ 1 are a pair."""
    total = 0
    while True:
        for x in range(nodes):
            node = W.node[x]
            node.level = -1
            node.at = node.first
        W.node[source].level = 0
        W.node[0].queue = source
        head, tail = 0, 1
        while head < tail and W.node[sink].level < 0:
            node = W.node[W.node[head].queue]
            head += 1
            e = node.first
            while e >= 0:
                edge = W.edge[e]
                if edge.capacity > 0 and W.node[edge.to].level < 0:
                    W.node[edge.to].level = node.level + 1
                    W.node[tail].queue = edge.to
                    tail += 1
                e = edge.next
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
                    e = W.node[i].path
                    W.edge[e].capacity -= push
                    W.edge[e ^ 1].capacity += push
                    if W.edge[e].capacity == 0:
                        back = i
                depth = back
                x = W.edge[W.node[depth].path ^ 1].to
                continue
            node = W.node[x]
            e = node.at
            while e >= 0:
                edge = W.edge[e]
                if edge.capacity > 0 and W.node[edge.to].level == node.level + 1:
                    break
                e = edge.next
            node.at = e
            if e >= 0:
                W.node[depth].path = e
                depth += 1
                x = W.edge[e].to
            elif x == source:
                break
            else:
                node.level = -1
                depth -= 1
                x = W.edge[W.node[depth].path ^ 1].to
