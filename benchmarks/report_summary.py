"""The first table of the page of results: what its long tables come to."""

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report_parts import percent, table

BUDGETS = ("smallest", "40%", "70%", "100%")
NEAR_POINTS = 1.0  # between a plan and its bound


def summary(results: Path) -> Iterator[str]:
    """A row for each question, from whatever results are there.

    Args:
        results: the folder of the JSON files.
    """

    def rows_of(name: str) -> list[dict[str, Any]]:
        path = results / f"{name}.json"
        found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
        return found

    runs = [row for name in ("exact", "exact_parts", "exact_ddp") for row in rows_of(name)]
    solves = rows_of("solvers") + rows_of("solvers_others")
    yield "## In short\n"
    yield "Training steps of small models on a CPU, and plans of graphs of large ones; all rows are below.\n"
    yield from table(
        ["question", "answer"], [*_of_runs(runs), *_of_costs(rows_of("exact")), *_of_solves(solves)]
    )


def _of_runs(runs: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """Bits, budgets and predictions of the planned runs."""
    planned = [row for row in runs if "exact" in row]
    if not planned:
        return
    kept = [max(row["metered_nbytes"], row["allocated_nbytes"]) <= row["budget_nbytes"] for row in planned]
    off = [abs(row["predicted_live_nbytes"] / row["metered_nbytes"] - 1) for row in planned]
    models = len({row["model"] for row in planned})
    failed = sum("error" in row for row in runs)
    yield [
        "Are outputs, gradients and all state eager's bits?",
        f"in {sum(row['exact'] for row in planned)} of {len(planned)} runs of {models} models",
    ]
    yield ["Is the budget kept?", f"in {sum(kept)} of {len(planned)} runs, by the meter and the allocator"]
    yield ["Do runs fail?", f"{failed} of {len(planned) + failed}"]
    yield [
        "How far is the predicted peak from the metered one?",
        f"{percent(statistics.median(off))} in the median, at most {percent(max(off))}",
    ]


def _of_costs(runs: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """What plans cost, by budget."""
    for budget in BUDGETS:
        planned = [row for row in runs if row["budget"] == budget and "exact" in row]
        if planned:
            cost, bound = (
                statistics.median(row[key] for row in planned) for key in ("overhead", "lower_bound")
            )
            place = "the smallest budget" if budget == "smallest" else budget.replace("%", " %")
            answer = (
                f"{percent(cost)} in the median of {len(planned)} models, where {percent(bound)} is proven"
            )
            yield [f"What does a plan cost at {place}?", answer]


def _of_solves(solves: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """How near plans of whole graphs are to their bounds."""
    gaps = [
        row["overhead_pct"] - row["lower_bound_pct"] for row in solves if row.get("overhead_pct") is not None
    ]
    if gaps:
        near = sum(gap <= NEAR_POINTS for gap in gaps)
        yield [
            "How near are plans of large graphs to the smallest cost possible?",
            f"{near} of {len(gaps)} within {NEAR_POINTS:g} point of it, the median within "
            f"{statistics.median(gaps):.2f}",
        ]
