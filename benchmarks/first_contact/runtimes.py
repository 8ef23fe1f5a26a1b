"""The runtimes that compile a plan or record it: bits, peak and time of one model each."""

import copy

from benchmarks.device_steps import Side, interleaved_s, without_inductor
from benchmarks.first_contact.exactness import trained
from benchmarks.first_contact.models import task
from benchmarks.first_contact.planning import planned
from benchmarks.first_contact.rows import Findings, Setting
from remat_graph import format_nbytes

SECTION = "runtimes"
_BUDGET = "60%"
_MODELS = {"inductor": "llama", "cudagraph": "gpt"}
_ROUNDING = 0.05  # of the largest element of a tensor, in bfloat16


def names(*, small: bool) -> tuple[str, ...]:
    """The rows."""
    return tuple(_MODELS)


def run(name: str, setting: Setting) -> Findings:
    """One runtime."""
    found, device = Findings(setting), setting.device
    if name == "cudagraph":
        found.skipped = "" if device.type == "cuda" else "CUDA graphs need CUDA"
    else:
        found.skipped = without_inductor(device)
    if found.skipped:
        return found
    chosen = task(_MODELS[name], small=setting.small)
    eager, sample = chosen.model(device), chosen.batch(device)
    model, third = copy.deepcopy(eager), copy.deepcopy(eager)
    module, budget_nbytes = planned(model, sample, _BUDGET, found, name)
    ours, theirs = trained(module, model, chosen, device), trained(eager, eager, chosen, device)
    differing, distance = ours.differing(theirs), ours.distance(theirs)
    varying = trained(third, third, chosen, device).differing(theirs)
    found.figures |= {"differing": differing[:20], "eager_varies": len(varying), "distance": distance}
    line = f"{len(differing)} tensors differ from eager by up to {distance:.2g}"
    found.said.append(line if differing else "bits of eager")
    if name == "cudagraph" and {*differing} - {*varying}:
        found.wrong.append(f"{line}; goal: equal bits")
    if name == "inductor" and not distance <= _ROUNDING:
        found.wrong.append(f"{line}; goal: at most {_ROUNDING}")
    held_nbytes = max(module.rehearsed_nbytes or 0, ours.peak_nbytes)
    found.figures |= {"held_nbytes": held_nbytes, "budget_nbytes": budget_nbytes}
    found.said.append(f"peak {format_nbytes(held_nbytes)} of {format_nbytes(budget_nbytes)}")
    if held_nbytes > budget_nbytes:
        found.wrong.append(f"peak {held_nbytes} bytes above the budget of {budget_nbytes}; goal: never")
    sides = (Side(module, model, sample), Side(eager, eager, sample))
    step_s, eager_s = interleaved_s(sides, device, setting.steps)
    found.figures |= {"step_s": step_s, "eager_s": eager_s, "predicted_s": module.plan.time_s}
    found.said.append(f"step {1e3 * step_s:.2f} ms, {step_s / eager_s:.3f} of eager's at full memory")
    return found
