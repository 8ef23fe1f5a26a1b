"""Trainers that demand other versions of transformers than the tests: each in an environment of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.example import run


@pytest.mark.parametrize("others", [(), ("--lora",)], ids=["full", "lora"])
@pytest.mark.parametrize("tool", ["llamafactory", "axolotl"])
def test_one_line_changes_nothing_but_the_memory(tool: str, others: tuple[str, ...], tmp_path: Path) -> None:
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is in the environment `{tool}` only")
    expected, _ = run(f"with_{tool}", *others, cache=tmp_path)
    losses, said = run(f"with_{tool}", *others, "--budget", "60%", cache=tmp_path)
    assert len(losses) == 8
    assert losses == expected
    assert "within a budget of" in said
