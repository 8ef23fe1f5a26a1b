"""Meter every planned step of a training run from outside: its forward, the caller's loss, its backward.

The window of a step opens when its plan begins to run and closes when `torch.autograd.backward` returns, or
when the next planned call begins. A storage that was there before costs nothing, so what counts is what the
budget is for: activations, gradients that are new, and the loss of a trainer that computes it by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from remat_executor import MemoryMeter
from remat_executor.module.planned_step import PlannedStep


@attrs.define
class BudgetWatch:
    """What planned steps took.

    Attributes:
        peaks: (bytes, budget) of each step.
        reserve_nbytes: what was reserved for the trainer's own loss, which plans leave free of their budget.
        plans: how many plans ran.
        kept: gives tensors that are there before a step and count for its budget: none but for an `Offmate`.
    """

    peaks: list[tuple[int, int]] = attrs.field(factory=list)
    reserve_nbytes: int = 0
    plans: int = 0
    kept: Callable[[], list[Tensor]] = list
    _seen: list[PlannedStep] = attrs.field(factory=list)
    _meter: MemoryMeter | None = None
    _budget_nbytes: int = 0

    def _open(self, budget_nbytes: int) -> None:
        self._close()
        self._meter, self._budget_nbytes = MemoryMeter(self.kept()), budget_nbytes
        self._meter.__enter__()

    def _close(self) -> None:
        if self._meter is not None:
            meter, self._meter = self._meter, None
            meter.__exit__(None, None, None)
            self.peaks.append((meter.baseline_nbytes + meter.peak_nbytes, self._budget_nbytes))

    @property
    def worst(self) -> float | None:
        """The largest peak as a share of its budget; None without a planned step."""
        return max((peak / self._of(budget) for peak, budget in self.peaks), default=None)

    @property
    def above(self) -> str:
        """The first step that exceeded its budget, in words."""
        for step, (peak, budget) in enumerate(self.peaks):
            if peak > self._of(budget):
                return f"planned step {step} took {peak} bytes of {self._of(budget)}"
        return ""

    def _of(self, budget_nbytes: int) -> int:
        return budget_nbytes + self.reserve_nbytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[BudgetWatch]:
        """Meter what runs within."""
        run, backward = PlannedStep.run, torch.autograd.backward

        def metered_run(step: PlannedStep, *args: Any, **kwargs: Any) -> Any:
            if not any(step is seen for seen in self._seen):
                self._seen.append(step)
                self.plans += 1
            self._open(step.plan.budget_nbytes)
            return run(step, *args, **kwargs)

        def metered_backward(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            self._close()

        PlannedStep.run, torch.autograd.backward = metered_run, metered_backward
        try:
            yield self
        finally:
            PlannedStep.run, torch.autograd.backward = run, backward
            self._close()
            self._seen.clear()
