"""Predicted against measured steps, and against the profiler by operator."""

import copy
from collections import defaultdict

from benchmarks.device_steps import Side, first_line, interleaved_s, operator_name, traced
from benchmarks.first_contact.models import task
from benchmarks.first_contact.planning import planned
from benchmarks.first_contact.rows import Findings, Setting
from remat_facade import Hiremate
from remat_graph import Compute

SECTION = "timing"
_BUDGET = "60%"
_WORST = 10


def names(*, small: bool) -> tuple[str, ...]:
    """The rows."""
    return "llama", "resnet", "convnext"


def run(name: str, setting: Setting) -> Findings:
    """One model at a budget that recomputes."""
    found, device = Findings(setting), setting.device
    chosen = task(name, small=setting.small)
    eager, sample = chosen.model(device), chosen.batch(device)
    theirs = Side(eager, eager, sample)
    try:
        theirs.step()
    except NotImplementedError as error:  # a device whose torch has not all operators
        found.skipped = f"eager does not run: {first_line(error)}"
        return found
    theirs.forget()
    model = copy.deepcopy(eager)
    module, _ = planned(model, sample, _BUDGET, found)
    ours = Side(module, model, sample)
    step_s, eager_s = interleaved_s((ours, theirs), device, setting.steps)
    found.judge_step(step_s, module.plan.time_s)
    predicted_s, measured_s = _predicted_s(module), traced(ours, device).by_operator
    worst = sorted(
        (
            (name, predicted_s.get(name, 0.0), measured_s.get(name, 0.0))
            for name in {*predicted_s, *measured_s}
        ),
        key=lambda row: -abs(row[1] - row[2]),
    )[:_WORST]
    found.figures |= {
        "eager_s": eager_s,
        "predicted_eager_s": module.plan.noremat_time_s,
        "operators_s": sum(measured_s.values()),
        "worst": [{"operator": name, "predicted_s": p, "measured_s": m} for name, p, m in worst],
    }
    found.said += [
        f"eager {1e3 * eager_s:.2f} ms, {eager_s / module.plan.noremat_time_s - 1:+.1%} of predicted",
        f"operators {1e3 * sum(measured_s.values()):.2f} ms in the profiler",
        "predicted and measured ms: " + ", ".join(f"{n} {1e3 * p:.2f} {1e3 * m:.2f}" for n, p, m in worst),
    ]
    return found


def _predicted_s(module: Hiremate) -> dict[str, float]:
    """The plan's seconds by operator."""
    ops, total = module.graph.ops, defaultdict[str, float](float)
    for step in module.plan.schedule.steps:
        if isinstance(step, Compute):
            total[operator_name(ops[step.op].target)] += (
                ops[step.op].implementations[step.implementation].time_s
            )
    return dict(total)
