"""The whole acceptance: every model, at the smallest budget found, 40 %, 70 % and 100 %, judged and tabled.

For each row: three training steps beside the unplanned model, compared to the bit; the peak by the meter
and by the allocator, with ``.grad`` None and there already, against the budget and the predictions. Exits
with 1 if a row breaks a rule that `EXCEPTIONS` does not list with its cause, or if no plan of all models
and budgets uses a family of exact ways.

    python benchmarks/exact.py [MODEL ...] [--budgets smallest,40%,70%,100%] [--time-limit 5] [--json FILE]

``--part-nbytes 0`` hands each gradient over by itself; ``--ranks 2`` trains under DistributedDataParallel,
with one plan for all ranks and a row for each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attrs
from torch.nn.parallel import DistributedDataParallel

from benchmarks import record
from remat_executor import step_graph
from remat_facade import Hiremate
from remat_graph import noremat_peak_nbytes
from remat_graph.budget import gradient_nbytes
from remat_graph.switches.specialize import family_of
from remat_solvers import min_budget
from tests.helpers.acceptance import as_it_is, broken_rules, compare, whole_step
from tests.helpers.models import CASES, LARGE_CASES, ModelCase, get_case
from tests.helpers.ranks import Ranks
from tests.ways.fuzz import FAMILIES

BUDGETS = ("smallest", "40%", "70%", "100%")
UNLIMITED_S = 3600.0
MIB = 1 << 20
SMALL_ENOUGH = 15  # models whose smallest budget must be 40 % or less

_CHECKPOINTED = "capture sees through the model's own checkpoints, so 100 % is above eager's peak"

# (model, budget, rule) -> cause. What is not listed here must hold.
EXCEPTIONS = {
    ("checkpointed", "40%", "eager"): _CHECKPOINTED,
    ("checkpointed", "70%", "eager"): _CHECKPOINTED,
    ("checkpointed", "100%", "eager"): _CHECKPOINTED,
}


def smallest_budget(case: ModelCase, cache: Path) -> tuple[int, float]:
    """The smallest budget found, and its share between gradients and the unplanned peak."""
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    graph = step_graph(model, args, kwargs, cache_dir=cache)
    nbytes = min_budget(graph).nbytes
    held = gradient_nbytes(graph)
    return nbytes, (nbytes - held) / (noremat_peak_nbytes(graph) - held)


@attrs.frozen(kw_only=True)
class Setting:
    """How rows are made.

    Attributes:
        cache: folder of the measured costs.
        limit_s: seconds for the solver, per plan.
        part_nbytes: as `PlannedModule` takes it.
        ranks: how many processes train together.
    """

    cache: Path
    limit_s: float
    part_nbytes: int | None
    ranks: int


def run(rank: int, name: str, label: str, budget: int | str, setting: Setting) -> dict[str, Any]:
    """One row, of one rank."""
    case = get_case(name)
    began_s = time.perf_counter()
    built: list[float] = []

    def build(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hiremate:
        module = Hiremate(
            model,
            args,
            budget,
            sample_kwargs=kwargs,
            cache_dir=setting.cache,
            # The search that found the smallest budget had no limit, and hardly another schedule fits it.
            time_limit_s=UNLIMITED_S if label == "smallest" else setting.limit_s,
            part_nbytes=setting.part_nbytes,
            ranks="together" if setting.ranks > 1 else None,
        )
        built.append(time.perf_counter() - began_s)
        return module

    around = as_it_is if setting.ranks == 1 else distributed(case)
    found = compare(case, build, around=around, rank=rank, ranks=setting.ranks)
    plan, peaks = found.module.plan, found.peaks
    broken: dict[str, str] = {}
    for rule, what in broken_rules(found):  # a rule may be broken by both readings
        broken[rule] = f"{broken[rule]}; {what}" if rule in broken else what
    return {
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
        "ways": dict(Counter(map(family_of, plan.switched))),
        "repeats": found.repeats,
        "parts": found.module.parts,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound_overhead,
        "build_s": built[0],
        "broken": broken,
    }


def distributed(case: ModelCase) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """What puts DistributedDataParallel around a model of this case, with some ten buckets."""
    model, loss = whole_step(case)
    args, kwargs = case.sample(0)
    loss(model(*args, **kwargs)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    nbytes = sum(p.nbytes for p in trained)
    # Only where it has to look for them: it then clones all outputs, which no plan can count.
    unused = any(p.grad is None for p in trained)

    def around(module: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(module, bucket_cap_mb=nbytes / 10 / MIB, find_unused_parameters=unused)

    return around


HEADER = (
    f"{'model':18} {'budget':>9} {'MiB':>7} {'metered':>7} {'alloc.':>7} {'live err':>8} {'alloc err':>9} "
    f"{'accum.':>7} {'eager':>7} {'exact':>5} {'repeats':>7} {'parts':>5} {'overhead':>8} {'bound':>7} "
    f"{'build s':>7}"
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
        f"{'yes' if row['exact'] else 'NO':>5} {row['repeats']:7} {row['parts']:5} {row['overhead']:8.2%} "
        f"{row['lower_bound']:7.2%} {row['build_s']:7.1f}"
    )
    for rule, what in row["broken"].items():
        known = EXCEPTIONS.get((row["model"], row["budget"], rule))
        text += f"\n    {'known' if known else 'BROKEN'}: {rule}: {what}" + (f" ({known})" if known else "")
    return text


def rows_of(
    case: ModelCase, labels: Sequence[str], setting: Setting, ranks: Ranks
) -> Iterator[dict[str, Any]]:
    """The rows of a model. One that fails is a result."""
    try:
        smallest, share = smallest_budget(case, setting.cache)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        yield {"model": case.name, "budget": "smallest", "error": repr(error), "broken": {"error": ""}}
        return
    for label in labels:
        start: dict[str, Any] = {"model": case.name, "budget": label, "smallest_share": share}
        if label.endswith("%") and float(label[:-1]) / 100 < share:
            yield start | {"infeasible": True, "broken": {}}
            continue
        asked = (case.name, label, smallest if label == "smallest" else label, setting)
        try:
            found = [run(0, *asked)] if setting.ranks == 1 else ranks.run(run, *asked)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            yield start | {"error": repr(error), "broken": {"error": repr(error)}}
            continue
        for rank, row in enumerate(found):
            yield start | ({} if setting.ranks == 1 else {"rank": rank}) | row


def main() -> int:
    """Run the acceptance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help="names of model cases (tests/helpers/models); all of them by default"
    )
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for the solver per plan")
    parser.add_argument("--part-nbytes", type=int, help="bytes of gradients that wait together at most")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    parser.add_argument("--json", type=Path, help="write the rows here as well, after each model")
    options = parser.parse_args()
    cases = [case for case in (*CASES, *LARGE_CASES) if not options.models or case.name in options.models]
    torch.set_num_threads(1)  # the models are small, and two threads on a busy machine run slower than one
    rows: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder, Ranks(options.ranks) as ranks:
        setting = Setting(
            cache=Path(folder),
            limit_s=options.time_limit,
            part_nbytes=options.part_nbytes,
            ranks=options.ranks,
        )
        for case in cases:
            for row in rows_of(case, options.budgets.split(","), setting, ranks):
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
    used = Counter(family for row in rows for family in row.get("ways", ()))
    counts = ", ".join(f"{family} {count}" for family, count in sorted(used.items()))
    print(f"\nplans with ways of a family: {counts or 'none'}")
    print(f"{len(rows)} rows of {len(cases)} models; smallest budget at 40 % or less: {len(small)} models")
    print(f"{len(bad)} rules broken" + (f": {bad}" if bad else ""))
    whole = not options.models and options.budgets == ",".join(BUDGETS)
    unused = [name for name in FAMILIES if name not in used] if whole else []
    if unused:
        print(f"no plan uses ways of {', '.join(unused)}")
    return int(bool(bad or unused) or (not options.models and len(small) < SMALL_ENOUGH))


if __name__ == "__main__":
    sys.exit(main())
