"""Bits of eager in losses, gradients and buffers of three steps, within three budgets."""

import contextlib
import copy
import importlib
import time
import warnings
from collections.abc import Generator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device_steps import Side, first_line
from benchmarks.first_contact.models import SMALL_TASKS, TASKS, Task, task
from benchmarks.first_contact.planning import planned
from benchmarks.first_contact.rows import Findings, Setting
from remat_executor import allocator_peak

SECTION = "exact"
BUDGETS = ("100%", "60%", "40%")
STEPS = 3
_TIMES_FURTHER = 4.0  # as far from eager as eager is from itself


def names(*, small: bool) -> tuple[str, ...]:
    """The rows: every model at the full budget first."""
    return tuple(f"{name} {budget}" for budget in BUDGETS for name in (SMALL_TASKS if small else TASKS))


@attrs.frozen(eq=False)
class Training:
    """What a few steps gave.

    Attributes:
        tensors: losses, gradients and buffers by step and name.
        peak_nbytes: of the largest step.
    """

    tensors: dict[str, Tensor]
    peak_nbytes: int

    def differing(self, other: "Training") -> list[str]:
        """Names of tensors that differ in some bit."""
        assert self.tensors.keys() == other.tensors.keys()
        return [name for name, tensor in self.tensors.items() if not _same_bits(tensor, other.tensors[name])]

    def distance(self, other: "Training") -> float:
        """The largest difference of a tensor, relative to its largest element."""
        return max(
            (_distance(tensor, other.tensors[name]) for name, tensor in self.tensors.items()), default=0.0
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    both = [t.contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return one.shape == other.shape and torch.equal(*both)


def _distance(one: Tensor, other: Tensor) -> float:
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    scale = max(float(other.abs().max()), 1e-12) if other.numel() else 1.0
    return float((one.float() - other.float()).abs().max()) / scale if one.numel() else 0.0


def trained(call: nn.Module, owner: nn.Module, task: Task, device: torch.device) -> Training:
    """Train for a few steps with plain gradient descent, each on another batch."""
    optimizer = torch.optim.SGD(owner.parameters(), lr=1e-3)
    tensors: dict[str, Tensor] = {}
    peak_nbytes = 0
    torch.manual_seed(3)
    for step in range(STEPS):
        record = allocator_peak(Side(call, owner, task.batch(device, step)).step, device)
        peak_nbytes = max(peak_nbytes, record.peak_nbytes)
        tensors[f"{step} loss"] = record.result.detach().clone()
        del record
        for name, param in owner.named_parameters():
            if param.grad is not None:
                tensors[f"{step} gradient {name}"] = param.grad.clone()
        tensors |= {f"{step} buffer {name}": buffer.clone() for name, buffer in owner.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
    return Training(tensors, peak_nbytes)


@contextlib.contextmanager
def deterministic() -> Generator[None, None, None]:
    """Deterministic algorithms wherever torch has them; of attention, the kernels of products and softmax do.

    Torch's fused kernels ignore the flag while it only warns.
    """
    cudnn = torch.backends.cudnn.deterministic
    filling: Any = importlib.import_module("torch.utils.deterministic")
    filled, filling.fill_uninitialized_memory = filling.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operators that have none
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = cudnn
        filling.fill_uninitialized_memory = filled


def run(name: str, setting: Setting) -> Findings:
    """One model within one budget; deterministic algorithms if eager's own bits vary from run to run."""
    kind, budget = name.split()
    found, device = Findings(setting), setting.device
    chosen = task(kind, small=setting.small)
    try:
        eager, varying = _eager_twice(chosen, device)
    except NotImplementedError as error:  # a device whose torch has not all operators
        found.skipped = f"eager does not run: {first_line(error)}"
        return found
    found.figures["eager_varies"] = varying
    mode = deterministic() if varying else contextlib.nullcontext()
    if varying:
        found.said.append(f"eager varies in {varying} tensors: judged with deterministic algorithms")
    with mode:
        allowed = 0.0
        if varying:
            eager, again = (trained(m, m, chosen, device) for m in (chosen.model(device) for _ in range(2)))
            allowed = _TIMES_FURTHER * eager.distance(again)
            found.figures["eager_distance"] = allowed / _TIMES_FURTHER
        _judge(found, chosen, budget, eager, allowed)
    return found


def _eager_twice(chosen: Task, device: torch.device) -> tuple[Training, int]:
    """Eager's training, and how many of its tensors differ in a second run."""
    model = chosen.model(device)
    second = copy.deepcopy(model)
    eager = trained(model, model, chosen, device)
    return eager, len(eager.differing(trained(second, second, chosen, device)))


def _judge(found: Findings, chosen: Task, budget: str, eager: Training, allowed: float) -> None:
    device = found.setting.device
    model = chosen.model(device)
    began_s = time.perf_counter()
    module, budget_nbytes = planned(model, chosen.batch(device), budget, found)
    found.figures["ready_s"] = time.perf_counter() - began_s
    ours = trained(module, model, chosen, device)
    differing = ours.differing(eager)
    found.figures |= {
        "exact": not differing,
        "differing": differing[:20],
        "eager_nbytes": eager.peak_nbytes,
        "overhead": module.plan.overhead,
        "runs": dict(module.runs),
        "switched": module.plan.solver_stats.get("switched", ""),
    }
    if not differing:
        found.said.append("bits of eager")
    else:
        distance = ours.distance(eager)
        found.figures["distance"] = distance
        line = f"{len(differing)} of {len(eager.tensors)} tensors differ from eager by up to {distance:.2g}"
        found.said.append(line)
        if not distance <= allowed:
            found.wrong.append(f"{line} ({differing[0]}, ...); goal: {_goal(allowed)}")
    found.judge_peak(ours.peak_nbytes, module.plan.peak_nbytes, budget_nbytes)
    found.said.append(f"planned overhead {module.plan.overhead:.1%}")
    if module.runs["original"]:
        found.wrong.append(f"{module.runs['original']} calls ran without a plan; goal: none")


def _goal(allowed: float) -> str:
    return f"at most {allowed:.2g}, as eager varies" if allowed else "equal bits"
