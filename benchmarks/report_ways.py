"""The sections of the pages of results that are about other ways to run ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.report_parts import made_with, table


def modelled(data: dict[str, Any]) -> Iterator[str]:
    """Floors and overheads by a platform; see implementations.py."""
    yield "## What other ways bring, modelled\n"
    yield (
        "`hatch run bench-implementations`: steps in bfloat16 on a roofline of 400 TFLOP/s and 3 TB/s, as "
        "percent of the peak and of the time of the step as captured without rewrites and ways. *Floor*: no "
        "schedule is below; *found*: the smallest budget with a plan; then the time of plans at shares of "
        f"that peak, less that time. Each solve has {data['seconds']:.0f} s.\n"
    )
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        shares = [f"{row[name]:.1%}" for name in ("save_all", "floor", "found")]
        times = ["-" if extra is None else f"{extra:+.1%}" for extra in row["extra"].values()]
        rows.append([row["model"], row["ways"], str(row["ops"]), str(row["switches"]), *shares, *times])
    extra = data["rows"][0]["extra"] if data["rows"] else {}
    yield from table(("model", "ways", "ops", "choices", "save-all", "floor", "found", *extra), rows)


def measured(data: dict[str, Any]) -> Iterator[str]:
    """Peaks, budgets and times on a machine; see measured_ways.py."""
    yield "## What other ways bring, measured\n"
    yield (
        "`hatch run bench-ways`: models that are small but for their vocabularies, on the CPU, in MiB by the "
        "allocator, and median step times as ratios to eager's steps between them. Budgets are shares of the "
        "unplanned step without ways.\n"
    )
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        sizes = [f"{row[name] / (1 << 20):.1f}" for name in ("budget_nbytes", "peak_nbytes", "eager_nbytes")]
        on = ", ".join(f"{name} {count}" for name, count in row["families"].items()) or "-"
        times = [f"{row['ratio']:.2f}", f"{1 + row['modelled']:.2f}"]
        rows.append([row["model"], row["ways"], row["share"], *sizes, *times, on])
    head = ("model", "ways", "budget", "MiB", "peak", "eager's", "step / eager's", "planned", "on")
    yield from table(head, rows)


def rounding(data: dict[str, Any]) -> Iterator[str]:
    """Errors of the ways that round; see rounding.py."""
    yield "## Errors of the ways that round\n"
    yield (
        '`hatch run bench-rounding`: training steps with all ways of one family of `ways="rounding"` on, and '
        "the same steps as captured, against float64: norms of the differences as shares of the norms, over "
        "several inputs. *Worst* is the largest ratio of the errors of one parameter's gradient; at most 1.5 "
        "is allowed. Deep networks in bfloat16 amplify any rounding, so their rows say little; the tests "
        "hold the kernel of activations alone.\n"
    )
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        errors = [f"{error:.2e}" for name in ("loss", "gradients") for error in row[name]]
        start = [row["case"], row["family"], str(row["ways"]), row["dtype"]]
        rows.append([*start, *errors, f"{row['worst']:.2f}"])
    head = ("step", "family", "ways", "dtype", "loss", "with ways", "gradients", "with ways", "worst")
    yield from table(head, rows)


def planning_time(data: dict[str, Any]) -> Iterator[str]:
    """Time to plan with a choice and without; see planning_time.py."""
    yield "## Time to plan with ways and without\n"
    rows, large = data["rows"], data["rows"]["large"]
    both = [row for row in rows["solves"] if row["none"] is not None]
    sums = []
    for kind, found in (("solves", both), ("whole builds", rows["builds"])):
        none_s, ways_s = (sum(row[name] for row in found) for name in ("none_s", "ways_s"))
        sums.append(f"{kind} {none_s:.0f} s without and {ways_s:.0f} with")
    yield (
        "`hatch run bench-planning`: processor seconds of solves without a limit, and overheads in percent "
        "of the step with every way off. Models that end in *modelled* are those of `bench-implementations`, "
        "the others the tests' own, by the formulas of a slow CPU. Without ways many solves end with a proof "
        f"within a second. In all: {', '.join(sums)}; {large['ops']:,} ops with ways took "
        f"{large['wall_s']:.0f} s.\n"
    )
    yield made_with(data)
    cells = []
    for row in rows["solves"]:
        overheads = [row[name] for name in ("none", "ways", "families", "bound")]
        cells.append(
            [
                *(row["model"], str(row["ops"]), str(row["switches"]), row["budget"]),
                *(f"{row[name]:.1f}" for name in ("none_s", "ways_s")),
                *("-" if each is None else f"{100 * each:+.2f}" for each in overheads),
            ]
        )
    head = "model, ops, choices, budget, without s, with s, without %, with %, best family %, bound %"
    yield from table(head.split(", "), cells)
