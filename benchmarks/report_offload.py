"""The page of results on plans that move: what was exact, hidden, decided, and how far from the best."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.report_parts import filled, made_with, percent, table


def kib(nbytes: int) -> str:
    """Bytes in KiB."""
    return f"{nbytes / 1024:.1f}"


def exact(data: dict[str, Any]) -> Iterator[str]:
    """Bits and bytes of whole trainings."""
    rows = data["rows"]
    yield "## Exact and within both budgets\n"
    yield (
        "`python benchmarks/offload_exact.py`: small models with dropout, tied weights, clipping and four "
        "micro-batches, trained plainly and by `Offmate`, saved and resumed in the middle. Exact: losses, "
        "parameters, buffers and states are bit-identical, resumed or not. Sizes in KiB, metered at every "
        f"step. {len(rows)} rows, {sum(bool(row['broken']) for row in rows)} with a broken rule.\n"
    )
    yield made_with(data)
    header = (
        "model, optimizer, style, budget, meter, host, host predicted, recomputed, values on the host, exact"
    )
    cells = []
    for row in rows:
        if "optimizer" not in row:
            continue
        exact = "no" if row["differences"] or row["after_resuming"] else "yes"
        cells.append(
            [
                *(row[name] for name in ("model", "optimizer", "style")),
                *(kib(row[name]) for name in ("budget_nbytes", "metered_nbytes")),
                *(kib(row[name]) for name in ("host_metered_nbytes", "host_predicted_nbytes")),
                percent(row["recomputed"]),
                str(row["on_host"]),
                exact,
            ]
        )
    yield from table(header.split(", "), cells)
    yield "Many steps: the peak of the first and of the last step, in KiB.\n"
    yield from table(
        ("model", "style", "steps", "first", "last"),
        [
            [row["model"], row["style"], str(row["steps"]), kib(row["first_nbytes"]), kib(row["last_nbytes"])]
            for row in rows
            if "first_nbytes" in row
        ],
    )


def overlap(data: dict[str, Any]) -> Iterator[str]:
    """Steps against their roofs."""
    *rows, optimizer = data["rows"]
    yield "## What overlaps\n"
    yield (
        "`python benchmarks/offload.py`: time of steps on a simulated device, relative to their roof: the "
        "longest of compute, of the copies on each link, and of the optimizer. *hidden*: according to the "
        "plan compute waits for nothing; then a step may take 1.10 of its roof.\n"
    )
    yield made_with(data)
    header = (
        "budget, style, link, compute s, to host s, to device s, optimizer s, predicted s, step s, "
        "of the roof, hidden"
    )
    columns = ("compute_s", "to_host_s", "to_device_s", "optimizer_s", "predicted_s", "step_s")
    yield from table(
        header.split(", "),
        [
            [row["budget"], row["style"], percent(row["share"])]
            + [f"{row[name]:.3f}" for name in columns]
            + [f"{row['ratio']:.3f}", "yes" if row["hidden"] else "no"]
            for row in rows
        ],
    )
    yield (
        "The optimizer on the CPU, parameter by parameter on its lane, is "
        f"{optimizer['as_fast']:.3f} times as fast as one fused step over a flat buffer "
        f"({optimizer['lane_gb_per_s']:.1f} and {optimizer['flat_gb_per_s']:.1f} GB/s), both with concurrent "
        "copies in both directions.\n"
    )


def decisions(data: dict[str, Any]) -> Iterator[str]:
    """What is planned for models larger than a device."""
    yield "## Decisions for large models\n"
    yield (
        "`python benchmarks/offload_decisions.py`: Llama 3 8B and Qwen3 14B, planned from the meta device "
        "for an H200 with 450 TFLOP/s, 55 GB/s in each direction and 150 GB/s of host memory; nothing was "
        "run. GiB and seconds, limits in brackets. *on host*: the share of the model that is "
        "placed there; *streamed*: the share of which only the states are; *moved*: bytes of activations.\n"
    )
    yield made_with(data)
    rows = []
    for row in data["rows"]:
        host = "" if row["host_budget"] is None else f" ({row['host_budget']:.0f})"
        allowed = {name: row[f"{name}_allowed"] for name in ("overhead", "least_ratio")}
        rows.append(
            [
                row["case"],
                f"{row['device']:.1f} ({row['device_budget']:.0f})",
                f"{row['host']:.1f}{host}",
                percent(row["away"]),
                percent(row["streamed"]),
                f"{row['moved']:.1f}",
                filled(row["time_s"], lambda seconds: f"{seconds:.3f}"),
                filled(row["fastest_by_hand_s"], lambda seconds: f"{seconds:.3f}"),
                filled(row["overhead"], percent)
                + ("" if allowed["overhead"] is None else f" ({percent(allowed['overhead'])})"),
                filled(row["least_ratio"], lambda ratio: f"{ratio:.3f}")
                + ("" if allowed["least_ratio"] is None else f" ({allowed['least_ratio']})"),
                f"{row['planned_s']:.0f}",
            ]
        )
    header = (
        "case, device, host, on host, streamed, moved, step s, best share by hand s, overhead, "
        "of the least time, planned in s"
    )
    yield from table(header.split(", "), rows)


def chains(data: dict[str, Any]) -> Iterator[str]:
    """Compared with `pofo`, and with recomputation alone."""
    rows = data["rows"]
    above = [row["above"] for row in rows if row["above"] is not None]
    removed = [row["removed"] for row in rows if row["removed"] is not None]
    yield "## Comparison with `pofo`, and with recomputation alone\n"
    yield (
        f"`python benchmarks/offload_chains.py`: {len(rows)} chains. `offload` against `pofo` on "
        f"{len(above)} of them: median {percent(statistics.median(above))} slower, worst "
        f"{percent(max(above))}. On the {len(removed)} chains whose links allow it, copies remove "
        f"{percent(statistics.median(removed))} of the overhead of the best plan without copies in the "
        f"median, and {percent(min(removed))} at least.\n"
    )
    yield made_with(data)


def moving(data: dict[str, Any]) -> Iterator[str]:
    """What an accelerator measured where values move; see gpu_offload.py."""
    yield f"## Offloading: {data['device']}\n"
    rates = ["; ".join(f"{lane} {rate / 1e9:.1f}" for lane, rate in row.items()) for row in data["rates"]]
    yield (
        "`hatch run bench-gpu-offload`: training of a whole model with fp32 masters and Adam states, "
        "within a share of the memory of eager. Hidden is the share of the optimizer that adds nothing to a "
        f"step. GB/s: {', '.join(rates)}, each group concurrently.\n"
    )
    yield made_with(data)
    header = (
        "model, method, budget, tokens/s, step s, predicted s, device GiB, of a budget of, host GiB, hidden"
    )
    rows = []
    for row in data["rows"]:
        cells = [row["model"], row["method"], filled(row["fraction"], percent)]
        if row["note"]:
            rows.append([*cells, row["note"], *[""] * 6])
            continue
        cells.append(f"{row['tokens_per_s']:.0f}")
        cells += [filled(row[key], lambda seconds: f"{seconds:.3f}") for key in ("step_s", "predicted_s")]
        sizes = ("peak_nbytes", "budget_nbytes", "host_nbytes")
        cells += [filled(row[key], lambda nbytes: f"{nbytes / (1 << 30):.2f}") for key in sizes]
        rows.append([*cells, filled(row["hidden"], percent)])
    yield from table(header.split(", "), rows)
