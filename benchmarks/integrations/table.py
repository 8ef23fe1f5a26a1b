"""The scenarios of all tools that are installed, and the table of their rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
}


def absent_tools() -> list[str]:
    """Distributions that are not installed here."""
    return [name for name, module in TOOLS.values() if importlib.util.find_spec(module) is None]


def all_scenarios() -> list[Scenario]:
    """Those of the tools that are installed."""
    for file, (_, module) in TOOLS.items():
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(f"benchmarks.integrations.{file}")
    return SCENARIOS


def tool_versions() -> dict[str, str]:
    """Of the tools that are installed."""
    absent = absent_tools()
    return {name: version(name) for name, _ in TOOLS.values() if name not in absent}


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
