"""Write a plan as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

One track has the ops, one each direction of copies, one the updates on the host, and counters the memory of
the device and of the host. Times are those of the referee, in microseconds from the beginning of the step.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from remat_facade.report.held import makers
from remat_graph import (
    Compute,
    Deliver,
    Graph,
    Lane,
    OptimizerStep,
    Plan,
    Schedule,
    Start,
    Step,
    Timeline,
    simulate,
)
from remat_graph.serialization.outputs import write_whole
from remat_graph.simulator.lane_runs import LaneRun, lane_runs

TRACKS = {
    Lane.COMPUTE: "compute",
    Lane.TO_HOST: "copies to the host",
    Lane.TO_DEVICE: "copies to the device",
    Lane.CPU_OPTIMIZER: "updates on the host",
}
"""The tracks, in the order in which they are shown."""

Event = dict[str, Any]


def chrome_trace(graph: Graph, plan: Plan) -> dict[str, Any]:
    """The trace of a plan's step.

    Args:
        graph: the graph that the plan is of; if it has no times, each op takes one microsecond.
        plan: the plan.

    Returns:
        `traceEvents` and `otherData` with the figures of the plan.
    """
    timed = graph if graph.time_s else _with_times(graph)
    runs = lane_runs(timed, plan.schedule, grads=plan.grads, links=plan.links)
    timeline = simulate(timed, plan.schedule, grads=plan.grads, links=plan.links)
    events = [
        _about("process_name", name=f"{plan.graph_name}, planned"),
        *(_about("thread_name", lane, name=name) for lane, name in TRACKS.items()),
        *(_about("thread_sort_index", lane, sort_index=_track(lane)) for lane in TRACKS),
        *_works(timed, plan.schedule, runs),
        *_counters(plan.schedule, timeline, runs),
    ]
    figures = {
        "budget_nbytes": plan.budget_nbytes,
        "peak_nbytes": plan.peak_nbytes,
        "time_s": plan.time_s,
        "overhead": plan.overhead,
        "solver": plan.solver,
        "has_times": timed is graph,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": figures}


def write_trace(path: str | Path, graph: Graph, plan: Plan) -> Path:
    """Write the trace of a plan's step as JSON.

    Raises:
        CannotWrite: the file cannot be written.
    """
    return write_whole(path, json.dumps(chrome_trace(graph, plan)))


def _with_times(graph: Graph) -> Graph:
    """The same graph, whose ops take one microsecond each."""
    ops = [
        attrs.evolve(op, implementations=[attrs.evolve(run, time_s=1e-6) for run in op.implementations])
        for op in graph.ops
    ]
    return attrs.evolve(graph, ops=ops)


def _track(lane: Lane) -> int:
    return list(TRACKS).index(lane) + 1


def _about(what: str, lane: Lane | None = None, **args: object) -> Event:
    return {"name": what, "ph": "M", "pid": 1, "tid": _track(lane) if lane else 0, "args": args}


def _works(graph: Graph, schedule: Schedule, runs: tuple[LaneRun, ...]) -> Iterator[Event]:
    """One event for the work of each step."""
    seen: set[int] = set()
    made_by = makers(graph)
    for run in runs:
        step = schedule.steps[run.step]
        if isinstance(step, Compute):
            name, kind, args = _described_run(graph, step, repeat=step.op in seen)
            seen.add(step.op)
        else:
            value = _moved(step)
            stored, maker = graph.values[value], made_by.get(value)
            layer = f"{maker.layer} " if maker and maker.layer else ""
            kind = "update" if isinstance(step, OptimizerStep) else "copy"
            kind = "addition" if isinstance(step, Deliver) else kind
            name, args = f"{layer}{stored.name}", {"bytes": stored.nbytes, "role": str(stored.role)}
        yield {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": run.begin_s * 1e6,
            "dur": (run.end_s - run.begin_s) * 1e6,
            "pid": 1,
            "tid": _track(run.lane),
            "args": {"kind": kind, "step": run.step, **args},
        }


def _described_run(graph: Graph, step: Compute, *, repeat: bool) -> tuple[str, str, Event]:
    """Name, kind and arguments of one run of an op."""
    op = graph.ops[step.op]
    run = op.implementations[step.implementation]
    target = op.target.removeprefix("aten.").partition(".")[0]
    kind = "recomputed" if repeat else "backward" if op.backward else "forward"
    args = {
        "op": op.name,
        "target": op.target,
        "layer": op.layer,
        "run": "repeat" if repeat else "first",
        "bytes": sum(graph.allocated_nbytes(v) for v in run.outputs),
        "workspace_bytes": run.workspace_nbytes,
    }
    return f"{op.layer} {target}".strip(), kind, args


def _moved(step: Step) -> int:
    """The value that a step copies, updates or adds."""
    match step:
        case Start(transfer):
            return transfer.value
        case OptimizerStep(value) | Deliver(value):
            return value
        case _:
            raise AssertionError(f"{step} does no work on a lane")


def _counters(schedule: Schedule, timeline: Timeline, runs: tuple[LaneRun, ...]) -> Iterator[Event]:
    """Memory while each step of the compute lane runs, and after the steps that follow it."""
    computing = [run for run in runs if run.lane is Lane.COMPUTE]
    for number, run in enumerate(computing):
        last = computing[number + 1].step - 1 if number + 1 < len(computing) else len(schedule.steps) - 1
        # Other steps until the next op, such as a swap-in, may hold more than the op itself.
        highest = max(timeline.during_nbytes[run.step : last + 1])
        yield _counter("device memory", run.begin_s, highest)
        yield _counter("device memory", run.end_s, timeline.live_nbytes[last])
        if timeline.host_peak_nbytes:
            yield _counter("host memory", run.end_s, timeline.host_nbytes[last])


def _counter(name: str, at_s: float, nbytes: int) -> Event:
    return {"name": name, "ph": "C", "ts": at_s * 1e6, "pid": 1, "args": {"bytes": nbytes}}
