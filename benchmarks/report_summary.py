"""The first table of the page of results: what its long tables come to."""

import json
import statistics
from collections.abc import Iterator, Sequence
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
    yield (
        "Training steps of small models on a CPU, and plans of graphs of large ones; all rows are below. A "
        "run is of one model at one budget; each of the two ranks of DDP counts as one.\n"
    )
    answers = [*_of_runs(runs), *_of_costs(rows_of("exact")), *_of_solves(solves)]
    yield from table(["question", "answer"], answers)


def _of_runs(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Bits, budgets and predictions of the planned runs."""
    planned = [row for row in runs if "exact" in row]
    if not planned:
        return
    kept = [max(row["metered_nbytes"], row["allocated_nbytes"]) <= row["budget_nbytes"] for row in planned]
    off = [abs(row["predicted_live_nbytes"] / row["metered_nbytes"] - 1) for row in planned]
    models = len({row["model"] for row in planned})
    failed, infeasible = (sum(key in row for row in runs) for key in ("error", "infeasible"))
    yield [
        "Are outputs, gradients and all state eager's bits?",
        f"in {sum(row['exact'] for row in planned)} of {len(planned)} runs of {models} models",
    ]
    yield ["Is the budget kept?", f"in {sum(kept)} of {len(planned)} runs, by the meter and the allocator"]
    yield [
        "What of the other runs?",
        f"{failed} failed; for {infeasible} the budget is too small, and the error names the smallest",
    ]
    yield [
        "How far is the predicted peak from the metered one?",
        f"{percent(statistics.median(off))} in the median, at most {percent(max(off))}",
    ]


def _of_costs(runs: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
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


def _of_solves(solves: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """How near plans of whole graphs are to their bounds."""
    gaps = [
        row["overhead_pct"] - row["lower_bound_pct"] for row in solves if row.get("overhead_pct") is not None
    ]
    if gaps:
        near, graphs = sum(gap <= NEAR_POINTS for gap in gaps), len({row["graph"] for row in solves})
        yield [
            "How near are plans of large graphs to what is proven?",
            f"{near} of {len(gaps)} plans of {graphs} graphs are within {NEAR_POINTS:g} point of their "
            f"bound, in the median {statistics.median(gaps):.2f} points; {len(solves) - len(gaps)} budgets "
            "have no plan",
        ]
