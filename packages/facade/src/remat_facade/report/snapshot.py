"""Write a plan as a memory snapshot for torch's own viewer, pytorch.org/memory_viz.

The snapshot has the structure that `torch.cuda.memory._snapshot` documents. Each allocation and each free of
the predicted step is one event. Its frames, the innermost first, are the value, the op, the layers that
enclose it, and whether the op runs first or again. Its category is the pattern of its layer, so that the
viewer colours by layer.

The bytes are the referee's. The addresses are not predictions: a block is placed at the lowest address where
it fits, so what the viewer shows of fragmentation is that of this rule.
"""

import pickle
from bisect import insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat_facade.report.allocations import Allocations, Cause, StorageBlock, allocations
from remat_facade.report.held import grouping, makers
from remat_graph import Graph, Op, Plan
from remat_graph.serialization.outputs import write_whole

BASE = 2**32
"""The lowest address: a number that is clearly an address."""

Event = dict[str, Any]


def memory_snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """The snapshot of a plan's step.

    Args:
        graph: the graph that the plan is of.
        plan: the plan.

    Returns:
        `device_traces` with one list of events, and `segments` with the blocks that are left when it ends.
    """
    found = allocations(graph, plan.schedule, plan.grads)
    addresses, end = _places(found)
    labels = _Labels(graph)
    described = [
        _described(block.nbytes, labels.frames(block), labels.category(block)) for block in found.blocks
    ]
    trace: list[Event] = []
    for event in found.events:
        common = described[event.block] | {"addr": addresses[event.block]}
        # The allocator of torch splits a free in two, because another stream may still use the block.
        for action in ("free_requested", "free_completed") if event.freed else ("alloc",):
            trace.append({"action": action, **common})
    # The viewer needs a category "unknown" as soon as there are others.
    trace.append({"action": "snapshot", "addr": 0, **_described(0, [], "unknown")})
    freed = {event.block for event in found.events if event.freed}
    kept = [(addresses[i], described[i]) for i in range(len(found.blocks)) if i not in freed]
    segments = [_segment(sorted(kept, key=lambda pair: pair[0]), end)] if found.blocks else []
    return {"segments": segments, "device_traces": [trace]}


def write_snapshot(path: str | Path, graph: Graph, plan: Plan) -> Path:
    """Write the snapshot of a plan's step for torch's viewer.

    The viewer reads no format but pickle. The file holds dicts, lists, tuples, strings and ints alone, and
    nothing in remat reads it. Without the site, ``python -m torch.cuda._memory_viz trace_plot FILE -o PAGE``
    makes a page of it.

    Args:
        path: the file; names of such files usually end in ``.pickle``.
        graph: the graph that the plan is of.
        plan: the plan.

    Raises:
        CannotWrite: the file cannot be written.
    """
    return write_whole(path, pickle.dumps(memory_snapshot(graph, plan), protocol=4))


class _Labels:
    """Frames and categories of blocks."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._group = grouping(graph)
        self._makers = makers(graph)
        self._index = {op.name: number for number, op in enumerate(graph.ops)}

    def _op(self, block: StorageBlock) -> Op | None:
        """The op that allocates a block or makes its value; of a tangent the one that makes the output."""
        if block.op is not None:
            return self._graph.ops[block.op]
        value = block.value
        if value is not None and block.cause is Cause.TANGENT:
            value = self._graph.values[value].of
        return None if value is None else self._makers.get(value)

    def category(self, block: StorageBlock) -> str:
        """The pattern of its layer, or its cause."""
        op = self._op(block)
        return self._group(op) if op is not None else str(block.cause)

    def frames(self, block: StorageBlock) -> list[Event]:
        """From the value to the cause; a frame is shown as filename:line:name."""
        op = self._op(block)
        what = "workspace or copy" if block.value is None else self._graph.values[block.value].name
        frames = [("value", block.value or 0, what)]
        if op is not None:
            frames.append((op.target, self._index[op.name], op.name))
            frames += [("layer", 0, name) for name in _enclosing(op.layer)]
        frames.append(("step", 0, str(block.cause)))
        return [{"filename": file, "line": line, "name": name} for file, line, name in frames]


def _described(nbytes: int, frames: list[Event], category: str) -> Event:
    return {"size": nbytes, "stream": 0, "frames": frames, "category": category}


def _enclosing(layer: str) -> Iterator[str]:
    """A layer and those that enclose it, the innermost first."""
    while layer:
        yield layer
        layer = layer.rpartition(".")[0]


def _places(found: Allocations) -> tuple[list[int], int]:
    """The address of each block, the lowest free one where it fits, and the end of the highest."""
    addresses = [BASE] * len(found.blocks)
    end = BASE
    used: list[tuple[int, int]] = []  # (begin, end) of the blocks that are live, sorted
    for event in found.events:
        size = found.blocks[event.block].nbytes
        if event.freed:
            used.remove((addresses[event.block], addresses[event.block] + size))
            continue
        place = BASE
        for begin, after in used:
            if begin - place >= size:
                break
            place = after
        addresses[event.block] = place
        insort(used, (place, place + size))
        end = max(end, place + size)
    return addresses, end


def _segment(kept: list[tuple[int, Event]], end: int) -> Event:
    """The one segment, with what is left when the step ends, and what is free between."""
    blocks: list[Event] = []
    place = BASE
    for address, block in [*kept, (end, None)]:
        if address > place:
            blocks.append(_block(place, address - place, 0, "inactive", []))
        if block is not None:
            blocks.append(_block(address, block["size"], block["size"], "active_allocated", block["frames"]))
            place = address + block["size"]
    held = sum(block["requested_size"] for block in blocks)
    return {
        "device": 0,
        "address": BASE,
        "total_size": end - BASE,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, requested: int, state: str, frames: list[Event]) -> Event:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
