"""The smallest budget below which no schedule exists, from one op at a time.

When an op first runs, these bytes are certainly live, whatever the order and however much is recomputed: its
inputs, its outputs (less those that can reuse the storage of its inputs), its workspace, every pinned value
that must have been computed before, tangents that a later op reads, and values that cannot be recomputed and
are still to be read. The largest sum over the ops is a floor. When the last op first runs, whichever it is,
every other pinned value is live, such as the gradients of all parameters: the smallest sum over the ops that
nothing follows is a floor too. O(ops^2) bit operations.

Imperfect: the joint needs of several consecutive ops are not considered, so the true smallest budget may be
higher.
"""

from collections.abc import Mapping

import attrs
import numpy as np

from remat_graph import Graph, Implementation, Placement
from remat_graph.training import persistent as persistent_values
from remat_solvers.bounds.reachability import Reachability, members, reachability


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
    certain = certainly_live(graph, reach)
    sums = _sums(certain, {v: graph.allocated_nbytes(v) for v in certain}, len(graph.ops))
    for index, op in enumerate(graph.ops):
        own = working_values(graph, op.first, reach)
        working = sum(own.values()) + op.first.workspace_nbytes
        near = {*op.first.inputs, *op.first.outputs}
        others = sums[index] - sum(
            graph.allocated_nbytes(v) for v in near if v in certain and certain[v] >> index & 1
        )
        if base + working + others > best.nbytes:
            reason = f"{op.place} alone needs {working} bytes for inputs, outputs and workspace"
            if others:
                reason += f" while {others} bytes of outputs, gradients and tangents must be live"
            nbytes = base + working + others
            must = unavoidable(certain, index) - near
            best = Floor(
                nbytes=nbytes,
                op=op.name,
                place=op.place,
                op_nbytes=working,
                reason=reason,
                held=persistent | {v: graph.allocated_nbytes(v) for v in must} | own,
                workspace_nbytes=op.first.workspace_nbytes,
            )
    return max(best, _floor_at_end(graph, reach), key=lambda floor: floor.nbytes)


def _floor_at_end(graph: Graph, reach: Reachability) -> Floor:
    """The floor at the op that first runs last: of those that no other follows the one that needs least."""
    pinned = {v for v, value in enumerate(graph.values) if value.pinned and not reach.free[v]}
    persistent = {v: graph.allocated_nbytes(v) for v in persistent_values(graph, Placement.DEVICE)}
    forward_ends = any(reach.after_boundary)  # before other ops run
    best: Floor | None = None
    for index, op in enumerate(graph.ops):
        if reach.descendants[index] or (forward_ends and not op.backward):
            continue
        own = working_values(graph, op.first, reach)
        others = {v: graph.allocated_nbytes(v) for v in pinned.difference(op.first.inputs, op.first.outputs)}
        working, held = sum(own.values()) + op.first.workspace_nbytes, sum(others.values())
        nbytes = reach.base_nbytes + working + held
        if best is None or nbytes < best.nbytes:
            best = Floor(
                nbytes=nbytes,
                op=op.name,
                place=op.place,
                op_nbytes=working,
                reason=f"{op.place} alone needs {working} bytes for inputs, outputs and workspace while "
                f"{held} bytes of outputs and gradients must be live, if it runs last",
                held=persistent | others | own,
                workspace_nbytes=op.first.workspace_nbytes,
            )
    return best or Floor(nbytes=0, op="", place="", op_nbytes=0, reason="")


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


def unavoidable(certain: Mapping[int, int], index: int) -> set[int]:
    """The values that are certainly live when op `index` first runs, of `certainly_live`."""
    return {v for v, when in certain.items() if when >> index & 1}


def certainly_live(graph: Graph, reach: Reachability) -> dict[int, int]:
    """The ops at whose first run a value is certainly live, as a bit set by value.

    It has been computed by then, and is pinned, or cannot be recomputed and is still to be read.
    """
    after_boundary = sum(1 << i for i, after in enumerate(reach.after_boundary) if after)
    always = (1 << len(graph.ops)) - 1
    found: dict[int, int] = {}
    for v, readers in reach.sticky.items():
        maker = graph.producer[v]
        if maker is None:
            done = after_boundary if v in reach.tangent_set else 0
        else:
            done = reach.descendants[maker] | (0 if graph.ops[maker].backward else after_boundary)
        needed = always
        if not graph.values[v].pinned:
            needed = readers
            for reader in members(readers):
                needed |= reach.ancestors[reader]
        if done & needed:
            found[v] = done & needed
    return found


def _sums(members_of: Mapping[int, int], nbytes: Mapping[int, int], count: int) -> list[int]:
    """For each of `count` indices the bytes of the values whose bit set has it."""
    sums = np.zeros(count, np.int64)
    width = -(-count // 8)
    for v, mask in members_of.items():
        bits = np.frombuffer(mask.to_bytes(width, "little"), np.uint8)
        sums += nbytes[v] * np.unpackbits(bits, count=count, bitorder="little").astype(np.int64)
    return sums.tolist()
