"""Write the pages of results in docs, and their pictures, from the rows in benchmarks/results.

python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report_offload, report_pictures, report_planning, report_summary, report_ways
from benchmarks.page_pictures import shown
from benchmarks.report_parts import filled, made_with, mib, percent, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def exact(data: dict[str, Any]) -> Iterator[str]:
    """The acceptance over models."""
    yield "## Exact and within the budget\n"
    yield (
        "Three training steps with momentum and dropout, compared with the unplanned model, at the smallest "
        "budget found and at 40, 70 and 100 %. Exact: outputs, gradients, parameters, buffers and the state "
        "of the generator are bit-identical. Sizes in MiB; *accumulating* is the metered peak of a step that "
        "adds to existing `.grad` tensors.\n"
    )
    yield from accepted(data)


def exact_parts(data: dict[str, Any]) -> Iterator[str]:
    """The same, with as many parts as can be."""
    yield "## The same, each gradient delivered by itself\n"
    yield "As above with `part_nbytes=0`; *parts* is the number of parts of the backward.\n"
    yield from accepted(data)


def exact_ddp(data: dict[str, Any]) -> Iterator[str]:
    """The same, under DDP."""
    yield "## The same, under DistributedDataParallel\n"
    yield (
        "Two gloo processes with different inputs, one plan and `part_nbytes=0`, compared with the unplanned "
        "model under DDP; each row is one rank.\n"
    )
    yield from accepted(data)


def accepted(data: dict[str, Any]) -> Iterator[str]:
    """Rows of the acceptance."""
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        rank = f" (rank {row['rank']})" if "rank" in row else ""
        start = [row["model"], row["budget"] + rank]
        if row.get("infeasible"):
            rows.append([*start, f"infeasible: smallest {row['smallest_share']:.0%}", *[""] * 11])
        elif "error" in row:
            rows.append([*start, f"failed: {row['error']}", *[""] * 11])
        else:
            broken = "; ".join(row["broken"].values())
            rows.append(
                [
                    *start,
                    mib(row["budget_nbytes"]),
                    mib(row["metered_nbytes"]),
                    percent(row["predicted_live_nbytes"] / row["metered_nbytes"] - 1),
                    mib(row["allocated_nbytes"]),
                    percent(row["predicted_nbytes"] / row["allocated_nbytes"] - 1),
                    f"{mib(row['accumulating_nbytes'])} ({mib(row['eager_accumulating_nbytes'])})",
                    "yes" if row["exact"] else "no",
                    str(row["repeats"]),
                    str(row.get("parts", "")),
                    f"{percent(row['overhead'])} ({percent(row['lower_bound'])})",
                    ", ".join(f"{family} {count}" for family, count in sorted(row.get("ways", {}).items())),
                    broken,
                ]
            )
    header = (
        "model, budget, MiB, meter, predicted, allocator, predicted, accumulating (eager), exact, repeats, "
        "parts"
    )
    yield from table([*header.split(", "), "overhead (bound)", "ways", "what fell short"], rows)


def solvers(data: dict[str, Any]) -> Iterator[str]:
    """The corpus."""
    yield "## Solvers on the graph corpus\n"
    yield (
        "Overheads in percent of the unplanned step. `known` is the best schedule found before remat; "
        "`first` and `goal` are the seconds to a first plan and to a plan within 1.0 point of the bound (2.5 "
        "at 30 %, 3 points above the best known at 20 %).\n"
    )
    yield made_with(data)
    header = (
        "graph, ops, budget, status, overhead, bound, known, known bound, first, goal, whole s, fast bound s"
    )
    yield shown("images/overheads", "Extra time over the budget, for each graph")
    keys = ("known_best_pct", "known_bound_pct", "first_s", "goal_s", "wall_s", "bound_s")
    yield from table(header.split(", "), (solved(row, keys) for row in data["rows"]))


def others(data: dict[str, Any]) -> Iterator[str]:
    """Graphs that the corpus does not hold."""
    yield "## Solvers on graphs outside of the corpus\n"
    yield (
        "`benchmarks/graphs.py` made these graphs from models. The last budget of each is 1.5 times what its "
        "largest op needs; infeasible budgets have a certificate.\n"
    )
    yield made_with(data)
    header = "graph, ops, budget, status, overhead, bound, first, goal, whole s, fast bound s"
    keys = ("first_s", "goal_s", "wall_s", "bound_s")
    yield from table(header.split(", "), (solved(row, keys) for row in data["rows"]))


def solved(row: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """One solve."""
    numbers = ("overhead_pct", "lower_bound_pct", *keys)
    return [
        row["graph"],
        str(row["ops"]),
        f"{100 * row['budget_fraction']:.0f} %",
        row["status"].lower(),
        *("" if row[key] is None else f"{row[key]:.2f}" for key in numbers),
    ]


def growth(data: dict[str, Any]) -> Iterator[str]:
    """Seconds over ops."""
    yield "## Growth\n"
    yield "Models of equal decoder layers, at 60 % of the unplanned peak.\n"
    yield made_with(data)
    yield shown("images/growth", "Seconds over ops")
    keys = ("bound_s", "first_s", "wall_s", "overhead_pct", "lower_bound_pct")
    header = "layers, ops, fast bound s, first plan s, whole s, overhead %, bound %"
    rows = (
        [str(row["layers"]), str(row["ops"]), *(f"{row[key]:.2f}" for key in keys)] for row in data["rows"]
    )
    yield from table(header.split(", "), rows)


def peers(data: dict[str, Any]) -> Iterator[str]:
    """Against hand-placed checkpoints, torch's own budget and Inductor."""
    yield "## Comparison with other methods\n"
    yield shown("images/peers", "Recomputed FLOPs and step time of each method, over its peak")
    yield from peers_table(data)


def peers_words(data: dict[str, Any]) -> Iterator[str]:
    """The same on a language model whose loss head is most of its memory."""
    yield "## Comparison with other methods, on a real vocabulary\n"
    yield "`hatch run bench-peers --models gpt2_words`.\n"
    yield from peers_table(data)


def peers_table(data: dict[str, Any]) -> Iterator[str]:
    """What is measured, and a row for each method."""
    yield (
        "One meter, one run; recomputed FLOPs and rewritten bytes in percent of those of eager. Rows with "
        "inductor, and those that round, are measured with the allocator, which also counts memory of "
        "compiled kernels; budgets with inductor are shares of the eager peak measured in the same way.\n"
    )
    yield made_with(data)
    header = (
        "model, method, budget MiB, peak MiB, with .grad there, allocator MiB, FLOPs again, bytes again, "
        "modelled, bound, step time"
    )
    sizes = ("peak_nbytes", "accumulating_peak_nbytes", "allocated_nbytes")
    shares = ("recomputed_pct", "made_again_pct", "modelled_pct", "bound_pct")
    rows = []
    for row in data["rows"]:
        cells = [filled(row.get(key), mib) for key in ("budget_nbytes", *sizes)]
        if row["note"]:
            cells[1] = row["note"]
        cells += [filled(row.get(key), lambda pct: percent(pct / 100)) for key in shares]
        rows.append([row["model"], row["method"], *cells, filled(row["step_ratio"], "{:.2f}".format)])
    yield from table(header.split(", "), rows)


def runtime(data: dict[str, Any]) -> Iterator[str]:
    """Steps without recomputation, compared with eager."""
    yield "## Speed of a step without recomputation\n"
    yield (
        "`hatch run bench-runtime`: medians over interleaved steps, as ratios to eager; with `.grad` None, "
        "and adding to an existing `.grad`. The control is eager against eager, with its range.\n"
    )
    yield made_with(data)
    header = "model, ops, parts, eager ms, ratio, adding, control, allowed, us an op, ready s"
    yield from table(
        header.split(", "),
        (
            [
                row["model"],
                str(row["ops"]),
                str(row["parts"]),
                f"{1e3 * row['eager_s']:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['adding']:.3f}",
                f"{row['control']:.3f} ({row['control_low']:.2f} to {row['control_high']:.2f})",
                f"{row['limit']:.3f}",
                f"{1e6 * row['per_op_s']:.1f}",
                f"{row['ready_s']:.1f}",
            ]
            for row in data["rows"]
        ),
    )


def startup(data: dict[str, Any]) -> Iterator[str]:
    """Seconds from the call to a planned module."""
    yield "## Time to plan\n"
    yield (
        "`hatch run bench-startup`: seconds from the call to a planned module, for GPT-2 of width 768, batch "
        "4 x 512, at 50 %; cold with empty caches, warm with those of a cold run. Compiling or loading the "
        f"kernels of the solvers took {data['compile_s']:.1f} s before.\n"
    )
    yield made_with({key: value for key, value in data.items() if key != "compile_s"})
    phases = ("total_s", "cpu_s", "capture", "measure", "plan", "lower")
    yield from table(
        (
            "layers",
            "ops",
            "caches",
            *(p.replace("_s", " s") for p in phases),
            "promised s",
            "overhead",
            "bound",
        ),
        (
            [
                str(row["layers"]),
                str(row["ops"]),
                row["state"],
                *(f"{row[phase]:.1f}" for phase in phases),
                filled(row["promised_s"], "{:.0f}".format),
                percent(row["overhead"]),
                percent(row["bound"]),
            ]
            for row in data["rows"]
        ),
    )


def loaded_costs(data: dict[str, Any]) -> Iterator[str]:
    """Operator times measured on busy cores."""
    yield "## Costs measured on busy cores\n"
    yield (
        "`hatch run bench-costs`: operator times on the CPU, measured with an empty cache alongside two busy "
        "processes, and calm. Step is the predicted step as a ratio of the calm one measured just before, "
        "operators the median of how far their times are off from those, each the median and the worst of "
        "the rounds. Plans: by how many points of the step plans made from one loaded and from one calm "
        "measurement are worse than one made from the medians of the calm times, judged by these. Noise: the "
        "step as a ratio, the worst of one calm "
        "measurement after another. Seconds: to measure all operators, loaded and calm.\n"
    )
    yield made_with(data)
    header = ("model", "threads", "ops", "step ms", "step", "operators", "plans", "noise", "seconds")
    median = statistics.median
    yield from table(
        header,
        (
            [
                row["model"],
                str(row["threads"]),
                str(row["ops"]),
                f"{1e3 * row['step_s']:.1f}",
                f"{median(row['loaded']):.2f}, {max(row['loaded'], key=lambda one: abs(one - 1)):.2f}",
                f"{median(row['ops_loaded']):.1%}, {max(row['ops_loaded']):.1%}",
                ", ".join(f"{points:+.2f}" for points in (*row["plan_loaded"], *row["plan_calm"])),
                f"{max(row['calm'], key=lambda one: abs(one - 1)):.2f}",
                f"{median(row['measuring_loaded']):.1f}, {median(row['measuring_calm']):.2f}",
            ]
            for row in data["rows"]
        ),
    )


def distributed(data: dict[str, Any]) -> Iterator[str]:
    """When DDP's buckets are ready."""
    yield "## Gradients under DDP\n"
    yield (
        "`hatch run bench-distributed`, two processes: the time at which each bucket of gradients is ready, "
        "as a share of the backward. The control delivers all gradients at the end.\n"
    )
    yield made_with(data)
    most = max(len(row["fractions"]) for row in data["rows"].values())
    yield from table(
        ("", *map(str, range(most)), "step ms", "bit-identical"),
        (
            [
                name,
                *(f"{fraction:.2f}" for fraction in row["fractions"]),
                *[""] * (most - len(row["fractions"])),
                f"{1e3 * row['step_s']:.0f}",
                "yes" if row["same"] else "no",
            ]
            for name, row in data["rows"].items()
        ),
    )


def scratch(data: dict[str, Any]) -> Iterator[str]:
    """What a process allocates past torch's allocator."""
    yield "## Memory outside of the budget on the CPU\n"
    yield (
        "`hatch run bench-scratch`: the budget of a planned step, and in percent of the budget what the "
        "meter reads and what the whole process allocates from the C library in blocks of 4 KiB and more: "
        "in its first step, in later steps, and what it keeps after the first (*kept*). *code* is the "
        "address space that compiled kernels reserve in addition; few of these pages are touched. The "
        "difference to the meter is allocated by libraries; *gpt2*, the control, runs nothing in oneDNN. "
        "*cache0* is the same plan with `ONEDNN_PRIMITIVE_CACHE_CAPACITY=0` in the environment.\n"
    )
    yield made_with(data)
    shares = ("metered", "first", "later", "kept", "code")
    yield from table(
        ("model", "budget", "way", "MiB", *(f"{share} %" for share in shares), "step ms"),
        (
            [
                row["model"],
                row["budget"],
                row["way"],
                mib(row["budget_nbytes"]),
                *(f"{100 * row[f'{share}_nbytes'] / row['budget_nbytes']:.0f}" for share in shares),
                f"{1e3 * row['step_s']:.0f}",
            ]
            for row in data["rows"]
        ),
    )


def device(data: dict[str, Any]) -> Iterator[str]:
    """What an accelerator measured; see gpu.py for the goals."""
    yield f"## {data['device']}\n"
    yield (
        "`hatch run bench-gpu`: the peak of the allocator above its bytes at the begin of the step, the time "
        "relative to eager, and how far both are from the plan. MONeT: the overhead that its authors "
        "published for a third of the memory.\n"
    )
    yield made_with(data)
    header = (
        "model, method, budget, peak GiB, eager GiB, of the predicted peak, overhead, of the predicted time, "
        "bound, MONeT"
    )
    rows = []
    for row in data["rows"]:
        share = filled(row["fraction"], percent)
        if row["note"]:
            rows.append([row["model"], row["method"], share, row["note"], *[""] * 6])
            continue
        ratio = row["step_s"] / row["eager_s"]
        predicted = row["predicted_nbytes"] is not None
        rows.append(
            [
                row["model"],
                row["method"],
                share,
                f"{row['peak_nbytes'] / (1 << 30):.2f}",
                f"{row['eager_nbytes'] / (1 << 30):.2f}",
                percent(row["peak_nbytes"] / row["predicted_nbytes"]) if predicted else "",
                percent(ratio - 1),
                percent(ratio / row["predicted_ratio"]) if predicted else "",
                filled(row["bound_pct"], lambda pct: percent(pct / 100)),
                filled(row.get("published_pct"), lambda pct: percent(pct / 100)),
            ]
        )
    yield from table(header.split(", "), rows)


def first(data: dict[str, Any]) -> Iterator[str]:
    """The first contact with an accelerator; see gpu_first.py for the goals."""
    yield f"## First contact: {data['device']}\n"
    wrong = sum(bool(row["wrong"]) for row in data["rows"])
    yield f"`hatch run gpu-first`: {wrong} of {len(data['rows'])} rows missed a goal.\n"
    yield made_with(data)
    rows = [
        [row["section"], row["name"], "; ".join(row["wrong"]), row["skipped"] or row["said"]]
        for row in data["rows"]
    ]
    yield from table(("section", "row", "wrong", "measured"), rows)


def predictions(data: dict[str, Any]) -> Iterator[str]:
    """What data sheets predict, beside what others and we measured."""
    yield "## Predictions from data sheets\n"
    yield (
        "`hatch run bench-platforms`: a step without recomputation as the platforms `h100-spec` and "
        "`a100-spec` predict it on a machine without a GPU; tokens or images a second and GPU as others "
        "published them, and seconds of our own eager steps. *Off* is the distance to the nearer end of the "
        "range; published figures include optimizer, communication and data, predictions do not.\n"
    )
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        form = "{:.4f}" if row["unit"] == "s" else "{:,.0f}"
        ends = dict.fromkeys((row["low"], row["high"]))
        off = row["predicted"] / min(max(row["predicted"], row["low"]), row["high"]) - 1
        figure = " to ".join(map(form.format, ends))
        device = row["platform"].partition(" ")[0]
        predicted = form.format(row["predicted"])
        rows.append([row["name"], device, row["unit"], figure, predicted, percent(off), row["source"]])
    yield from table(["row", "platform", "unit", "figure", "predicted", "off", "source"], rows)


PAGES: dict[str, tuple[str, dict[str, Callable[[dict[str, Any]], Iterator[str]]]]] = {
    "results": (
        "# Results\n\nEvery figure on this page was printed by `hatch run exact`.\n",
        {
            "exact": exact,
            "exact_parts": exact_parts,
            "exact_ddp": exact_ddp,
            "solvers": solvers,
            "solvers_others": others,
            "growth": growth,
            "peers": peers,
        },
    ),
    "benchmarks": (
        "# Benchmarks\n\nEvery figure on this page was printed by the command named above its table.\n\n"
        "On a machine with a new GPU, run `hatch run gpu-first` before the others: within eight minutes "
        "it checks the allocator, the tests marked `cuda`, bits and budgets of six models, times, runtimes, "
        "a language model and Offmate, and lists what is wrong first.\n",
        {
            "runtime": runtime,
            "startup": startup,
            "loaded_costs": loaded_costs,
            "distributed": distributed,
            "scratch": scratch,
            "platforms": predictions,
            "implementations": report_ways.modelled,
            "measured_ways": report_ways.measured,
            "rounding": report_ways.rounding,
            "peers_words": peers_words,
            "planning_time": report_ways.planning_time,
            "planning": report_planning.seconds,
            "planning_versions": report_planning.versions,
        },
    ),
    "offmate_results": (
        "# Offmate: results\n\nEvery figure on this page was printed by `hatch run offload`.\n",
        {
            "offload_exact": report_offload.exact,
            "offload": report_offload.overlap,
            "offload_decisions": report_offload.decisions,
            "offload_chains": report_offload.chains,
        },
    ),
}


ELSEWHERE = {"integrations"}  # results with a page of their own


def main() -> int:
    """Write the pages from whatever results are there; what is of no known kind is a device's."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    known = ELSEWHERE | {name for _, sections in PAGES.values() for name in sections}
    kinds = {"-offload": report_offload.moving, "-first": first}
    devices = {
        path.stem: next((made for end, made in kinds.items() if path.stem.endswith(end)), device)
        for path in sorted(RESULTS.glob("*.json"))
        if path.stem not in known
    }
    for page, (head, sections) in PAGES.items():
        lines = [head, *(report_summary.summary(RESULTS) if page == "results" else ())]
        for name, section in {**sections, **(devices if page == "benchmarks" else {})}.items():
            path = RESULTS / f"{name}.json"
            if path.exists():
                lines.extend(section(json.loads(path.read_text())))
        if page == "benchmarks" and not devices:
            lines.append("No GPU was measured yet; `hatch run bench-gpu` adds its table here.\n")
        target = ROOT / "docs" / f"{page}.md"
        target.write_text("\n".join(lines))
        print(f"wrote {target.relative_to(ROOT)}")
    for target in report_pictures.written(RESULTS, ROOT / "docs" / "images"):
        print(f"wrote {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
