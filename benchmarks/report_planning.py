"""The sections on planning: seconds and overheads by budget, and the same before."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.page_pictures import shown
from benchmarks.report_parts import made_with, table

BEFORE = Path(__file__).parent / "results" / "before" / "planning.json"
VERSIONS = ("before", "now")
Rows = list[dict[str, Any]]


def seconds(data: dict[str, Any]) -> Iterator[str]:
    """Seconds from graph to plan, by budget and by model; see planning.py."""
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else {"rows": []}
    known = {(row["model"], row["budget"]): row for row in before["rows"]}
    free = [row for row in data["rows"] if row["limit_s"] is None]
    yield "## Seconds of planning\n"
    yield (
        "`hatch run bench-seconds`: from the captured graph to the plan, or to the error that names a smaller"
        " budget, for the tests' models, twenty others and two deep ones. Overheads: the sum of those "
        "that have a plan in both versions at the same budget, in percent of the step. "
        "The version before is that of `benchmarks/results/before/planning.json`, "
        f"measured while other programs ran, hence its processor seconds ({before.get('note', '')}).\n"
    )
    yield made_with(data)
    cells = []
    for budget in dict.fromkeys(row["budget"] for row in free):
        rows = [row for row in free if row["budget"] == budget]
        both = [(row, known[row["model"], budget]) for row in rows if (row["model"], budget) in known]
        same = [(new, old) for new, old in both if None not in (new["overhead"], old["overhead"])]
        same = [(new, old) for new, old in same if budget == "tight" or new["nbytes"] == old["nbytes"]]
        walls = [row["wall_s"] for row in rows]
        cells.append(
            [
                *(budget, str(len(rows)), f"{statistics.median(walls):.2f}", f"{max(walls):.1f}"),
                *_both(both, "cpu_s", statistics.median, "{:.2f}"),
                *_both(same, "overhead", lambda each: 100 * sum(each), "{:.1f}"),
                str(len(same)),
            ]
        )
    head = (
        "budget, plans, median s, longest s, median processor s, before, sum of overheads %, before, of plans"
    )
    yield from table(head.split(", "), cells)
    yield shown("images/seconds", "Seconds of planning over ops, for three budgets")
    if data.get("prove_s"):
        yield from _gaps(data, free)
    limited = [row for row in data["rows"] if row["limit_s"] is not None]
    if limited:
        late = max(row["wall_s"] - row["limit_s"] for row in limited)
        yield f"With limits, {len(limited)} plans: at most {late:.2f} s late.\n"


def _gaps(data: dict[str, Any], rows: Rows) -> Iterator[str]:
    """How many plans are near the bound of the search, and near the one of some more seconds."""
    cells = []
    for budget, near in (("60%", 1.0), ("40%", 1.0), ("30%", 1.0), ("20%", 2.5)):
        found = [row for row in rows if row["budget"] == budget and row["overhead"] is not None]
        if not found:
            continue
        gaps = [100 * (row["overhead"] - row["bound"]) for row in found]
        proven = [
            gap if row.get("proven") is None else min(gap, 100 * (row["overhead"] - row["proven"]))
            for row, gap in zip(found, gaps, strict=True)
        ]
        within = [str(sum(gap <= near for gap in each)) for each in (gaps, proven)]
        medians = [f"{statistics.median(each):.2f}" for each in (gaps, proven)]
        cells.append([budget, str(len(found)), f"{near:g}", *within, *medians])
    yield (
        "How far plans are from the lower bound, in points of the step: from that of the search "
        f"for the plan, and where that is far, from the one after {data['prove_s']:g} s more "
        "(`--prove`).\n"
    )
    head = "budget, plans, near within, near, near when proven, median gap, median when proven"
    yield from table(head.split(", "), cells)


def versions(data: dict[str, Any]) -> Iterator[str]:
    """Two versions that took turns; see planning_versions.py."""
    yield "### Two versions on one machine\n"
    yield (
        f"`hatch run bench-versions CHECKOUT`: this version and the working tree of {data['before']}, "
        "which plan the same graphs by turns. Seconds are medians. Overheads, and gaps to the printed lower "
        "bounds, are sums over the plans that both versions find, in percent of the step.\n"
    )
    yield made_with(data)
    cells = []
    for budget in dict.fromkeys(row["budget"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["budget"] == budget]
        both = [row for row in rows if None not in (row["before"]["overhead"], row["now"]["overhead"])]
        cells.append(
            [
                *(budget, str(len(rows))),
                *(f"{statistics.median(row[each]['wall_s'] for row in rows):.2f}" for each in VERSIONS),
                f"{statistics.median(row['now']['wall_s'] / row['before']['wall_s'] for row in rows):.2f}",
                *(f"{100 * sum(row[each]['overhead'] for row in both):.1f}" for each in VERSIONS),
                *(
                    f"{100 * sum(row[each]['overhead'] - row[each]['bound'] for row in both):.1f}"
                    for each in VERSIONS
                ),
            ]
        )
    head = "budget, plans, s before, s now, median ratio, overheads before, now, gaps before, now"
    yield from table(head.split(", "), cells)


def _both(pairs: list[tuple[Any, Any]], name: str, typical: Any, form: str) -> list[str]:
    """A figure of both versions."""
    if not pairs:
        return ["", ""]
    return [form.format(typical([row[name] for row in rows])) for rows in zip(*pairs, strict=True)]
