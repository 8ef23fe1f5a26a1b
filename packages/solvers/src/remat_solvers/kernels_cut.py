"""Compiled cut problems of the cut bound: who can still be missing at an op's first run, and the least cut.

Nodes are the ops, the values, a source and a sink. Edge e and e ^ 1 are a pair, one for each direction;
`bounds.cut` says what the cut means.
"""

import numpy as np

from remat_solvers.compiled import njit_in_place as njit
from remat_solvers.compiled import njit_inner as inner
from remat_solvers.kernels_flow import max_flow

# Places in `Work.numbers`.
EDGES, ROOM, LARGEST = range(3)
INFINITE = 1 << 60
# Marks of `Work.node.kin`: an op has run before, or cannot have run.
BEFORE, COMING = 1, 2


@inner
def mark_kin(G, W, i):  # type: ignore[no-untyped-def]
    """Mark the ops that have run before the first run of op `i`, and those that cannot have."""
    for x in range(G.op.shape[0]):
        W.node[x].kin = 0
    W.node[i].kin = COMING
    W.node[0].queue = i
    head, tail = 0, 1
    while head < tail:
        x = W.node[head].queue
        head += 1
        for k in range(G.op[x].makes, G.op[x + 1].makes):
            v = G.idx[k]
            for r in range(G.value[v].readers, G.value[v + 1].readers):
                y = G.idx[r]
                if W.node[y].kin == 0:
                    W.node[y].kin = COMING
                    W.node[tail].queue = y
                    tail += 1
    W.node[0].queue = i
    head, tail = 0, 1
    while head < tail:
        x = W.node[head].queue
        head += 1
        for k in range(G.op[x].reads, G.op[x + 1].reads):
            y = G.value[G.idx[k]].producer
            if y >= 0 and W.node[y].kin == 0:
                W.node[y].kin = BEFORE
                W.node[tail].queue = y
                tail += 1


@inner
def mark_there(G, W, i):  # type: ignore[no-untyped-def]
    """Mark the values that are certainly there at that moment; returns the bytes that leave no room."""
    for v in range(G.value.shape[0] - 1):
        W.node[v].there = 0
    nbytes = G.base[0] + G.op[i].workspace
    for s in range(G.sticky.shape[0]):
        v = G.sticky[s]
        maker = G.value[v].producer
        if maker < 0:
            done = G.op[i].after and G.value[v].tangent
        else:
            done = W.node[maker].kin == BEFORE or (G.op[i].after and not G.op[maker].backward)
        if not done:
            continue
        needed = G.value[v].pinned == 1
        for r in range(G.value[v].readers, G.value[v + 1].readers):
            needed = needed or W.node[G.idx[r]].kin == COMING
        if needed:
            W.node[v].there = 1
            nbytes += G.value[v].size
    for k in range(G.op[i].reads, G.op[i + 1].reads):
        v = G.idx[k]
        if W.node[v].there == 0:
            W.node[v].there = 1
            nbytes += G.value[v].size
    for k in range(G.op[i].makes, G.op[i + 1].makes):
        if G.new[k] and W.node[G.idx[k]].there == 0:
            nbytes += G.value[G.idx[k]].size
    return nbytes


@inner
def add_edge(W, start, end, fixed, size):  # type: ignore[no-untyped-def]
    """An edge whose capacity is `fixed` plus the price of `size` bytes."""
    e = W.numbers[EDGES]
    W.edge[e].to = end
    W.edge[e].next = W.node[start].first
    W.node[start].first = e
    W.edge[e + 1].to = start
    W.edge[e + 1].next = W.node[end].first
    W.node[end].first = e + 1
    W.edge[e].fixed = fixed
    W.edge[e + 1].fixed = 0
    W.edge[e].size = size
    W.edge[e + 1].size = 0
    W.numbers[EDGES] = e + 2
    W.numbers[LARGEST] = max(W.numbers[LARGEST], size)


@inner
def may_not_have_run(G, W, i, x):  # type: ignore[no-untyped-def]
    """Whether it is open if op `x` ran before the first run of op `i`."""
    return W.node[x].kin != BEFORE and (G.op[x].backward == 1 or not G.op[i].after)


@inner
def need(G, W, i, node, v, waiting):  # type: ignore[no-untyped-def]
    """`node` needs value v: from what is kept, or from its maker; returns how many ops wait now."""
    maker = G.value[v].producer
    if W.node[v].there == 1 or maker < 0 or W.node[maker].kin == COMING:
        return waiting
    ops = G.op.shape[0] - 1
    source = ops + G.value.shape[0] - 1
    if node == source and W.node[v].from_source == 1:
        return waiting
    if node == source:
        W.node[v].from_source = 1
    add_edge(W, node, ops + v, INFINITE, 0)
    if W.node[ops + v].reached == 1:
        return waiting
    W.node[ops + v].reached = 1
    if G.value[v].remakeable == 1 or may_not_have_run(G, W, i, maker):
        add_edge(W, ops + v, maker, 0, G.value[v].size)
        if W.node[maker].reached == 0:
            W.node[maker].reached = 1
            W.node[waiting].queue = maker
            waiting += 1
    else:
        add_edge(W, ops + v, source + 1, 0, G.value[v].size)
    return waiting


@inner
def build(G, W, i):  # type: ignore[no-untyped-def]
    """Lay out the cut problem at the first run of op `i`."""
    mark_kin(G, W, i)
    W.numbers[EDGES] = 0
    W.numbers[LARGEST] = 0
    W.numbers[ROOM] = mark_there(G, W, i)
    ops, values = G.op.shape[0] - 1, G.value.shape[0] - 1
    source = ops + values
    for x in range(source + 2):
        W.node[x].first = -1
        W.node[x].reached = 0
    for v in range(values):
        W.node[v].from_source = 0
    waiting = 0
    for x in range(ops):
        if W.node[x].kin == COMING and x != i:
            for k in range(G.op[x].reads, G.op[x + 1].reads):
                waiting = need(G, W, i, source, G.idx[k], waiting)
    head = 0
    while head < waiting:
        x = W.node[head].queue
        head += 1
        if may_not_have_run(G, W, i, x):
            for k in range(G.op[x].both, G.op[x + 1].both):
                waiting = need(G, W, i, x, G.idx[k], waiting)
        else:
            add_edge(W, x, source + 1, G.op[x].ticks, 0)
            for k in range(G.op[x].again, G.op[x + 1].again):
                waiting = need(G, W, i, x, G.idx[k], waiting)


@inner
def flow(W, nodes, budget, price):  # type: ignore[no-untyped-def]
    """The bound in ticks that the problem laid out last gives at a price per byte."""
    if W.numbers[LARGEST] * price > 1e17:
        return 0.0
    for e in range(W.numbers[EDGES]):
        W.edge[e].capacity = W.edge[e].fixed + np.int64(np.floor(W.edge[e].size * price))
    cut = max_flow(W, nodes, nodes - 2, nodes - 1)
    return cut - np.ceil(price * (budget - W.numbers[ROOM]))


@njit
def sweep(G, W, ops, budget, price, scores):  # type: ignore[no-untyped-def]
    """Put the bound in ticks at each of the ops into `scores`, all at one price in ticks per byte.

    The only function that lays out and solves, since each one that does takes seconds to compile.
    """
    for k in range(ops.shape[0]):
        build(G, W, ops[k])
        scores[ops[k]] = flow(W, G.op.shape[0] + G.value.shape[0], budget, price)


@njit
def mark_kept(G, W):  # type: ignore[no-untyped-def]
    """Mark in `there` the values that the last cut of a sweep keeps, beside those that are there anyway."""
    nodes, ops = G.op.shape[0] + G.value.shape[0], G.op.shape[0] - 1
    for x in range(nodes):
        W.node[x].reached = 0
    W.node[0].queue = nodes - 2
    W.node[nodes - 2].reached = 1
    head, tail = 0, 1
    while head < tail:
        e = W.node[W.node[head].queue].first
        head += 1
        while e >= 0:
            y = W.edge[e].to
            if W.edge[e].capacity > 0 and W.node[y].reached == 0:
                W.node[y].reached = 1
                W.node[tail].queue = y
                tail += 1
            e = W.edge[e].next
    for v in range(G.value.shape[0] - 1):
        if W.node[ops + v].reached == 1 and W.node[G.value[v].producer].reached == 0:
            W.node[v].there = 1
