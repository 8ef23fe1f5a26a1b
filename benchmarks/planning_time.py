"""How long planning takes with a choice of ways and without, and how good the plans are, from one run.

    python benchmarks/planning_time.py [MODEL ...] [--parts solves,builds,large] [--budgets 60%,40%]
        [--families] [--json FILE]

Solves: the tests' models and, as NAME_modelled, those of `implementations.py`, each on a platform by its
formulas, without a limit by the clock. One solve of the graph with every way off, one of the graph with all
exact ways on offer; the budget is a share of the first graph's unplanned peak. Processor seconds count, so
other load does not. With `--families`: the best overhead of the decisions all on and one family on, each
solved as a graph of its own.

Builds: `Hiremate(...)` from the model to the planned module, with empty folders for costs and plans, with
`ways="none"` and with all exact ways: medians of three, taken by turns, since measured costs differ from
build to build and with them the search.

Large: a GPT-2 of about 2,700 ops with ways, solved within 45 s.

The exit status is not zero if a plan with a choice is slower than without, or than a family's, by more than a
thousandth of the step, if all builds together take more than half as long again with ways, or if the large
graph takes longer than it may. Solves are not held to that: without ways many end with a proof within a
second, which says nothing of the harder problem.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import implementations, record
from benchmarks.planning_models import CPU
from remat_executor import estimated_graph
from remat_executor.ways.registry import EXACT
from remat_facade import Hiremate
from remat_facade.entrypoints.options import Ways
from remat_graph import Graph, Roofline, noremat_peak_nbytes, resolve_budget, specialize
from remat_solvers import InfeasibleBudget, Problem, Solution, compile_loops, get_solver, solve_switches
from remat_solvers.bounds.decisions import combinations_of
from tests.helpers.acceptance import whole_step
from tests.helpers.models import CASES, ModelCase

LIMIT_OPS = 1_200  # larger ones of the tests' models add little to the comparison
GROWTH = 1.5
SLOWER = 1e-3
LARGE_LAYERS, LARGE_S = 30, 45.0
SIDES: tuple[Ways, Ways] = ("none", "exact")
REPEATS = 3  # of a build
BUILT = ("resnet18", "mobilenet_v2", "unet_dropout", "gpt2", "bert", "efficientnet_b0")
PARTS = ("solves", "builds", "large")


@attrs.frozen(kw_only=True)
class Solve:
    """One budget of one model; overheads are of the time of the graph with every way off.

    Attributes:
        model: its name.
        ops: of the graph with ways.
        switches: of it.
        budget: the share.
        none_s, ways_s: processor seconds.
        none, ways, families: overheads; None without a plan.
        bound: a lower bound on `ways`.
    """

    model: str
    ops: int
    switches: int
    budget: str
    none_s: float
    ways_s: float
    none: float | None
    ways: float | None
    families: float | None
    bound: float


@attrs.frozen(kw_only=True)
class Build:
    """The time from a model to its planned module: medians of processor seconds."""

    model: str
    budget: str
    none_s: float
    ways_s: float


def graphs(names: list[str]) -> Iterator[tuple[str, Graph, Graph]]:
    """Per model its graph with every way off, and with all exact ways."""
    for case in CASES:
        if not names or case.name in names:
            model, _ = whole_step(case)
            args, kwargs = case.sample(0)
            none, ways = (estimated_graph(model, args, kwargs, CPU, ways=each) for each in ((), EXACT))
            if ways.switches and len(ways.ops) <= LIMIT_OPS:
                yield case.name, none, ways
    for name in implementations.MODELS:
        if not names or f"{name}_modelled" in names:
            none, ways = (implementations.traced(name, ways=each) for each in ("none", "exact"))
            yield f"{name}_modelled", none, ways


def timed(graph: Graph, budget_nbytes: int) -> tuple[Solution, float]:
    """A solve and its processor seconds."""
    began_s = time.process_time()
    solution = solve_switches(get_solver("auto"), Problem(graph, budget_nbytes))
    return solution, time.process_time() - began_s


def of_families(graph: Graph, budget_nbytes: int) -> float | None:
    """The least seconds of the decisions of whole families, each solved alone."""
    found = []
    for on in combinations_of(graph)[0]:
        if on:
            solution = get_solver("auto").solve(Problem(specialize(graph, on).graph, budget_nbytes))
            found += [solution.time_s] if solution.time_s is not None else []
    return min(found, default=None)


def solves(names: list[str], budgets: list[str], families: bool) -> Iterator[Solve]:
    """Every model at every budget."""
    for name, none, ways in graphs(names):
        for budget in budgets:
            budget_nbytes = resolve_budget(budget, none)
            without, none_s = timed(none, budget_nbytes)
            with_ways, ways_s = timed(ways, budget_nbytes)
            best_s = of_families(ways, budget_nbytes) if families else None
            yield Solve(
                model=name,
                ops=len(ways.ops),
                switches=len(ways.switches),
                budget=budget,
                none_s=none_s,
                ways_s=ways_s,
                none=over(without.time_s, none),
                ways=over(with_ways.time_s, none),
                families=over(best_s, none),
                bound=with_ways.lower_bound_s / none.time_s - 1,
            )


def over(time_s: float | None, graph: Graph) -> float | None:
    """The overhead on the step of a graph."""
    return None if time_s is None else time_s / graph.time_s - 1


def builds(names: list[str], budget: str) -> Iterator[Build]:
    """Planned modules, built with empty folders."""
    cases = [case for case in CASES if case.name in (names or BUILT)]
    for case in cases[:1]:  # what a process loads at its first build does not count
        build_s(case, budget, "exact")
    for case in cases:
        try:
            pairs = [[build_s(case, budget, ways) for ways in SIDES] for _ in range(REPEATS)]
        except InfeasibleBudget as error:
            print(f"build {case.name}: {error}")
            continue
        none_s, ways_s = map(statistics.median, zip(*pairs, strict=True))
        yield Build(model=case.name, budget=budget, none_s=none_s, ways_s=ways_s)


def build_s(case: ModelCase, budget: str, ways: Ways) -> float:
    """Processor seconds from a model to its planned module."""
    model, _ = whole_step(case)
    args, kwargs = case.sample(0)
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.process_time()
        Hiremate(model, args, budget, sample_kwargs=kwargs, cache_dir=folder, ways=ways)
        return time.process_time() - began_s


def large() -> tuple[int, float]:
    """Ops of a large model with ways, and the wall seconds of a solve at 60 %."""
    model, inputs = implementations.language_model(
        "GPT2LMHeadModel", "GPT2Config", 8, 1024, n_layer=LARGE_LAYERS
    )
    graph = estimated_graph(model.bfloat16().train(), (), inputs, Roofline(), ways=EXACT)
    began_s = time.perf_counter()
    solve_switches(get_solver("auto"), Problem(graph, int(0.6 * noremat_peak_nbytes(graph))))
    return len(graph.ops), time.perf_counter() - began_s


def percent(value: float | None) -> str:
    """As the table shows it."""
    return f"{'-':>8}" if value is None else f"{100 * value:+8.2f}"


def slower(one: float | None, other: float | None) -> bool:
    """Whether a plan is slower than another, or is missing."""
    return other is not None and (one is None or one > other + SLOWER)


def judge(found: list[Solve], built: list[Build], large_s: float) -> list[str]:
    """What is wrong."""
    wrong = []
    for row in found:
        here = f"{row.model} at {row.budget}"
        wrong += [f"{here}: slower than without ways"] if slower(row.ways, row.none) else []
        wrong += [f"{here}: slower than a family"] if slower(row.ways, row.families) else []
    ratio = total("builds", built)
    wrong += [f"builds take {ratio:.2f} times as long"] if ratio > GROWTH else []
    wrong += [f"the large graph takes {large_s:.0f} s"] if large_s > LARGE_S else []
    return wrong


def total(kind: str, rows: list[Any]) -> float:
    """Print the sums of both sides; return their ratio."""
    none_s, ways_s = sum(row.none_s for row in rows), sum(row.ways_s for row in rows)
    ratio = ways_s / none_s if none_s else 1.0
    print(f"all {kind}: {none_s:.1f} s without ways, {ways_s:.1f} s with, {ratio:.2f} times as long")
    return ratio


def main() -> int:
    """Print the tables; 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="all by default")
    parser.add_argument("--budgets", default="60%,40%", help="shares, separated by commas")
    parser.add_argument("--families", action="store_true", help="solve whole families too, which takes long")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run, separated by commas")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    known = {case.name for case in CASES} | {f"{name}_modelled" for name in implementations.MODELS}
    if not known.issuperset(options.models):
        parser.error(f"no model is called {', '.join(sorted(set(options.models) - known))}")
    parts = options.parts.split(",")
    if not set(PARTS).issuperset(parts):
        parser.error(f"the parts are {', '.join(PARTS)}; got {options.parts}")
    warnings.simplefilter("ignore")
    compile_loops()  # once for an installation, and no part of planning
    budgets = options.budgets.split(",")
    columns = "  budget   none s   ways s   none %   ways % families    bound"
    print(f"{'model':28} {'ops':>5} {'switches':>8}{columns}")
    found = []
    for row in solves(options.models, budgets, options.families) if "solves" in parts else ():
        found.append(row)
        overheads = " ".join(map(percent, (row.none, row.ways, row.families, row.bound)))
        seconds = f"{row.none_s:8.1f} {row.ways_s:8.1f}"
        print(
            f"{row.model:28} {row.ops:5} {row.switches:8}  {row.budget:6} {seconds} {overheads}", flush=True
        )
    total("solves with a plan without ways", [row for row in found if row.none is not None])
    built = []
    for build in builds(options.models, budgets[0]) if "builds" in parts else ():
        built.append(build)
        head = f"build {build.model:36}  {budgets[0]:6}"
        print(f"{head} {build.none_s:8.1f} {build.ways_s:8.1f}", flush=True)
    ops, large_s = large() if "large" in parts and not options.models else (0, 0.0)
    if ops:
        print(f"{ops} ops with ways: {large_s:.1f} s")
    wrong = judge(found, built, large_s)
    if options.json:
        rows = {
            "solves": [attrs.asdict(row) for row in found],
            "builds": [attrs.asdict(row) for row in built],
            "large": {"ops": ops, "wall_s": large_s},
        }
        record.write(options.json, rows, packages=("torch", "transformers", "torchvision"))
    print("\n".join(wrong) or "nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
