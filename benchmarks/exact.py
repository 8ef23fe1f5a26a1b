"""The whole acceptance: every model, at the smallest budget found, 40 %, 70 % and 100 %, judged and tabled.

For each row: three training steps beside the unplanned model, compared to the bit; the peak by the meter and
by the allocator, with ``.grad`` None and there already, against the budget and the predictions. Exits with 1
if a row breaks a rule that `EXCEPTIONS` does not list with its cause.

    python benchmarks/exact.py [MODEL ...] [--budgets smallest,40%,70%,100%] [--time-limit 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record
from remat_executor import plan_graph
from remat_facade import Hiremate
from remat_graph.units import gradient_nbytes, noremat_peak_nbytes
from remat_solvers.questions import min_budget
from tests.acceptance import broken_rules, compare, whole_step
from tests.models import CASES, ModelCase

BUDGETS = ("smallest", "40%", "70%", "100%")
MIB = 1 << 20
SMALL_ENOUGH = 15  # models whose smallest budget must be 40 % or less

_CHECKPOINTED = "capture sees through the model's own checkpoints, so 100 % is above eager's peak"

# (model, budget, rule) -> cause. What is not listed here must hold.
EXCEPTIONS = {
    (
        "vgg16",
        "smallest",
        "eager",
    ): "one convolution's scratch binds while .grad is None: what goes below it holds more elsewhere",
    ("checkpointed", "40%", "eager"): _CHECKPOINTED,
    ("checkpointed", "70%", "eager"): _CHECKPOINTED,
    ("checkpointed", "100%", "eager"): _CHECKPOINTED,
}


def smallest_budget(case: ModelCase, cache: Path) -> tuple[int, float]:
    """The smallest budget found, and its share between gradients and the unplanned peak."""
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    graph = plan_graph(model, args, kwargs, cache_dir=cache)
    nbytes = min_budget(graph).nbytes
    held = gradient_nbytes(graph)
    return nbytes, (nbytes - held) / (noremat_peak_nbytes(graph) - held)


def run(
    case: ModelCase, label: str, budget: int | str, share: float, cache: Path, limit_s: float
) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"model": case.name, "budget": label, "smallest_share": share}
    if label.endswith("%") and float(label[:-1]) / 100 < share:
        return row | {"infeasible": True, "broken": {}}
    began_s = time.perf_counter()
    built: list[float] = []

    def build(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hiremate:
        module = Hiremate(model, args, budget, sample_kwargs=kwargs, cache_dir=cache, time_limit_s=limit_s)
        built.append(time.perf_counter() - began_s)
        return module

    found = compare(case, build)
    plan, peaks = found.module.plan, found.peaks
    broken: dict[str, str] = {}
    for rule, what in broken_rules(found):  # a rule may be broken by both readings
        broken[rule] = f"{broken[rule]}; {what}" if rule in broken else what
    return row | {
        "budget_nbytes": plan.budget_nbytes,
        "unplanned_nbytes": plan.noremat_peak_nbytes,
        "exact": not found.differences,
        "differences": list(found.differences),
        "metered_nbytes": peaks.metered_nbytes,
        "predicted_live_nbytes": plan.live_peak_nbytes,
        "allocated_nbytes": peaks.allocated_nbytes,
        "predicted_nbytes": plan.peak_nbytes,
        "accumulating_nbytes": peaks.metered_accumulating_nbytes,
        "eager_nbytes": found.original.metered_nbytes,
        "eager_accumulating_nbytes": found.original.metered_accumulating_nbytes,
        "ops": len(found.module.graph.ops),
        "repeats": found.repeats,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound_overhead,
        "build_s": built[0],
        "broken": broken,
    }


HEADER = (
    f"{'model':18} {'budget':>9} {'MiB':>7} {'metered':>7} {'alloc.':>7} {'live err':>8} {'alloc err':>9} "
    f"{'accum.':>7} {'eager':>7} {'exact':>5} {'repeats':>7} {'overhead':>8} {'bound':>7} {'build s':>7}"
)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    start = f"{row['model']:18} {row['budget']:>9}"
    if row.get("infeasible"):
        return f"{start} infeasible: the smallest budget found is {row['smallest_share']:.0%}"
    if "error" in row:
        return f"{start} FAILED {row['error']}"
    live = row["predicted_live_nbytes"] / row["metered_nbytes"] - 1
    allocator = row["predicted_nbytes"] / row["allocated_nbytes"] - 1
    text = (
        f"{start} {row['budget_nbytes'] / MIB:7.2f} {row['metered_nbytes'] / MIB:7.2f} "
        f"{row['allocated_nbytes'] / MIB:7.2f} {live:8.2%} {allocator:9.2%} "
        f"{row['accumulating_nbytes'] / MIB:7.2f} {row['eager_accumulating_nbytes'] / MIB:7.2f} "
        f"{'yes' if row['exact'] else 'NO':>5} {row['repeats']:7} {row['overhead']:8.2%} "
        f"{row['lower_bound']:7.2%} {row['build_s']:7.1f}"
    )
    for rule, what in row["broken"].items():
        known = EXCEPTIONS.get((row["model"], row["budget"], rule))
        text += f"\n    {'known' if known else 'BROKEN'}: {rule}: {what}" + (f" ({known})" if known else "")
    return text


def main() -> int:
    """Run the acceptance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="names of tests/models.py; all of them by default")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for the solver per plan")
    parser.add_argument("--json", type=Path, help="write the rows here as well, after each model")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.models or case.name in options.models]
    torch.set_num_threads(1)  # the models are small, and two threads on a busy machine run slower than one
    rows: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            try:
                smallest, share = smallest_budget(case, Path(folder))
            except Exception as error:  # noqa: BLE001 - a row that fails is a result
                traceback.print_exc()
                rows.append(
                    {"model": case.name, "budget": "smallest", "error": repr(error), "broken": {"error": ""}}
                )
                continue
            for label in options.budgets.split(","):
                budget: int | str = smallest if label == "smallest" else label
                try:
                    row = run(case, label, budget, share, Path(folder), options.time_limit)
                except Exception as error:  # noqa: BLE001 - a row that fails is a result
                    traceback.print_exc()
                    row = {
                        "model": case.name,
                        "budget": label,
                        "error": repr(error),
                        "broken": {"error": repr(error)},
                    }
                rows.append(row)
                print(line(row), flush=True)
            if options.json:
                record.write(options.json, rows, packages=["torch"])
    small = {row["model"] for row in rows if row.get("smallest_share", 1.0) <= 0.4}
    bad = [
        (r["model"], r["budget"], rule)
        for r in rows
        for rule in r["broken"]
        if (r["model"], r["budget"], rule) not in EXCEPTIONS
    ]
    print(f"\n{len(rows)} rows of {len(cases)} models; smallest budget at 40 % or less: {len(small)} models")
    print(f"{len(bad)} rules broken" + (f": {bad}" if bad else ""))
    return int(bool(bad) or (not options.models and len(small) < SMALL_ENOUGH))


if __name__ == "__main__":
    sys.exit(main())
