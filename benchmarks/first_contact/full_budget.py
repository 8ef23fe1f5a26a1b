"""A plan that recomputes nothing beside eager: its steps, and where the host's time lies."""

import copy
import statistics
import time

from benchmarks.device_steps import IN_A_ROW, Side, Trace, interleaved_s, traced
from benchmarks.first_contact.models import task
from benchmarks.first_contact.planning import planned
from benchmarks.first_contact.rows import FULL_BUDGET_RATIO, Findings, Setting
from remat_executor.guards.snapshot import Snapshot

SECTION = "full budget"
_CHECKS = 50


def names(*, small: bool) -> tuple[str, ...]:
    """The rows: many small parameters, and few large ones."""
    return "resnet", "gpt"


def run(name: str, setting: Setting) -> Findings:
    """One model."""
    found, device = Findings(setting), setting.device
    chosen = task(name, small=setting.small)
    eager, sample = chosen.model(device), chosen.batch(device)
    model = copy.deepcopy(eager)
    module, _ = planned(model, sample, "100%", found)
    ours, theirs = Side(module, model, sample), Side(eager, eager, sample)
    waiting = interleaved_s((ours, theirs), device, setting.steps)
    in_a_row = interleaved_s((ours, theirs), device, max(2, setting.steps // 2), in_a_row=IN_A_ROW)
    ratio = waiting[0] / waiting[1]
    guards_s = _guards_s(Snapshot.take(model))
    traces = {"planned": traced(ours, device), "eager": traced(theirs, device)}
    found.figures = {
        "step_s": waiting[0],
        "eager_s": waiting[1],
        "ratio": ratio,
        "ratio_in_a_row": in_a_row[0] / in_a_row[1],
        "guards_s": guards_s,
        "parameters": len(list(model.parameters())),
        "parts": module.parts,
        "traces": {side: _figures(trace) for side, trace in traces.items()},
    }
    found.said = [
        f"{ratio:.4f} of eager's {1e3 * waiting[1]:.2f} ms waiting after each step, "
        f"{in_a_row[0] / in_a_row[1]:.4f} after {IN_A_ROW}",
        f"the module is checked in {1e6 * guards_s:.0f} us",
        *(f"{side}: {_said(trace)}" for side, trace in traces.items()),
    ]
    if ratio > FULL_BUDGET_RATIO and not setting.small:
        found.wrong.append(f"step {ratio:.4f} of eager's; goal: at most {FULL_BUDGET_RATIO}")
    return found


def _guards_s(snapshot: Snapshot) -> float:
    """The time in which a call sees that its module has not changed."""
    taken = []
    for _ in range(_CHECKS):
        start_s = time.perf_counter()
        assert snapshot.is_current()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def _figures(trace: Trace) -> dict[str, float]:
    names = ("step_s", "before_first_s", "busy_s", "idle_s", "after_last_s", "kernels", "launches")
    return {name: getattr(trace, name) for name in (*names, "launching_s")}


def _said(trace: Trace) -> str:
    return (
        f"{1e3 * trace.before_first_s:.2f} ms before the first kernel, {1e3 * trace.busy_s:.2f} busy, "
        f"{1e3 * trace.idle_s:.2f} idle, {1e3 * trace.after_last_s:.2f} after the last, {trace.kernels} "
        f"kernels, {trace.launches} launches in {1e3 * trace.launching_s:.2f} ms"
    )
