"""Add up the device memory of training before the first step: will it fit?

The sum has parameters, buffers, gradients, optimizer states and the budget, which covers the remainder of a
step: activations, outputs, workspaces and new gradients. Gradients count in addition to the budget, because
those of an earlier step may exist: during accumulation, or if `zero_grad` keeps them. Otherwise their bytes
are headroom for temporaries of the optimizer step.

States are counted by the rules of `torch.optim`, from the shapes and dtypes of the trainable parameters.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_executor.memory.block_slack import largest_slack_nbytes
from remat_facade.errors import NothingLeft
from remat_facade.planning.state_rules import rule_of
from remat_graph import format_nbytes

FRAGMENTS = 0.28
"""What CUDA's allocator without expandable segments holds beyond tensors, as a share of their bytes.

This is the most in a simulation of its rules; the least is 0.2.
"""

RESERVE, FRAGMENTED_RESERVE = 0.05, 0.22
"""Shares of the free memory that ``budget="auto"`` does not use: other libraries, small tensors, fragments.

The larger one, which covers `FRAGMENTS`, is for CUDA's allocator without expandable segments.
"""

Optimizer = str | torch.optim.Optimizer


@attrs.frozen(kw_only=True)
class Fit:
    """The device memory of training, in bytes.

    Attributes:
        parameters_nbytes: all parameters.
        buffers_nbytes: all buffers.
        gradients_nbytes: one set of gradients, kept from an earlier step.
        states_nbytes: the optimizer's states.
        budget_nbytes: the budget of a step, in addition to these.
        device_nbytes: total memory of the device; None if unknown.
        optimizer: name of the optimizer.
        device: name of the device.
        fragments_nbytes: what the device's allocator may reserve beyond these.
    """

    parameters_nbytes: int
    buffers_nbytes: int
    gradients_nbytes: int
    states_nbytes: int
    budget_nbytes: int
    device_nbytes: int | None
    optimizer: str
    device: str
    fragments_nbytes: int = 0

    @property
    def total_nbytes(self) -> int:
        """The sum of all parts."""
        return self.kept_nbytes + self.budget_nbytes

    @property
    def kept_nbytes(self) -> int:
        """The memory in use between steps."""
        return self.parameters_nbytes + self.buffers_nbytes + self.gradients_nbytes + self.states_nbytes

    @property
    def left_nbytes(self) -> int | None:
        """Free memory of the device; negative if training does not fit, None if the total is unknown."""
        return None if self.device_nbytes is None else self.device_nbytes - self.total_nbytes

    @property
    def fits(self) -> bool | None:
        """Whether training fits the device; None if the total memory is unknown."""
        return None if self.left_nbytes is None else self.left_nbytes >= 0

    def details(self) -> str:
        """The parts and the summary, in one line."""
        return f"in addition to the budget: {self.parts()}; training {self.summary()}"

    def parts(self) -> str:
        """What is held in addition to the budget, in one line."""
        held = {
            "parameters": self.parameters_nbytes,
            "buffers": self.buffers_nbytes,
            "gradients of an earlier step": self.gradients_nbytes,
            f"states of {self.optimizer}": self.states_nbytes,
        }
        return ", ".join(f"{what} {format_nbytes(nbytes)}" for what, nbytes in held.items())

    def summary(self) -> str:
        """The verdict in one line."""
        total = f"{format_nbytes(self.total_nbytes)} with {self.optimizer}"
        if self.left_nbytes is None or self.device_nbytes is None:
            return f"needs {total}; the memory of {self.device} is unknown"
        has = f"{format_nbytes(self.device_nbytes)} of {self.device}"
        if self.left_nbytes >= 0:
            fits = f"fits: {total}, {format_nbytes(self.left_nbytes)} left of the {has}"
            if self.left_nbytes >= self.fragments_nbytes:
                return fits
            return (
                f"{fits}, where fragments may take {format_nbytes(self.fragments_nbytes)} without "
                "PYTORCH_ALLOC_CONF=expandable_segments:True"
            )
        return f"does not fit: {total}, {format_nbytes(-self.left_nbytes)} more than the {has}"


def fit_of(
    model: nn.Module,
    budget_nbytes: int,
    optimizer: Optimizer = "adamw",
    *,
    device: torch.device,
    device_nbytes: int | None = None,
) -> Fit:
    """Add up the device memory of training a model.

    Args:
        model: the model.
        budget_nbytes: the budget of its step.
        optimizer: a name of `optimizer_names()`, or the optimizer itself.
        device: the device of training.
        device_nbytes: total memory of the device; None to query the device.

    Raises:
        UnknownOptimizer: the size of the optimizer's states is unknown.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    fit = Fit(
        parameters_nbytes=nbytes_of(model.parameters()),
        buffers_nbytes=nbytes_of(model.buffers()),
        gradients_nbytes=nbytes_of(trainable),
        states_nbytes=states_nbytes(trainable, optimizer),
        budget_nbytes=budget_nbytes,
        device_nbytes=total_nbytes(device) if device_nbytes is None else device_nbytes,
        optimizer=_name(optimizer),
        device=str(device),
    )
    share = FRAGMENTS if _fragments(device) else 0.0
    return attrs.evolve(fit, fragments_nbytes=int(share * fit.total_nbytes))


def auto_budget(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    free: Callable[[torch.device], int | None] | None = None,
) -> int:
    """Bytes of the device that remain for a step.

    This is the free memory, less the share of `reserved_share`, less the gradients and optimizer states that
    are not allocated yet.

    Args:
        model: the model, on its device.
        optimizer: a name of `optimizer_names()`, or the optimizer itself.
        device: the device.
        free: returns the free bytes of a device, or None; by default `free_on`.

    Raises:
        NothingLeft: no bytes remain, or the free memory is unknown.
        UnknownOptimizer: the size of the optimizer's states is unknown.
    """
    free_nbytes = (free or free_on)(device)
    if free_nbytes is None:
        raise NothingLeft(problem=f"the free memory of {device} is unknown", advice="give a budget in bytes")
    return _left(model, optimizer, device, free_nbytes, f"of {format_nbytes(free_nbytes)} free on {device}")


def _left(
    model: nn.Module, optimizer: Optimizer, device: torch.device, free_nbytes: int, of_these: str
) -> int:
    """What is left of free bytes, which a message calls `of_these`."""
    gradients, states = _to_allocate(model, optimizer)
    reserve = int(reserved_share(device) * free_nbytes)
    left = free_nbytes - reserve - gradients - states
    if left <= 0:
        raise NothingLeft(
            problem=f"{of_these}, gradients take {format_nbytes(gradients)}, states of {_name(optimizer)} "
            f"{format_nbytes(states)} and the reserve {format_nbytes(reserve)}: nothing is left",
            advice='name an optimizer with smaller states (optimizer="sgd"), train fewer parameters, or use '
            "a larger device",
        )
    return left


def budget_on(model: nn.Module, optimizer: Optimizer, device_nbytes: int) -> int:
    """Bytes of a device of a given size that remain for a step of a model, which need not be there yet.

    Args:
        model: the model, on any device.
        optimizer: as for `auto_budget`.
        device_nbytes: memory of the device.

    Raises:
        NothingLeft: no bytes remain.
        UnknownOptimizer: the size of the optimizer's states is unknown.
    """
    held_nbytes = _held_nbytes(model)
    has, held = format_nbytes(device_nbytes), format_nbytes(held_nbytes)
    of_these = f"of the {has} of the given device, parameters and buffers take {held}"
    return _left(model, optimizer, _device_of(model), max(0, device_nbytes - held_nbytes), of_these)


def least_device_nbytes(model: nn.Module, optimizer: Optimizer, budget_nbytes: int) -> int:
    """The memory of the smallest device for which `budget_on` has at least a given budget.

    Args:
        model: as for `budget_on`.
        optimizer: as for `budget_on`.
        budget_nbytes: of a step.

    Raises:
        UnknownOptimizer: the size of the optimizer's states is unknown.
    """
    share = reserved_share(_device_of(model))
    free_nbytes = math.ceil((budget_nbytes + sum(_to_allocate(model, optimizer))) / (1 - share))
    return _held_nbytes(model) + free_nbytes


def _held_nbytes(model: nn.Module) -> int:
    """Bytes of parameters, buffers and the gradients that there are."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return nbytes_of((*model.parameters(), *model.buffers(), *gradients))


def _to_allocate(model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """Bytes of the gradients and of the optimizer's states that are not allocated yet."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients = nbytes_of(p for p in trainable if p.grad is None)
    states = states_nbytes(trainable, optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        states = max(0, states - nbytes_of(_state_tensors(optimizer)))
    return gradients, states


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def reserved_share(device: torch.device, environment: Mapping[str, str] = os.environ) -> float:
    """The share of a device's free memory that ``budget="auto"`` does not use; see `RESERVE`."""
    return FRAGMENTED_RESERVE if _fragments(device, environment) else RESERVE


def _fragments(device: torch.device, environment: Mapping[str, str] = os.environ) -> bool:
    return device.type == "cuda" and largest_slack_nbytes(environment) != 0


def states_nbytes(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Bytes of an optimizer's states after its first step.

    Args:
        parameters: the parameters it updates; ignored if the optimizer itself is given.
        optimizer: a name of `optimizer_names()`, or the optimizer itself.

    Raises:
        UnknownOptimizer: there is no rule for this optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__.lower()
        groups = [(rule_of(_named(kind, group)), group["params"]) for group in optimizer.param_groups]
        return sum(rule(p) for rule, parameters in groups for p in parameters if p.requires_grad)
    rule = rule_of(optimizer)
    return sum(rule(parameter) for parameter in parameters)


def free_on(device: torch.device) -> int | None:
    """Bytes available to new tensors on a device: free memory and unused memory of the allocator."""
    if device.type == "cpu":
        return _free_ram()
    info = _free_and_total(device)
    if info is None:
        return None
    memory = torch.accelerator.memory
    kept = memory.memory_reserved(device) - memory.memory_allocated(device)
    return info[0] + max(0, kept)


def total_nbytes(device: torch.device) -> int | None:
    """Total bytes of a device's memory, or None if unknown."""
    if device.type == "cpu":
        return _total_ram()
    info = _free_and_total(device)
    return None if info is None else info[1]


def _free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Free and total bytes by the driver; older versions of torch query it through the device module."""
    ask = getattr(torch.accelerator, "get_memory_info", None)
    try:
        ask = ask or torch.get_device_module(device).mem_get_info
        free, total = ask(device)
    except (AttributeError, RuntimeError, ValueError):
        return None
    return int(free), int(total)


def _named(kind: str, group: Mapping[str, Any]) -> str:
    """The rule's name for an optimizer class (in lower case) with the options of a parameter group."""
    if kind == "sgd" and group.get("momentum"):
        return "sgd-momentum"
    if kind in ("adam", "adamw") and group.get("amsgrad"):
        return f"{kind}-amsgrad"
    if kind == "rmsprop" and (group.get("momentum") or group.get("centered")):
        return "rmsprop with momentum or centered"  # there is no rule for it
    return kind


def _name(optimizer: Optimizer) -> str:
    return optimizer if isinstance(optimizer, str) else type(optimizer).__name__


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


# -- host memory that this process may use


def _total_ram() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _control_group("memory.max")
    return total if limit is None else min(total, limit)


def _free_ram() -> int | None:
    """Available memory of the system, within the remainder of a container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _control_group(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
