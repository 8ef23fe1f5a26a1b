"""The scenarios of all tools that are installed, and the table of their rows."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from benchmarks.integrations.scenario import SCENARIOS, Scenario

# Module of this package -> (distribution, top-level module) that it needs.
TOOLS = {
    "plain_loops": ("torch", "torch"),
    "hf_trainer": ("transformers", "transformers"),
    "hf_trainer_flags": ("transformers", "transformers"),
    "trl_trainers": ("trl", "trl"),
    "peft_adapters": ("peft", "peft"),
    "quantized_weights": ("bitsandbytes", "bitsandbytes"),
    "accelerate_loops": ("accelerate", "accelerate"),
    "lightning_trainer": ("lightning", "lightning"),
    "timm_script": ("timm", "timm"),
    "diffusers_loops": ("diffusers", "diffusers"),
    "ignite_engine": ("pytorch-ignite", "ignite"),
    "fastai_learner": ("fastai", "fastai"),
    "torchtitan_blocks": ("torchtitan", "torchtitan"),
    "llamafactory_stages": ("llamafactory", "llamafactory"),
    "axolotl_yaml": ("axolotl", "axolotl"),
}
OWN_ENVIRONMENT = frozenset({"llamafactory", "axolotl"})
"""Those that demand other versions: their rows are made in environments of theirs and joined."""


def absent_tools() -> list[str]:
    """Distributions that are not installed here."""
    return [name for name, module in TOOLS.values() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def all_scenarios() -> list[Scenario]:
    """Those of the tools that are installed."""
    for file, (_, module) in TOOLS.items():
        if _is_installed(module):
            importlib.import_module(f"benchmarks.integrations.{file}")
    return SCENARIOS


def tool_versions(scenarios: Sequence[Scenario]) -> dict[str, str]:
    """Of the tools of these scenarios."""
    files = {scenario.run.__module__.rpartition(".")[2] for scenario in scenarios}
    return {name: version(name) for file, (name, _) in TOOLS.items() if file in files}


@attrs.frozen
class Joined:
    """Rows that other environments made.

    Attributes:
        rows: in the order of the files.
        versions: of the tools that the files name.
    """

    rows: list[dict[str, Any]]
    versions: dict[str, str]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Joined:
        """Read files that this program wrote.

        Raises:
            SystemExit: a file is not there, or holds no row.
        """
        rows: list[dict[str, Any]] = []
        versions: dict[str, str] = {}
        for path in paths:
            if not path.is_file():
                raise SystemExit(f"{path} is not there: make it by `hatch run {path.stem}:rows`")
            found = json.loads(path.read_text(encoding="utf-8"))
            if not found["rows"]:
                raise SystemExit(f"{path} has no rows: `hatch run {path.stem}:rows` found nothing to run")
            rows.extend(found["rows"])
            versions |= found["tools"]
        return cls(rows, versions)


HEADER = ("tool", "feature", "bitwise", "peak / budget", "planned / calls", "plans", "what was wrong")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    wrong = "; ".join(row["wrong"])
    if "bitwise" not in row:
        return (row["tool"], row["feature"], "", "", "", "", wrong)
    bitwise = "yes" if row["bitwise"] else "NO" if row["repeatable"] else "varies unplanned"
    share = row["peak_share"]
    return (
        row["tool"],
        row["feature"],
        bitwise,
        "" if share is None else f"{share:.1%}",
        f"{row['steps']} / {row['calls']}",
        str(row["plans"]),
        "; ".join([wrong] * bool(wrong) + row["notes"]),
    )


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    tool, feature, bitwise, share, calls, plans, wrong = cells(row)
    text = f"{tool:12} {feature:44} {bitwise:>8} {share:>7} {calls:>8} {plans:>5} {row['took_s']:6.1f} s"
    return text + (f"  {'WRONG: ' if row['wrong'] else ''}{wrong}" if wrong else "")


def markdown(rows: Sequence[dict[str, Any]], about: str) -> str:
    """The whole table as a page."""
    lines = ["# Trainers with one line changed", "", about, ""]
    lines += [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    bad = sum(bool(row["wrong"]) for row in rows)
    return "\n".join([*lines, "", f"{len(rows)} scenarios, {bad} with something wrong.", ""])


def write_markdown(path: Path, rows: Sequence[dict[str, Any]], about: str) -> None:
    """Write the page."""
    path.write_text(markdown(rows, about), encoding="utf-8")
