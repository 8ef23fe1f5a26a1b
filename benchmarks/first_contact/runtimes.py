"""The runtimes that compile a plan or record it: bits, peak and time."""

import copy

import attrs
import torch

from benchmarks.device_steps import Side, interleaved_s, without_inductor
from benchmarks.first_contact.exactness import trained
from benchmarks.first_contact.models import GPT, Task, task
from benchmarks.first_contact.planning import planned
from benchmarks.first_contact.rows import Findings, Setting
from remat_graph import format_nbytes

SECTION = "runtimes"
_ROWS = {  # runtime, model, budget
    "inductor": ("inductor", "llama", "60%"),
    "cudagraph": ("cudagraph", "gpt", "60%"),
    "inductor 40%": ("inductor", "large gpt", "40%"),
}
# No slower than eager with all memory. In float32 a GPT cannot be: at 40 % the lower bound on products and
# attention alone was 99.6 % of eager's step on an H200.
_AT_LEAST_EAGER = ("inductor 40%",)
# Large enough for the device to be slower than the host that launches its kernels.
_LARGE_GPT = Task(lambda: GPT(12, 1024, 16, 16_384, 1024), (16, 1024), 16_384, torch.bfloat16)
_ROUNDING = 0.05  # of the largest element of a tensor, in bfloat16


def names(*, small: bool) -> tuple[str, ...]:
    """The rows."""
    return tuple(_ROWS)


def run(name: str, setting: Setting) -> Findings:
    """One row."""
    found, device = Findings(setting), setting.device
    runtime, kind, budget = _ROWS[name]
    if runtime == "cudagraph":
        found.skipped = "" if device.type == "cuda" else "CUDA graphs need CUDA"
    else:
        found.skipped = without_inductor(device)
    if found.skipped:
        return found
    chosen = _LARGE_GPT if kind == "large gpt" else task(kind, small=setting.small)
    if setting.small and chosen is _LARGE_GPT:
        chosen = attrs.evolve(task("gpt", small=True), dtype=chosen.dtype)
    eager, sample = chosen.model(device), chosen.batch(device)
    model, third = copy.deepcopy(eager), copy.deepcopy(eager)
    module, budget_nbytes = planned(model, sample, budget, found, runtime)
    ours, theirs = trained(module, model, chosen, device), trained(eager, eager, chosen, device)
    differing, distance = ours.differing(theirs), ours.distance(theirs)
    varying = trained(third, third, chosen, device).differing(theirs)
    found.figures |= {"differing": differing[:20], "eager_varies": len(varying), "distance": distance}
    line = f"{len(differing)} tensors differ from eager by up to {distance:.2g}"
    found.said.append(line if differing else "bits of eager")
    if runtime == "cudagraph" and {*differing} - {*varying}:
        found.wrong.append(f"{line}; goal: equal bits")
    if runtime == "inductor" and not distance <= _ROUNDING:
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
    if name in _AT_LEAST_EAGER and step_s > eager_s and not setting.small:
        found.wrong.append(f"step {step_s / eager_s:.3f} of eager's at full memory; goal: at most 1")
    return found
