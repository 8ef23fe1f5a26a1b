"""Pieces of a compiled step run uncompiled where no plan leaves enough headroom for the compiler."""

from __future__ import annotations

from typing import Any, cast

import attrs
import pytest

from remat_executor.module.partly_compiled import partly_compiled


@attrs.define
class Piece:
    size: int
    more_nbytes: int  # that the compiled piece needs
    runs_compiled: bool = True


@attrs.frozen
class Runtime:
    compiled_pieces: list[Piece]


@attrs.frozen
class Plan:
    notes: tuple[str, ...] = ("first",)


@attrs.frozen
class Step:
    runtime: Any
    plan: Plan = attrs.field(factory=Plan)
    measured: int = 0


PLANNED_NBYTES = 100


def measure(step: Any) -> tuple[Any, int]:
    """The peak is in the piece that needs most."""
    more = [piece.more_nbytes for piece in step.runtime.compiled_pieces if piece.runs_compiled]
    nbytes = PLANNED_NBYTES + max(more, default=0)
    return attrs.evolve(step, measured=nbytes), nbytes


def fitted(step: Step, budget_nbytes: int) -> Step | None:
    return cast("Step | None", partly_compiled(cast("Any", step), budget_nbytes, cast("Any", measure)))


@pytest.mark.parametrize(
    ("budget_nbytes", "uncompiled"), [(100, [1, 2]), (105, [1, 2]), (120, [1]), (150, [])]
)
def test_as_many_as_fit(budget_nbytes: int, uncompiled: list[int]) -> None:
    """Those that need no more than the plan stay compiled."""
    pieces = [Piece(5, 0), Piece(3, 50), Piece(9, 20)]
    found = fitted(Step(Runtime(pieces)), budget_nbytes)
    assert found is not None
    assert [i for i, piece in enumerate(pieces) if not piece.runs_compiled] == uncompiled
    assert found.measured <= budget_nbytes
    assert found.plan.notes[0] == "first"
    assert found.plan.notes[1].startswith(f"{len(uncompiled)} of 3 parts run uncompiled")


def test_a_plan_that_does_not_fit() -> None:
    """Whatever is compiled."""
    assert fitted(Step(Runtime([Piece(5, 0)])), PLANNED_NBYTES - 1) is None


def test_a_runtime_without_pieces() -> None:
    assert fitted(Step(object()), 1000) is None
