"""Read and write schedules and orders as JSON.

A schedule is a list of steps, each a list of its kind and its indices. An order is a list of op indices,
repeats included, as the graph corpus uses it.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from remat_graph.ir import Graph
from remat_graph.schedule import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Lane,
    OptimizerStep,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
)
from remat_graph.serialization.fields import ANY, AnyPath
from remat_graph.serialization.json_reader import Reader, read_json, write_json


def schedule_to_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON data: each step is a list that begins with its kind."""
    data = {"boundary": schedule.boundary, "steps": [step_to_data(step) for step in schedule.steps]}
    return data if schedule.end is None else {**data, "end": schedule.end}


def schedule_from_data(data: Any, *, graph: Graph | None = None, source: str = "schedule data") -> Schedule:
    """The schedule of data by `schedule_to_data`; errors call the data `source`.

    With a graph, indices must lie within it. `simulate` decides whether the schedule can be carried out.

    Raises:
        BadFile: the data is something else, or an index is out of range.
    """
    return read_schedule(Reader(data, source), graph)


def step_to_data(step: Step) -> list[Any]:
    """A step as a list: its kind, then its indices."""
    match step:
        case Compute(op, implementation):
            return ["compute", op, implementation] if implementation else ["compute", op]
        case Start(transfer) | Wait(transfer):
            return ["start" if isinstance(step, Start) else "wait", transfer.value, transfer.lane.value]
        case OptimizerStep(value, lane):
            return ["optimizer_step", value, lane.value]
    return [_KIND_OF[type(step)], step.value]


def read_schedule(reader: Reader, graph: Graph | None) -> Schedule:
    """Read a schedule; with a graph, its indices are checked against the graph."""
    reader.known(frozenset({"boundary", "steps", "end"}))
    items = reader.get("steps").items()
    steps = tuple(read_step(item, graph) for item in items)
    end = reader.get_or("end", lambda r: r.index(len(items) + 1, "end"), None)
    return Schedule(steps, reader.get("boundary").index(len(items) + 1, "boundary"), end)


def read_step(reader: Reader, graph: Graph | None) -> Step:
    """Read one step; the inverse of `step_to_data`."""
    ops, values = (ANY, ANY) if graph is None else (len(graph.ops), len(graph.values))
    items = reader.items()
    word = items[0].text() if items else ""
    indices = items[1:]
    if len(indices) not in _STEP_SIZES.get(word, (1,) if word in _OF_A_VALUE else ()):
        reader.fail(f"is not a step: {str(reader.data)[:60]}")
    if word == "compute":
        op = indices[0].index(ops, "op")
        count = ANY if graph is None else len(graph.ops[op].implementations)
        return Compute(op, indices[1].index(count, "implementation") if len(indices) == 2 else 0)
    value = indices[0].index(values, "value")
    if word in _OF_A_VALUE:
        return _OF_A_VALUE[word](value)
    lane = indices[1].choice(Lane)
    try:
        if word == "optimizer_step":
            return OptimizerStep(value, lane)
        return Start(Transfer(value, lane)) if word == "start" else Wait(Transfer(value, lane))
    except ValueError:
        reader.fail(f"{word} cannot be on lane {lane}")


_STEP_SIZES: Mapping[str, tuple[int, ...]]
_STEP_SIZES = {"compute": (1, 2), "start": (2,), "wait": (2,), "optimizer_step": (2,)}
_OF_A_VALUE: Mapping[str, type[Free | Deliver | FreeHost]]
_OF_A_VALUE = {"free": Free, "deliver": Deliver, "free_host": FreeHost}
_KIND_OF = {cls: kind for kind, cls in _OF_A_VALUE.items()}


def save_order(order: Iterable[int], path: AnyPath) -> None:
    """Write op indices in running order, repeats included."""
    write_json([int(op) for op in order], path)


def load_order(path: AnyPath, graph: Graph | None = None) -> tuple[int, ...]:
    """Read op indices; with a graph, check that it has those ops.

    Raises:
        BadFile: the file is missing, corrupt, or not a list of op indices.
    """
    reader = Reader(read_json(path), os.fspath(path))
    if not isinstance(reader.data, list):
        reader.fail("a JSON list of op indices was wanted, but it is something else")
    return reader.indices(ANY if graph is None else len(graph.ops), "op")
