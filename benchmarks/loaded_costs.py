"""Operator times measured while other processes keep the cores busy, and those on an idle machine.

    python benchmarks/loaded_costs.py [MODEL ...] [--threads 1,2] [--rounds 5] [--load products,memory]
        [--budgets 60%] [--before FILE] [--json FILE]

Each model is captured once. In every round its operators are measured twice, each time with an empty cache:
calm, and alongside busy processes, one for each word of `--load`. These are started here, and stopped while
the calm half runs. `products` multiplies small matrices, `memory` writes 32 MB over and over.

Columns, each the median of the rounds and in brackets the worst: the predicted step as a ratio of the calm
one just before; the median over the operators of how far their times are off from those; seconds of
measuring. The second half compares each calm measurement with the one before: what this machine does by
itself. Points: by how much of the step a plan made from the round with the median step is worse than one made
from the medians of the calm times, judged by these, the mean of the budgets; none with an empty `--budgets`.
With `--before`, the figures of an earlier version's file are printed below.

The exit status is not zero if a median is more than 15 % off for a step or 20 % for operators, or a plan is
more than 0.5 points worse than that from a single calm round.
"""

import argparse
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_executor.costs.annotate import with_costs
from remat_executor.costs.cache import CostCache
from remat_executor.guards.snapshot import Snapshot
from remat_executor.module.input_checks import check_input
from remat_executor.module.pipeline import CallToPlan, PipelineStages
from remat_executor.ways.registry import families
from remat_facade.planning.planner import RecomputePlanner
from remat_graph import Graph, simulate
from remat_graph.platforms.base import with_times
from tests.helpers.acceptance import whole_step
from tests.helpers.models import get_case

MODELS = ("gpt2", "llama", "t5", "bert", "vit", "resnet18", "mobilenet_v2", "unet_dropout", "lstm", "fft")
STEP_OFF, OPS_OFF, WORSE_POINTS = 0.15, 0.20, 0.5
LOADS = {
    "products": "import numpy as np; a = np.ones((128, 128), np.float32)\nwhile True: a @ a",
    "memory": "import numpy as np; a = np.ones(8 << 20, np.float32)\nwhile True: a += 1",
    "python": "while True: pass",
}


@attrs.frozen(kw_only=True)
class Row:
    """One model with one number of threads; lists have an entry for each round.

    Attributes:
        model, threads: what ran.
        ops: of the graph.
        step_s: predicted from calm times.
        loaded, calm: the step as a ratio of the calm one just before.
        ops_loaded, ops_calm: the median over the operators of how far their times are off.
        plan_loaded, plan_calm: points of the step by which plans are worse; of one round, or of none.
        measuring_loaded, measuring_calm: seconds.
    """

    model: str
    threads: int
    ops: int
    step_s: float
    loaded: list[float]
    calm: list[float]
    ops_loaded: list[float]
    ops_calm: list[float]
    plan_loaded: list[float]
    plan_calm: list[float]
    measuring_loaded: list[float]
    measuring_calm: list[float]

    def wrong(self) -> Iterator[str]:
        """What is worse than it may be."""
        name = f"{self.model}, {self.threads} threads"
        step, ops = statistics.median(self.loaded), statistics.median(self.ops_loaded)
        if abs(step - 1) > STEP_OFF:
            yield f"{name}: the step is {step:.2f} times the calm one"
        if ops > OPS_OFF:
            yield f"{name}: operators are {ops:.0%} off"
        for loaded, calm in zip(self.plan_loaded, self.plan_calm, strict=True):
            if loaded - calm > WORSE_POINTS:
                yield f"{name}: plans are {loaded - calm:.2f} points worse"


class Load:
    """Busy processes, which run only within `on`."""

    def __init__(self, programs: list[str]) -> None:
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen([sys.executable, "-c", LOADS[name]], env=environment) for name in programs
        ]
        time.sleep(2)  # imports
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Let the processes run meanwhile."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def captured(name: str) -> Callable[[], Graph]:
    """Capture a model's step; the result measures it with an empty cache."""
    case = get_case(name)
    (model, _), (args, kwargs) = whole_step(case), case.sample(0)
    tensors = check_input(model, args, kwargs)
    conditions = Snapshot.take(model).signature(tensors).conditions()
    call = CallToPlan(model=model, tensors=tensors, conditions=conditions, forward=model.forward)
    stages = PipelineStages(costs=with_costs, differentiate=None, on_progress=None, families=families(None))
    traced = stages.capture(call)
    translation = stages.translate(call, traced)

    def measured() -> Graph:
        with tempfile.TemporaryDirectory() as folder:
            cache = CostCache(tensors.device, folder)
            return with_costs(traced.captured, translation, tensors, cache=cache)

    return measured


def timed(measured: Callable[[], Graph]) -> tuple[Graph, float]:
    """A measured graph and the seconds of measuring."""
    began_s = time.perf_counter()
    return measured(), time.perf_counter() - began_s


def typical(graphs: list[Graph]) -> Graph:
    """The graph with the median of each time."""
    first = graphs[0]
    return with_times(
        first,
        {
            (i, k): statistics.median(graph.ops[i].implementations[k].time_s for graph in graphs)
            for i, op in enumerate(first.ops)
            for k in range(len(op.implementations))
        },
    )


def ops_off(graph: Graph, calm: Graph) -> float:
    """How far the times of operators are off: the median."""
    pairs = [(one.first.time_s, two.first.time_s) for one, two in zip(graph.ops, calm.ops, strict=True)]
    return statistics.median(abs(one / two - 1) for one, two in pairs if two > 0)


def planned_s(graph: Graph, calm: Graph, budget: str) -> float:
    """Seconds, by calm times, of the plan that a graph leads to."""
    plan = RecomputePlanner(budget=budget)(graph)
    return simulate(calm, plan.schedule, grads=plan.grads).time_s


def row_of(name: str, threads: int, rounds: int, budgets: list[str], load: Load) -> Row:
    """Measure a model in rounds."""
    torch.set_num_threads(threads)
    measured = captured(name)
    measured()  # what is initialized once in a process
    calm_rounds, loaded_rounds = [timed(measured)], []
    for _ in range(rounds):
        with load.on():
            time.sleep(0.1)
            loaded_rounds.append(timed(measured))
        calm_rounds.append(timed(measured))
    before = [graph for graph, _ in calm_rounds]
    calm = typical(before)
    least = {budget: planned_s(calm, calm, budget) for budget in budgets}

    def worse(graphs: list[Graph]) -> list[float]:
        if not budgets:
            return []
        middle = sorted(graphs, key=lambda graph: graph.time_s)[len(graphs) // 2]
        more = [planned_s(middle, calm, budget) - least[budget] for budget in budgets]
        return [100 * statistics.fmean(more) / calm.time_s]

    kinds = {"calm": calm_rounds[1:], "loaded": loaded_rounds}
    found = {
        kind: {
            "step": [graph.time_s / one.time_s for (graph, _), one in zip(each, before, strict=False)],
            "ops": [ops_off(graph, one) for (graph, _), one in zip(each, before, strict=False)],
            "plan": worse([graph for graph, _ in each]),
            "measuring": [seconds for _, seconds in each],
        }
        for kind, each in kinds.items()
    }
    return Row(
        model=name,
        threads=threads,
        ops=len(calm.ops),
        step_s=calm.time_s,
        loaded=found["loaded"]["step"],
        calm=found["calm"]["step"],
        **{f"{what}_{kind}": found[kind][what] for kind in kinds for what in ("ops", "plan", "measuring")},
    )


def worst(numbers: list[float], of: float = 0.0) -> float:
    """The number that is farthest off."""
    return max(numbers, key=lambda number: abs(number - of))


def shown(row: Row) -> str:
    """A line of the table."""
    middle = statistics.median
    cells = []
    for kind in ("loaded", "calm"):
        step = row.loaded if kind == "loaded" else row.calm
        ops, plan, seconds = (getattr(row, f"{what}_{kind}") for what in ("ops", "plan", "measuring"))
        cells.append(
            f"{middle(step):7.2f} ({worst(step, 1.0):7.2f}) {middle(ops):6.1%} ({max(ops):6.1%}) "
            f"{plan[0] if plan else math.nan:6.2f} {middle(seconds):6.2f}"
        )
    return f"{row.model:13} {row.threads} {row.ops:5} {1e3 * row.step_s:8.2f}  {cells[0]}  |  {cells[1]}"


def main() -> int:
    """Print the table; 1 if something is worse than it may be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help="ten by default")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", default="products,products", help=f"of {', '.join(LOADS)}")
    parser.add_argument("--budgets", default="60%", help="may be empty")
    parser.add_argument("--before", type=Path, help="rows of an earlier version")
    parser.add_argument("--json", type=Path, help="write the rows here, after each row")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    budgets = [budget for budget in options.budgets.split(",") if budget]
    rows: list[Row] = []
    head = f"{'step':>7} {'worst':>9} {'ops':>6} {'':>8} {'points':>6} {'s':>6}"
    print(f"{'model':13} t   ops  calm ms  {head}  |  {head}   (loaded | calm)")
    load = Load(options.load.split(","))
    try:
        for threads in map(int, options.threads.split(",")):
            for name in options.models:
                rows.append(row_of(name, threads, options.rounds, budgets, load))
                print(shown(rows[-1]), flush=True)
                if options.json:
                    record.write(
                        options.json,
                        [attrs.asdict(row) for row in rows],
                        packages=("torch", "transformers", "torchvision"),
                        load=options.load,
                        rounds=options.rounds,
                    )
    finally:
        load.end()
    if options.before:
        print("before")
        for data in json.loads(options.before.read_text())["rows"]:
            print(shown(Row(**data)))
    wrong = [line for row in rows for line in row.wrong()]
    print("\n".join(wrong) or "all within the limits")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
