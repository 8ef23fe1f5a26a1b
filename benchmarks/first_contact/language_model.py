"""A language model of a billion parameters beside what users have today."""

import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.device_steps import Side, interleaved_s, peak_nbytes
from benchmarks.first_contact.models import ONE_BILLION, SMALL_TASKS
from benchmarks.first_contact.planning import planned
from benchmarks.first_contact.rows import Findings, Setting
from remat_graph import format_nbytes

SECTION = "language model"
_AGAINST_CHECKPOINTS = "61%"  # of the memory at which a published comparison was made
_TORCH_BUDGET = 0.4


def names(*, small: bool) -> tuple[str, ...]:
    """The rows: budgets of ours, and torch's own."""
    return "40%", _AGAINST_CHECKPOINTS, f"torch {_TORCH_BUDGET}"


def run(name: str, setting: Setting) -> Findings:
    """One budget; each beside eager, and ours beside a checkpoint around each block too."""
    found, device = Findings(setting), setting.device
    chosen = SMALL_TASKS["llama"] if setting.small else ONE_BILLION
    eager, sample = chosen.model(device), chosen.batch(device)
    found.figures["parameters"] = sum(p.numel() for p in eager.parameters())
    sides = {}
    if name.startswith("torch"):
        sides["torch"] = Side(_within_torchs_budget(model := copy.deepcopy(eager)), model, sample)
    else:
        model = copy.deepcopy(eager)
        module, budget_nbytes = planned(model, sample, name, found)
        sides["ours"] = Side(module, model, sample)
        sides["checkpoints"] = Side(other := _checkpointed(copy.deepcopy(eager)), other, sample)
    sides["eager"] = Side(eager, eager, sample)
    peaks = {side: peak_nbytes(each, device)[0] for side, each in sides.items()}
    times = dict(zip(sides, interleaved_s(tuple(sides.values()), device, setting.steps), strict=True))
    found.figures |= {"peaks_nbytes": peaks, "steps_s": times}
    if "ours" in sides:
        found.judge_peak(peaks["ours"], module.plan.peak_nbytes, budget_nbytes)
        found.judge_step(times["ours"], module.plan.time_s)
        found.figures["bound"] = module.plan.lower_bound_overhead
    found.said += [
        f"{side} {1e3 * times[side]:.1f} ms ({times[side] / times['eager'] - 1:+.1%}) in "
        f"{format_nbytes(peaks[side])}"
        for side in sides
    ]
    if name == _AGAINST_CHECKPOINTS and times["ours"] >= times["checkpoints"] and not setting.small:
        found.wrong.append(
            f"step {times['ours'] / times['checkpoints']:.3f} of checkpointing each block; goal: below 1"
        )
    return found


def _checkpointed(model: Any) -> nn.Module:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    found: nn.Module = model
    return found


def _within_torchs_budget(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model compiled by a backend that only partitions."""
    torch.compiler.reset()
    config: Any = importlib.import_module("torch._functorch.config")
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")

    def call(x: Tensor) -> Tensor:
        with config.patch(activation_memory_budget=_TORCH_BUDGET):
            loss: Tensor = compiled(x)
        return loss

    return call
