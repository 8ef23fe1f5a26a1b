"""Two versions of the planner side by side: seconds by the clock, overheads and bounds, from one run.

    python benchmarks/planning_versions.py CHECKOUT [MODEL ...] [--budgets 60%,40%,30%,20%]
        [--json FILE] [--before NAME]

CHECKOUT is a working tree of the other version. Models: those of `planning_models.py`, up to 2,000 ops by
default. This version captures each graph, and each version reads it from a file and plans it in a process of
its own, without saved plans. One plans at a time, and they take turns at going first, so that a machine that
becomes slower or faster meanwhile changes both alike. Where nothing fits there is no overhead.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PACKAGES = ("graph", "solvers", "executor", "offload", "facade")
BUDGETS = "60%,40%,30%,20%"
MOST_OPS = 2_000


class Version:
    """A process that plans with the packages of one working tree."""

    def __init__(self, checkout: Path) -> None:
        paths = [str(checkout / "packages" / name / "src") for name in PACKAGES]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--plan", "."],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()  # its loops are compiled

    def planned(self, graph: Path, budget: str) -> dict[str, Any]:
        """Plan the graph of a file."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(graph), budget]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a version ended; its error is above")
        return dict(json.loads(line))

    def end(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def plan_what_is_asked() -> None:
    """Answer lines (file of a graph, budget) until there are no more; what both versions have in common."""
    from remat_facade.planning.method import Method
    from remat_facade.planning.planner import RecomputePlanner
    from remat_graph import load_graph, resolve_budget
    from remat_solvers import InfeasibleBudget, compile_loops

    warnings.simplefilter("ignore")
    compile_loops()
    print("{}", flush=True)
    for line in sys.stdin:
        file, budget = json.loads(line)
        graph = load_graph(file)
        planner = RecomputePlanner(budget=resolve_budget(budget, graph), method=Method())
        found: dict[str, float | None] = {"overhead": None, "bound": None}
        began_s = time.perf_counter()
        try:
            plan = planner(graph)
            found = {"overhead": plan.overhead, "bound": plan.lower_bound_overhead}
        except InfeasibleBudget:
            pass
        print(json.dumps({"wall_s": time.perf_counter() - began_s, **found}), flush=True)


def rows(
    names: list[str], budgets: list[str], versions: list[Version], folder: Path
) -> Iterator[dict[str, Any]]:
    """Each model at each budget, by the earlier version and by this one."""
    from benchmarks import planning_models
    from remat_graph import save_graph

    number = 0
    for name, graph in planning_models.graphs(names or list(planning_models.NAMES)):
        if len(graph.ops) > MOST_OPS and not names:
            continue
        file = folder / f"{name}.json"
        save_graph(graph, file)
        for budget in budgets:
            turn = versions if number % 2 else versions[::-1]
            found = {version: version.planned(file, budget) for version in turn}
            before, now = (found[version] for version in versions)
            number += 1
            yield {"model": name, "ops": len(graph.ops), "budget": budget, "before": before, "now": now}


def summary(found: list[dict[str, Any]]) -> str:
    """A line for each budget and for all."""
    lines = []
    for budget in [*dict.fromkeys(row["budget"] for row in found), "all"]:
        some = [row for row in found if budget in ("all", row["budget"])]
        both = [row for row in some if None not in (row["before"]["overhead"], row["now"]["overhead"])]
        cells = [f"{budget:5} {len(some):4} plans"]
        for version in ("before", "now"):
            median_s = statistics.median(row[version]["wall_s"] for row in some)
            overheads = 100 * sum(row[version]["overhead"] for row in both)
            gaps = overheads - 100 * sum(row[version]["bound"] for row in both)
            cells.append(f"{version}: median {median_s:.2f} s, overheads {overheads:.1f}, gaps {gaps:.1f}")
        ratio = statistics.median(row["now"]["wall_s"] / row["before"]["wall_s"] for row in some)
        lines.append("; ".join([*cells, f"median ratio {ratio:.2f}"]))
    return "\n".join(lines)


def main() -> None:
    """Print the rows and their summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="working tree of the other version")
    parser.add_argument("models", nargs="*", help="all but the deepest by default")
    parser.add_argument("--budgets", default=BUDGETS, help="separated by commas")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--before", default="an earlier version", help="its name in that file")
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        return plan_what_is_asked()
    if not (options.checkout / "packages").is_dir():
        parser.error(f"{options.checkout} has no folder `packages`; give a working tree of remat")
    from benchmarks import record

    versions = [Version(options.checkout.resolve()), Version(ROOT)]
    found = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(options.models, options.budgets.split(","), versions, Path(folder)):
                found.append(row)
                shown = [f"{row['model']:20} {row['ops']:5} {row['budget']:5}"]
                for each in (row["before"], row["now"]):
                    overhead = "-" if each["overhead"] is None else f"{each['overhead']:+.2%}"
                    shown.append(f"{each['wall_s']:7.2f} s {overhead:>9}")
                print(" ".join(shown), flush=True)
                if options.json:
                    packages = ("torch", "highspy", "numba")
                    record.write(options.json, found, packages=packages, before=options.before)
    finally:
        for version in versions:
            version.end()
    print(summary(found))


if __name__ == "__main__":
    main()
