"""Compiled: the fewest bytes from which what is live at the end can be computed without some ops."""

from remat_solvers.kernels.jit import njit_in_place as njit
from remat_solvers.kernels.max_flow import max_flow


@njit
def least_kept(W, source, sink, cleared):  # type: ignore[no-untyped-def]
    """The minimum cut where the edges in `cleared` have no capacity; `bounds.last_run` makes the graph."""
    for e in range(W.edge.shape[0]):
        W.edge[e].capacity = W.edge[e].fixed
    for k in range(cleared.shape[0]):
        W.edge[cleared[k]].capacity = 0
    return max_flow(W, W.node.shape[0], source, sink)
