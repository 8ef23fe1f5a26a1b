"""A scenario: one feature of one tool, run with and without the one line of remat."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from tests.helpers.acceptance import same_bits
from tests.helpers.offmates import Mapped

BUDGET = "60%"


@attrs.define(kw_only=True)
class Run:
    """One run of a scenario: what it may use, and what it leaves.

    Attributes:
        planned: whether the one line is there.
        folder: for checkpoints.
        cache: for measured costs.
        budget: of the one line.
        options: of the one line, which the scenario adds.
        reserve_nbytes: what the one line reserves for a loss outside of the model.
        host: the host memory of an `Offmate`, whose budget counts what else training keeps between steps.
        models: those that the one line is for.
        calls: how often these were called with gradients, counted without a plan only.
        others: how often without gradients, counted likewise.
        losses: as the tool reports them.
        tensors: what must be equal in every bit, by name.
        checks: what was checked in this run alone, with its answer.
        runs: the counters of the plans of each model; empty without a plan.
        notes: what a reader must know about the run.
    """

    planned: bool
    folder: Path
    cache: Path
    budget: int | str = BUDGET
    options: dict[str, Any] = attrs.field(factory=dict)
    reserve_nbytes: int = 0
    host: Mapped | None = None
    models: list[nn.Module] = attrs.field(factory=list)
    calls: int = 0
    others: int = 0
    losses: list[float] = attrs.field(factory=list)
    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    checks: dict[str, bool] = attrs.field(factory=dict)
    runs: list[dict[str, int]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    @property
    def line(self) -> dict[str, Any]:
        """The options of the one line, the budget apart; the solvers end long before their time limit."""
        return {"time_limit_s": 60.0, "zoo": False, "cache_dir": self.cache, **self.options}

    def limited(self, model: nn.Module, **options: Any) -> nn.Module:
        """`limit_memory(model, budget)`; without a plan, the model."""
        self.watched(model)
        self.reserve_nbytes = options.get("reserve_nbytes", 0)
        if self.planned:
            from remat_facade import limit_memory

            return limit_memory(model, self.budget, **{**self.line, **options})
        return model

    def callbacks(self, tool: str, model: nn.Module) -> list[Any]:
        """The callback of a tool; without a plan, none."""
        self.watched(model)
        self.reserve_nbytes = self.options.get("reserve_nbytes", 0)
        if not self.planned:
            return []
        module = importlib.import_module(f"remat_facade.integrations.{tool}")
        kind = {"transformers": "RematCallback", "lightning": "MemoryLimit"}[tool]
        return [getattr(module, kind)(self.budget, **self.line)]

    def offmate(self, trainer: Any, **options: Any) -> None:
        """`offmate(trainer, budget)` for transformers' trainer; without a plan, nothing."""
        self.watched(trainer.model)
        if self.planned:
            from remat_facade.integrations.transformers import offmate
            from remat_offload import HostPool

            self.host = Mapped()
            pool = HostPool(64 << 20, memory=self.host)
            self.models[-1] = offmate(trainer, self.budget, pool=pool, **{**self.line, **options})

    def kept_on_device(self) -> list[Tensor]:
        """What an `Offmate` has there between steps, all of which counts for its budget."""
        if self.host is None:
            return []
        model, addresses = self.models[-1], self.host.addresses
        states = (value for state in model.optimizer.state.values() for value in state.values())
        kept = (*(p.data for p in model.module.parameters()), *model.buffers(), *states)
        return [t for t in kept if t.dim() and t.untyped_storage().data_ptr() not in addresses]

    def watched(self, model: nn.Module) -> None:
        """Count what calls a model in training; the one line is elsewhere."""
        self.models.append(model)
        if not self.planned:
            model.register_forward_pre_hook(self._count)

    def _count(self, model: nn.Module, _: Any) -> None:
        self.calls += torch.is_grad_enabled()
        self.others += not torch.is_grad_enabled()

    def keep(self, model: nn.Module, name: str = "") -> None:
        """Parameters and buffers of a trained model must be equal."""
        for key, tensor in model.state_dict().items():
            if isinstance(tensor, Tensor):
                self.tensors[f"{name}{key}"] = tensor.detach().clone()

    def check_equal(self, what: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
        """Two mappings hold the same tensors."""
        self.checks[what] = one.keys() == other.keys() and all(same_bits(one[n], other[n]) for n in one)

    def differences(self, other: Run) -> Iterator[str]:
        """What is not equal in every bit in two runs."""
        if self.losses != other.losses:
            pairs = list(zip(self.losses, other.losses, strict=False))
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            yield f"losses from step {first} on: {self.losses[first:][:1]} {other.losses[first:][:1]}"
        for name in self.tensors.keys() | other.tensors.keys():
            if name not in self.tensors or name not in other.tensors:
                yield f"{name} is in one run only"
            elif not same_bits(self.tensors[name], other.tensors[name]):
                yield name


@attrs.frozen(kw_only=True)
class Scenario:
    """One row of the table.

    Attributes:
        tool, feature: which.
        run: trains.
        plans: how many plans are made at most.
        warns: patterns of the warnings of remat that a user must get.
        unplanned: why calls in training run without a plan, where they do; a warning must say so.
        ranks: how many processes train together.
        parts: whether parts of a model are planned, whose steps overlap, so that the meter of whole steps
            does not apply.
    """

    tool: str
    feature: str
    run: Callable[[Run], None]
    plans: int = 1
    warns: tuple[str, ...] = ()
    unplanned: str = ""
    ranks: int = 1
    parts: bool = False

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.tool}: {self.feature}"


SCENARIOS: list[Scenario] = []


def scenario(
    tool: str, feature: str, **options: Any
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Put a function into the table."""

    def enter(run: Callable[[Run], None]) -> Callable[[Run], None]:
        SCENARIOS.append(Scenario(tool=tool, feature=feature, run=run, **options))
        return run

    return enter


def seed_everything() -> None:
    """All generators that a tool may draw from."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
