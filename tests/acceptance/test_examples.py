"""The examples for trainers: the same losses with the one line as without it, and a plan that is reported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.example import run


@pytest.mark.parametrize(
    ("example", "others", "budget"),
    [
        pytest.param("plain", (), "60%", marks=pytest.mark.full),
        pytest.param("accelerated", (), "60%", marks=pytest.mark.full),
        pytest.param("accelerated", ("--prepared",), "60%", marks=pytest.mark.full),
        pytest.param("trainer", (), "60%", marks=pytest.mark.full),
        ("offloaded", (), "60%"),
        ("with_lightning", (), "60%"),
        # The loss's own buffer takes 63 MiB, with and without a plan.
        pytest.param("sft", (), "80MiB", marks=pytest.mark.full),
    ],
)
def test_one_line_changes_nothing_but_the_memory(
    example: str, others: tuple[str, ...], budget: str, tmp_path: Path
) -> None:
    if example == "with_lightning" and find_spec("lightning") is None:
        pytest.skip("lightning is in the environment `integrations` only")
    expected, _ = run(example, cache=tmp_path)
    losses, said = run(example, *others, "--budget", budget, cache=tmp_path)
    assert len(losses) == 8
    assert losses == expected
    assert "within a budget of" in said
