"""Compiled cut problems of the cut bound: values that are missing at an op's first run, and the least cut.

Needed are the values that later ops read, and gradients that may have been computed already.
Nodes are the ops, the values, a source and a sink. Edges e and e ^ 1 are a pair, one for each direction;
`bounds.time_bound` explains the cut. A record is looked up once, as in `incremental`.
"""

import numpy as np

from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.jit import njit_inner as inner
from remat_solvers.kernels.max_flow import max_flow

INFINITE = 1 << 60
# Values of `Work.node.relation`: an op has run before, or cannot have run.
BEFORE, COMING = 1, 2


@inner
def mark_relations(G, W, i):  # type: ignore[no-untyped-def]
    """Mark the ops that have run before the first run of op `i`, and those that cannot have run."""
    for x in range(G.op.shape[0]):
        W.node[x].relation = 0
    W.node[i].relation = COMING
    W.node[0].queue = i
    head, tail = 0, 1
    while head < tail:
        op = G.op[W.node[head].queue]
        head += 1
        for k in range(op.makes, op.makes_end):
            value = G.value[G.idx[k]]
            for r in range(value.readers, value.readers_end):
                y = G.idx[r]
                if W.node[y].relation == 0:
                    W.node[y].relation = COMING
                    W.node[tail].queue = y
                    tail += 1
    W.node[0].queue = i
    head, tail = 0, 1
    while head < tail:
        op = G.op[W.node[head].queue]
        head += 1
        for k in range(op.reads, op.reads_end):
            y = G.value[G.idx[k]].producer
            if y >= 0 and W.node[y].relation == 0:
                W.node[y].relation = BEFORE
                W.node[tail].queue = y
                tail += 1


@inner
def mark_there(G, W, i):  # type: ignore[no-untyped-def]
    """Mark the values that are certainly live at that moment; returns the bytes that they and the op hold."""
    for v in range(G.value.shape[0]):
        W.node[v].there = 0
    op = G.op[i]
    nbytes = G.base + op.workspace
    for v in G.sticky:
        value = G.value[v]
        if value.producer < 0:
            done = op.after and value.tangent
        else:
            done = W.node[value.producer].relation == BEFORE or (
                op.after and not G.op[value.producer].backward
            )
        if not done:
            continue
        needed = value.pinned == 1
        for r in range(value.readers, value.readers_end):
            needed = needed or W.node[G.idx[r]].relation == COMING
        if needed:
            W.node[v].there = 1
            nbytes += value.size
    for k in range(op.reads, op.reads_end):
        v = G.idx[k]
        if W.node[v].there == 0:
            W.node[v].there = 1
            nbytes += G.value[v].size
    for k in range(op.makes, op.makes_end):
        v = G.idx[k]
        if G.new[k] and W.node[v].there == 0:
            nbytes += G.value[v].size
    return nbytes


@inner
def add_edge(W, start, end, fixed, size):  # type: ignore[no-untyped-def]
    """An edge whose capacity is `fixed` plus the price of `size` bytes."""
    meta = W.meta
    one, back = W.edge[meta.edges], W.edge[meta.edges + 1]
    one.to, back.to = end, start
    one.fixed, back.fixed = fixed, 0
    one.size, back.size = size, 0
    one.next = W.node[start].first
    W.node[start].first = meta.edges
    back.next = W.node[end].first
    W.node[end].first = meta.edges + 1
    meta.edges += 2
    meta.largest = max(meta.largest, size)


@inner
def may_not_have_run(G, W, i, x):  # type: ignore[no-untyped-def]
    """Whether op `x` may or may not have run before the first run of op `i`."""
    return W.node[x].relation != BEFORE and (G.op[x].backward == 1 or not G.op[i].after)


@inner
def need(G, W, i, node, v, waiting):  # type: ignore[no-untyped-def]
    """Connect `node` to value v, kept or computed by its producer; returns the number of waiting ops."""
    value, mark = G.value[v], W.node[v]
    maker = value.producer
    if mark.there == 1 or maker < 0 or W.node[maker].relation == COMING:
        return waiting
    ops = G.op.shape[0]
    source = ops + G.value.shape[0]
    if node == source:
        if mark.from_source == 1:
            return waiting
        mark.from_source = 1
    add_edge(W, node, ops + v, INFINITE, 0)
    kept = W.node[ops + v]
    if kept.reached == 1:
        return waiting
    kept.reached = 1
    if value.recomputable == 1 or may_not_have_run(G, W, i, maker):
        add_edge(W, ops + v, maker, 0, value.size)
        if W.node[maker].reached == 0:
            W.node[maker].reached = 1
            W.node[waiting].queue = maker
            waiting += 1
    else:
        add_edge(W, ops + v, source + 1, 0, value.size)
    return waiting


@inner
def build(G, W, i):  # type: ignore[no-untyped-def]
    """Build the cut problem at the first run of op `i`."""
    mark_relations(G, W, i)
    W.meta.edges = 0
    W.meta.largest = 0
    W.meta.held = mark_there(G, W, i)
    ops = G.op.shape[0]
    source = ops + G.value.shape[0]
    for x in range(source + 2):
        node = W.node[x]
        node.first = -1
        node.reached = 0
        node.from_source = 0
    waiting = 0
    for x in range(ops):
        if W.node[x].relation == COMING and x != i:
            op = G.op[x]
            for k in range(op.reads, op.reads_end):
                waiting = need(G, W, i, source, G.idx[k], waiting)
    for v in range(G.value.shape[0]):
        value = G.value[v]
        held = value.pinned == 1 and value.size > 0 and value.producer >= 0
        if held and may_not_have_run(G, W, i, value.producer):
            waiting = need(G, W, i, source, v, waiting)
    head = 0
    while head < waiting:
        x = W.node[head].queue
        op = G.op[x]
        head += 1
        if may_not_have_run(G, W, i, x):
            row, end = op.both, op.both_end
        else:
            row, end = op.again, op.again_end
            add_edge(W, x, source + 1, op.ticks, 0)
        for k in range(row, end):
            waiting = need(G, W, i, x, G.idx[k], waiting)


@inner
def flow(W, nodes, budget, price):  # type: ignore[no-untyped-def]
    """The bound in ticks of the problem built last, at a price per byte, and its change per unit of price."""
    if W.meta.largest * price > 1e17:
        return 0.0, 0.0
    for e in range(W.meta.edges):
        edge = W.edge[e]
        edge.capacity = edge.fixed + np.int64(np.floor(edge.size * price))
    cut = max_flow(W, nodes, nodes - 2, nodes - 1)
    headroom = budget - W.meta.held
    kept = 0
    for e in range(0, W.meta.edges, 2):
        edge = W.edge[e]
        # The last search of the flow has reached the source's side of the cut.
        if edge.size > 0 and W.node[edge.to].level < 0 and W.node[W.edge[e + 1].to].level >= 0:
            kept += edge.size
    return cut - np.ceil(price * headroom), np.float64(kept - headroom)


@njit
def sweep(G, W, ops, budget, price, tangents):  # type: ignore[no-untyped-def]
    """Bound the step at each of the ops, all at one price in ticks per byte, and enter the tangents there.

    The only function that builds and solves, since each such function takes seconds to compile.
    """
    for i in ops:
        if W.meta.built != i:
            build(G, W, i)
            W.meta.built = i
        tangent = tangents[i]
        tangent.bound, tangent.slope = flow(W, G.op.shape[0] + G.value.shape[0] + 2, budget, price)
        tangent.price = price


@njit
def mark_kept(G, W):  # type: ignore[no-untyped-def]
    """Mark in `there` the values that the last cut of a sweep keeps, next to those live anyway."""
    W.meta.built = -1  # its marks are written over
    ops = G.op.shape[0]
    source = ops + G.value.shape[0]
    for x in range(source + 2):
        W.node[x].reached = 0
    W.node[0].queue = source
    W.node[source].reached = 1
    head, tail = 0, 1
    while head < tail:
        e = W.node[W.node[head].queue].first
        head += 1
        while e >= 0:
            edge = W.edge[e]
            if edge.capacity > 0 and W.node[edge.to].reached == 0:
                W.node[edge.to].reached = 1
                W.node[tail].queue = edge.to
                tail += 1
            e = edge.next
    for v in range(G.value.shape[0]):
        if W.node[ops + v].reached == 1 and W.node[G.value[v].producer].reached == 0:
            W.node[v].there = 1
