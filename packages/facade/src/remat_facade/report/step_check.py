"""Run a training step with and without its plan, and compare: results, peaks with the budget, times.

Both sides run from the same random seed, on the same inputs. Memory is measured by the meter and by the
allocator after two steps, so libraries are loaded by then; timed steps of the two sides alternate, so that
other load of the machine affects both alike.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from remat_executor import MemoryMeter, PlannedModule, allocator_peak
from remat_executor.costs.stopwatch import HostClocks, HostStopwatch
from remat_facade.report.table import Table
from remat_graph import Plan, format_nbytes, format_seconds

COMPARED_STEPS = 2
"""Steps whose results are compared: the second one reads the buffers that the first one wrote."""

Named = dict[str, Tensor]


@attrs.frozen(kw_only=True)
class Compared:
    """One kind of results on both sides.

    Attributes:
        tensors: how many were compared.
        differing: how many are not bit-identical.
        worst: the name of the tensor that differs most; empty if none does.
        relative: its largest difference, relative to the largest number in it.
        tolerated: whether the differences are within the rounding that the plan's ways may have.
    """

    tensors: int
    differing: int = 0
    worst: str = ""
    relative: float = 0.0
    tolerated: bool = True

    def __str__(self) -> str:
        if not self.differing:
            return f"identical ({self.tensors})"
        return f"{self.differing} of {self.tensors} differ, most {self.worst}: {self.relative:.1e} relative"


@attrs.frozen(kw_only=True)
class SideFigures:
    """Memory and time of one side.

    Attributes:
        meter_nbytes: peak of the tensors of a step.
        allocator_nbytes: peak of the allocator, including the workspaces of kernels.
        step_s: median time of a step.
    """

    meter_nbytes: int
    allocator_nbytes: int
    step_s: float


@attrs.frozen(kw_only=True)
class StepCheck:
    """What `check_step` finds.

    Attributes:
        plan: the plan of the step.
        compared: by kind of results.
        unplanned: memory and time of the original.
        planned: memory and time of the planned module.
        missed: number of steps of the planned module that ran without the plan.
        steps: number of timed steps of each side.
        busy: whether other processes kept the cores busy while steps on the CPU were timed.
    """

    plan: Plan
    compared: Mapping[str, Compared]
    unplanned: SideFigures
    planned: SideFigures
    missed: int
    steps: int
    busy: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        """Violated promises, one line each."""
        found = [f"{kind}: {each}" for kind, each in self.compared.items() if not each.tolerated]
        budget = self.plan.budget_nbytes
        readings = {"the meter": self.planned.meter_nbytes, "the allocator": self.planned.allocator_nbytes}
        for reading, nbytes in readings.items():
            if nbytes > budget:
                found.append(f"{reading} read {nbytes} bytes, {nbytes - budget} above the budget of {budget}")
        if self.missed:
            found.append(f"{self.missed} steps ran without the plan")
        return tuple(found)

    @property
    def table(self) -> Table:
        """Results, memory and time of both sides."""
        one, two, plan = self.unplanned, self.planned, self.plan
        rows = (
            *((kind, "", f"{each}") for kind, each in self.compared.items()),
            ("budget", "", format_nbytes(plan.budget_nbytes)),
            ("peak, allocator", format_nbytes(one.allocator_nbytes), _share(two.allocator_nbytes, plan)),
            ("  predicted", "", _share(plan.peak_nbytes, plan)),
            ("peak, meter", format_nbytes(one.meter_nbytes), _share(two.meter_nbytes, plan)),
            ("  predicted", "", _share(plan.live_peak_nbytes, plan)),
            ("step time, median", format_seconds(one.step_s), _times(two.step_s, one.step_s)),
            ("  predicted", format_seconds(plan.noremat_step_s), _times(plan.time_s, plan.noremat_step_s)),
        )
        note = f"{COMPARED_STEPS} steps compared, {self.steps} timed; planned by {plan.solver}"
        if self.busy:
            note += "; other processes kept the cores busy: the times are estimates"
        return Table(title=plan.graph_name, columns=("", "unplanned", "planned"), rows=rows, note=note)


def check_step(
    original: nn.Module,
    planned: PlannedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dropped: bool = False,
    present: bool = False,
    steps: int = 5,
    on_progress: Callable[[str], None] = lambda stage: None,
    clock: HostClocks | None = None,
) -> StepCheck:
    """Compare a step of a module with that of its planned copy.

    Args:
        original: the module; its buffers are updated as training does.
        planned: a planned copy of it.
        args: positional inputs.
        kwargs: keyword inputs.
        dropped: whether the caller drops the outputs before the backward.
        present: whether a step finds a ``.grad`` for each parameter.
        steps: number of timed steps of each side.
        on_progress: called when a stage begins.
        clock: of the host; None: the system's.
    """
    sides = [
        _Side(module=module, args=args, kwargs=dict(kwargs), dropped=dropped, present=present)
        for module in (original, planned)
    ]
    rounding = bool(planned.plan.rounding)
    differences: dict[str, list[Compared]] = {}
    for step in range(COMPARED_STEPS):
        on_progress(f"comparing step {step + 1} of {COMPARED_STEPS}")
        eager, other = (side.results(seed=step) for side in sides)
        for kind, mine in eager.items():
            differences.setdefault(kind, []).append(_compared(mine, other[kind], rounding=rounding))
    on_progress("measuring memory")
    peaks = [(side.meter_nbytes(), side.allocator_nbytes()) for side in sides]
    times: list[list[float]] = [[], []]
    watch = HostStopwatch(clock=clock or HostClocks(), one_thread=False)
    for step in range(steps):
        on_progress(f"timing step {step + 1} of {steps}")
        for side, taken in zip(sides, times, strict=True):
            taken.append(side.step_s(watch))
    unplanned, measured = (
        SideFigures(meter_nbytes=meter, allocator_nbytes=allocator, step_s=statistics.median(taken))
        for (meter, allocator), taken in zip(peaks, times, strict=True)
    )
    return StepCheck(
        plan=planned.plan,
        compared={kind: max(each, key=_badness) for kind, each in differences.items()},
        unplanned=unplanned,
        planned=measured,
        missed=sum(planned.runs.values()) - planned.runs["planned"],
        steps=steps,
        busy=watch.spoiled and sides[0].device.type == "cpu",
    )


@attrs.define(kw_only=True, eq=False)
class _Side:
    """A module and the call that it is checked with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dropped: bool
    present: bool

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or else of the first input."""
        tensors = (*self.module.parameters(), *_tensors((self.args, self.kwargs)))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def results(self, seed: int) -> dict[str, Named]:
        """What a step leaves behind, by kind and name."""
        self._reset(seed)
        output = self.module(*self.args, **self.kwargs)
        outputs = {f"output {i}": t.detach().clone() for i, t in enumerate(_tensors(output))}
        roots = _roots(output)
        del output
        _backward(roots)
        gradients = {name: p.grad.detach().clone() for name, p in self._leaves() if p.grad is not None}
        buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        state = {"generator of the CPU": torch.get_rng_state()}
        if self.device.type != "cpu":
            state["generator of the device"] = torch.get_device_module(self.device).get_rng_state(self.device)
        return {"outputs": outputs, "gradients": gradients, "buffers": buffers, "random state": state}

    def meter_nbytes(self) -> int:
        """The peak of tensors in one step."""
        self._reset(0)
        with MemoryMeter(device=self.device) as meter:
            self._step()
        return int(meter.peak_nbytes)

    def allocator_nbytes(self) -> int:
        """The peak of the allocator in one step."""
        self._reset(0)
        return allocator_peak(self._step, self.device).peak_nbytes

    def step_s(self, watch: HostStopwatch) -> float:
        """The time of one step."""
        self._reset(0)
        self._synchronize()
        return watch.seconds(self._waited_step).run_s

    def _waited_step(self) -> None:
        self._step()
        self._synchronize()

    def _step(self) -> None:
        output = self.module(*self.args, **self.kwargs)
        roots = _roots(output)
        if self.dropped:
            del output
        _backward(roots)

    def _reset(self, seed: int) -> None:
        """The state in which a step begins: the gradients that it finds, and the seed."""
        for _, leaf in self._leaves():
            leaf.grad = torch.zeros_like(leaf) if self.present else None
        gc.collect()
        torch.manual_seed(seed)

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and inputs that get a gradient."""
        yield from ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
        for i, tensor in enumerate(_tensors((self.args, self.kwargs))):
            if tensor.requires_grad and tensor.is_leaf:
                yield f"input {i}", tensor

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _roots(output: object) -> list[Tensor]:
    """The outputs that are differentiated, as `Rockmate` chooses them."""
    roots = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    return roots[:1] if roots and not roots[0].dim() else roots


def _backward(roots: list[Tensor]) -> None:
    """Differentiate a loss, or outputs with fixed random tangents."""
    if len(roots) == 1 and not roots[0].dim():
        roots[0].backward()
        return
    nothing = _RandomTangents.apply(*roots)  # type: ignore[no-untyped-call]
    nothing.backward(torch.empty_like(nothing))


class _RandomTangents(torch.autograd.Function):
    """Random gradients, which are made in the backward: the caller holds none of them, and no loss."""

    @staticmethod
    def forward(ctx: Any, *roots: Tensor) -> Tensor:
        """A tensor without elements, since the bytes of a loss are not in the budget."""
        ctx.fakes = [root.to("meta") for root in roots]
        ctx.device = roots[0].device
        return roots[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        """The same random numbers in each step."""
        generator = torch.Generator(ctx.device).manual_seed(0)
        empty = (torch.empty_like(fake, device=ctx.device) for fake in ctx.fakes)
        return tuple(tangent.normal_(generator=generator) for tangent in empty)


def _badness(found: Compared) -> tuple[bool, float]:
    return not found.tolerated, found.relative


def _compared(mine: Named, theirs: Named, *, rounding: bool) -> Compared:
    differing, worst, largest, tolerated = 0, "", 0.0, True
    for name in dict.fromkeys((*mine, *theirs)):
        if name in mine and name in theirs and same_bits(mine[name], theirs[name]):
            continue
        differing += 1
        one, two = mine.get(name), theirs.get(name)
        relative = math.inf if one is None or two is None else _distance(one, two)
        if not worst or relative > largest:
            worst, largest = name, relative
        within = rounding and one is not None and one.is_floating_point()
        tolerated &= within and one is not None and relative <= torch.finfo(one.dtype).eps ** 0.5
    return Compared(
        tensors=len(mine), differing=differing, worst=worst, relative=largest, tolerated=tolerated
    )


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have equal numbers of one dtype; NaN is equal to NaN."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    one, two = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in (one, two))
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _distance(one: Tensor, two: Tensor) -> float:
    """The largest difference, relative to the largest number; infinite if there is no such number."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return math.inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, two = one.to("cpu", wide), two.to("cpu", wide)
    found = float((one - two).abs().max()) / max(float(one.abs().max()), 1e-30)
    return found if math.isfinite(found) else math.inf


def _share(nbytes: int, plan: Plan) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes / plan.budget_nbytes:.1%} of the budget)"


def _times(seconds: float, base_s: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / base_s - 1:+z.1%})" if base_s else format_seconds(seconds)
