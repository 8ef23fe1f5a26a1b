"""Train a case with and without a plan, side by side: the same numbers, within the budget, as predicted.

`tests` assert on what `compare` returns for a representative cut; `benchmarks/exact.py` prints it for every
case and budget.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from remat_executor import MemoryMeter, PlannedModule, RematWarning, allocator_peak
from tests.helpers.models import ModelCase

# The factor by which DistributedDataParallel scales a gradient: a float64, and a float32 while it multiplies.
_FACTOR_NBYTES = 12

Build = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], PlannedModule]


class WithLoss(nn.Module):
    """A model and its loss as one module, so that a plan covers the whole step."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """The loss, then what the model returns."""
        output = self.model(*args, **kwargs)
        return self.loss(output), output


def first(output: Any) -> Tensor:
    """The loss of a `WithLoss`."""
    loss = output[0]
    assert isinstance(loss, Tensor)
    return loss


def whole_step(case: ModelCase) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """The case as a module that returns its loss, and how to get the loss from what it returns."""
    model = case.build()
    return (model, case.loss) if case.returns_loss else (WithLoss(model, case.loss), first)


@attrs.frozen(kw_only=True)
class Trace:
    """What three training steps leave behind: everything that must be equal to the bit."""

    outputs: tuple[tuple[Tensor, ...], ...]
    gradients: tuple[dict[str, Tensor], ...]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    rng_state: Tensor

    def differences(self, other: Trace) -> Iterator[str]:
        """Names of the tensors that are not bitwise equal."""
        for step, (mine, theirs) in enumerate(zip(self.outputs, other.outputs, strict=True)):
            for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if not same_bits(a, b):
                    yield f"step {step} output {place}{distance(a, b)}"
        for step, (ours, others) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            yield from _different(f"step {step} gradient", ours, others)
        yield from _different("parameter", self.parameters, other.parameters)
        yield from _different("buffer", self.buffers, other.buffers)
        if not same_bits(self.rng_state, other.rng_state):
            yield "random generator"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal numbers of one dtype, NaN equal to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in (a, b))
    return bool(((a == b) | ((a != a) & (b != b))).all())


def distance(a: Tensor, b: Tensor) -> str:
    """How far apart two tensors are, relative to the largest number."""
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return ""
    scale = max(float(a.abs().max()), 1e-30)
    return f" (relative {float((a - b).abs().max()) / scale:.1e})"


def _different(kind: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> Iterator[str]:
    for name in mine.keys() | theirs.keys():
        if name not in mine or name not in theirs:
            yield f"{kind} {name} (missing on one side)"
        elif not same_bits(mine[name], theirs[name]):
            yield f"{kind} {name}{distance(mine[name], theirs[name])}"


def train(
    module: nn.Module,
    sample: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    loss: Callable[[Any], Tensor],
    steps: int = 3,
) -> Trace:
    """Train with momentum from a fixed seed."""
    torch.manual_seed(99)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    outputs, gradients = [], []
    for step in range(steps):
        args, kwargs = sample(step)
        optimizer.zero_grad()
        output = module(*args, **kwargs)
        loss(output).backward()
        outputs.append(
            tuple(leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        )
        gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    return Trace(
        outputs=tuple(outputs),
        gradients=tuple(gradients),
        parameters={n: p.detach().clone() for n, p in module.named_parameters()},
        buffers={n: b.detach().clone() for n, b in module.named_buffers()},
        rng_state=torch.get_rng_state(),
    )


@attrs.frozen(kw_only=True)
class Peaks:
    """Bytes of one step above what was there before: with ``.grad`` None, and with it there."""

    metered_nbytes: int
    metered_accumulating_nbytes: int
    allocated_nbytes: int
    allocated_accumulating_nbytes: int


def peaks(
    module: nn.Module,
    sample: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    loss: Callable[[Any], Tensor],
) -> Peaks:
    """Measure a step four times: by the meter and by the allocator, for both states of ``.grad``."""
    args, kwargs = sample(0)
    if isinstance(module, DistributedDataParallel):
        # Gloo's threads free the copies of the buffers later, perhaps at our peak, and no record shows that.
        module.broadcast_buffers = False

    def step() -> None:
        output = module(*args, **kwargs)
        loss(output).backward()

    found = []
    for accumulating in (False, True):
        for by_meter in (True, False):
            for parameter in module.parameters():
                if not accumulating:
                    parameter.grad = None
                elif parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gc.collect()
            if by_meter:
                with MemoryMeter(module, args, kwargs) as meter:
                    step()
                found.append(meter.peak_nbytes)
            else:
                found.append(allocator_peak(step, "cpu").peak_nbytes)
    return Peaks(
        metered_nbytes=found[0],
        allocated_nbytes=found[1],
        metered_accumulating_nbytes=found[2],
        allocated_accumulating_nbytes=found[3],
    )


def wrapper_nbytes(module: nn.Module, outputs: tuple[Tensor, ...]) -> int:
    """The most bytes that `DistributedDataParallel`, if it is that, adds to a step's peak by itself.

    If it looks for unused parameters, it returns copies of the outputs, while the backward reads the outputs.
    """
    if not isinstance(module, DistributedDataParallel):
        return 0
    copied = outputs if module.find_unused_parameters else ()
    return _FACTOR_NBYTES + sum(output.nbytes for output in copied)


@attrs.frozen(kw_only=True)
class Comparison:
    """A planned run beside the original's.

    Attributes:
        differences: tensors that are not bitwise equal.
        untouched: building left the model's parameters, buffers and the generator as they were.
        planned: how many of the calls a plan served, of `calls`.
        peaks: of the planned module.
        original: peaks of the original.
        module: the planned module, with its plan.
        wrapper_nbytes: what goes around the module adds at most to its peak.
    """

    differences: tuple[str, ...]
    untouched: bool
    planned: int
    calls: int
    peaks: Peaks
    original: Peaks
    module: PlannedModule
    wrapper_nbytes: int

    @property
    def repeats(self) -> int:
        """How many ops ran more than once, repeats counted."""
        order = self.module.plan.schedule.order
        return len(order) - len(set(order))


def as_it_is(module: nn.Module) -> nn.Module:
    """The module."""
    return module


def compare(
    case: ModelCase,
    build: Build,
    *,
    wrapped: bool = True,
    around: Callable[[nn.Module], nn.Module] = as_it_is,
    rank: int = 0,
    ranks: int = 1,
) -> Comparison:
    """Train a case both ways and measure both.

    Args:
        case: the model.
        build: plans a module.
        wrapped: plan model and loss as one module, unless the model returns its loss.
        around: goes around both, such as `DistributedDataParallel`.
        rank: of `ranks`, each with inputs of its own.
        ranks: how many train together.
    """

    def sample(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return case.sample(step * ranks + rank)

    model, loss = whole_step(case) if wrapped else (case.build(), case.loss)
    reference = copy.deepcopy(model)
    before = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    rng_before = torch.get_rng_state()
    args, kwargs = case.sample(0)
    module = build(model, args, kwargs)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    untouched = all(same_bits(before[n], after[n]) for n in before) and same_bits(
        rng_before, torch.get_rng_state()
    )
    trained = around(reference)
    expected = train(trained, sample, loss)
    original = peaks(trained, sample, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        trained = around(module)
        actual = train(trained, sample, loss)
        measured = peaks(trained, sample, loss)
    return Comparison(
        differences=tuple(expected.differences(actual)),
        untouched=untouched,
        planned=module.runs["planned"],
        calls=sum(module.runs.values()),
        peaks=measured,
        original=original,
        module=module,
        wrapper_nbytes=wrapper_nbytes(trained, actual.outputs[0]),
    )


def broken_rules(found: Comparison) -> Iterator[tuple[str, str]]:
    """The promises that a run breaks, as (promise, what was found)."""
    plan, peaks = found.module.plan, found.peaks
    if found.differences:
        yield "exact", f"{len(found.differences)} tensors differ: {', '.join(found.differences[:3])}"
    if not found.untouched:
        yield "untouched", "building changed the model or the generator"
    if found.planned != found.calls:
        yield "planned", f"a plan served {found.planned} of {found.calls} calls"
    if plan.budget_nbytes < plan.noremat_peak_nbytes and not (found.repeats or plan.switched):
        yield "recomputed", "nothing was recomputed or run another way below the unplanned peak"
    for name in (
        "metered_nbytes",
        "allocated_nbytes",
        "metered_accumulating_nbytes",
        "allocated_accumulating_nbytes",
    ):
        if getattr(peaks, name) > plan.budget_nbytes + found.wrapper_nbytes:
            yield "budget", f"{name} {getattr(peaks, name)} above {plan.budget_nbytes}"
    error = plan.live_peak_nbytes - peaks.metered_nbytes
    # The meter counts tensors within the kernels of ways, which plans count as workspaces.
    within_kernels_nbytes = plan.peak_nbytes - plan.live_peak_nbytes if plan.ways else 0
    if (
        not -found.wrapper_nbytes - within_kernels_nbytes
        <= error
        <= max(0.01 * peaks.metered_nbytes, 64 << 10)
    ):
        yield "live", f"predicted {plan.live_peak_nbytes}, metered {peaks.metered_nbytes}"
    if abs(plan.peak_nbytes - peaks.allocated_nbytes) > 0.02 * peaks.allocated_nbytes:
        yield "allocator", f"predicted {plan.peak_nbytes}, recorded {peaks.allocated_nbytes}"
    for name in ("metered_accumulating_nbytes", "allocated_accumulating_nbytes"):
        mine, eager = getattr(peaks, name), getattr(found.original, name)
        # With a budget of the unplanned peak, a plan may choose ways that hold more and take less time.
        if mine > eager and not (plan.ways and plan.budget_nbytes >= plan.noremat_peak_nbytes):
            yield "eager", f"{name} {mine}, eager {eager}"
