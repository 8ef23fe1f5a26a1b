"""The smallest budget below which no schedule exists, from one op at a time.

When an op first runs, these bytes are certainly live, whatever the order and however much is recomputed: its
inputs, its outputs (less those that can reuse the storage of its inputs), its workspace, every pinned value
that must have been computed before, tangents that a later op reads, and values that cannot be recomputed and
are still to be read. The largest sum over the ops is the floor. O(ops^2) bit operations.

Imperfect: the joint needs of several consecutive ops are not considered, so the true smallest budget may be
higher.
"""

from collections.abc import Mapping

import attrs

from remat_graph import Graph, Implementation, Placement
from remat_graph.training import persistent as persistent_values
from remat_solvers.bounds.reachability import Reachability, reachability


@attrs.frozen(kw_only=True)
class Floor:
    """A certified lower bound on the budget.

    Attributes:
        nbytes: no schedule needs less.
        op: name of the op that binds, or "the boundary".
        place: the same for people, with the layer.
        op_nbytes: inputs, outputs and workspace of that op.
        reason: in words.
        held: bytes by index of the values that are certainly live then. One that may take over the storage of
            another has none.
        workspace_nbytes: workspace of that op; with the bytes of `held` the whole of `nbytes`.
    """

    nbytes: int
    op: str
    place: str
    op_nbytes: int
    reason: str
    held: Mapping[int, int] = attrs.field(factory=dict)
    workspace_nbytes: int = 0


def budget_floor(graph: Graph, reach: Reachability | None = None) -> Floor:
    """Compute the floor.

    Args:
        graph: the training step.
        reach: its dependencies, if they are known already.
    """
    reach = reach or reachability(graph)
    base = reach.base_nbytes
    persistent = {v: graph.allocated_nbytes(v) for v in persistent_values(graph, Placement.DEVICE)}
    held = persistent | {v: graph.allocated_nbytes(v) for v in (*graph.outputs, *graph.tangents)}
    boundary, place = sum(held.values()), "the boundary"
    best = Floor(
        nbytes=boundary,
        op=place,
        place=place,
        op_nbytes=boundary,
        reason="outputs and tangents are live",
        held=held,
    )
    for index, op in enumerate(graph.ops):
        own = working_values(graph, op.first, reach)
        working = sum(own.values()) + op.first.workspace_nbytes
        must = unavoidable(graph, reach, index) - set(op.first.inputs) - set(op.first.outputs)
        others = sum(map(graph.allocated_nbytes, must))
        if base + working + others > best.nbytes:
            reason = f"{op.place} alone needs {working} bytes for inputs, outputs and workspace"
            if others:
                reason += f" while {others} bytes of outputs, gradients and tangents must be live"
            nbytes = base + working + others
            best = Floor(
                nbytes=nbytes,
                op=op.name,
                place=op.place,
                op_nbytes=working,
                reason=reason,
                held=persistent | {v: graph.allocated_nbytes(v) for v in must} | own,
                workspace_nbytes=op.first.workspace_nbytes,
            )
    return best


def working_values(graph: Graph, run: Implementation, reach: Reachability) -> dict[int, int]:
    """Bytes by value that one run certainly needs: inputs, and outputs that need their own storage."""
    reusable = {made for made, _ in run.reuses}
    sources = {source for _, source in run.reuses}
    charged = [v for v in run.inputs if not reach.free[v]]
    new = [v for v in run.outputs if not reach.free[v] and v not in reusable]
    # At most one output can take over each source.
    reused = sorted((v for v in run.outputs if v in reusable), key=graph.allocated_nbytes, reverse=True)
    new += reused[len(sources.intersection(charged)) :]
    return {v: graph.allocated_nbytes(v) for v in (*charged, *new)}


def unavoidable(graph: Graph, reach: Reachability, index: int) -> set[int]:
    """Values that are certainly live when op `index` first runs, other than its inputs and outputs."""
    ancestors, coming = reach.ancestors[index], reach.descendants[index] | (1 << index)
    must: set[int] = set()
    for v, readers in reach.sticky.items():
        value, maker = graph.values[v], graph.producer[v]
        if maker is None:
            done = reach.after_boundary[index] and v in reach.tangent_set
        else:
            done = bool(ancestors >> maker & 1) or (
                reach.after_boundary[index] and not graph.ops[maker].backward
            )
        if done and (value.pinned or readers & coming):
            must.add(v)
    return must
