"""Draw the README's picture: memory over time of the demo's GPT-2 step, unplanned and in 40 %.

    python benchmarks/picture.py [--out docs/images/memory.png] [--rounds 5]

A busy machine only ever adds to a time, so every op takes the least of its times in several rounds, and so
does the step that they make up. Where the ops together and the step differ by more than a factor of 2, the
machine was too busy: nothing is drawn, and the exit status is not zero.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from remat_executor import step_graph
from remat_facade.demo.tasks import Task, get_task
from remat_facade.entrypoints.inputs import as_call
from remat_facade.planning.planner import RecomputePlanner
from remat_facade.report.picture import draw, png
from remat_graph import Graph, format_seconds
from remat_graph.platforms.base import with_times
from remat_graph.serialization.outputs import write_whole

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "memory.png"
BUDGET, MOST_APART, STEPS = "40%", 2.0, 5


def with_least_times(one: Graph, two: Graph) -> Graph:
    """A graph in which each way to carry out each op takes the shorter of its two times."""
    times = {
        (i, k): min(way.time_s, two.ops[i].implementations[k].time_s)
        for i, op in enumerate(one.ops)
        for k, way in enumerate(op.implementations)
    }
    return with_times(one, times)


def measured(task: Task, rounds: int) -> tuple[Graph, float]:
    """The step's graph with the least times, and the least time of the step itself."""
    torch.manual_seed(0)
    model, batch = task.build(), next(task.batches(0))
    args, kwargs = as_call(batch)
    graph, step_s = None, float("inf")
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:  # whose cache knows no times
            found = step_graph(model, args, kwargs, cache_dir=folder)
        graph = found if graph is None else with_least_times(graph, found)
        for _ in range(STEPS):
            model.zero_grad()
            began_s = time.perf_counter()
            task.loss(model(**batch)).backward()
            step_s = min(step_s, time.perf_counter() - began_s)
    assert graph is not None
    return graph, step_s


def too_busy(ops_s: float, step_s: float) -> str:
    """What is wrong with these times; nothing if they go together."""
    if step_s / MOST_APART <= ops_s <= step_s * MOST_APART:
        return ""
    return (
        f"the ops take {format_seconds(ops_s)} together and a step {format_seconds(step_s)}: "
        "draw it on a machine with nothing else to do"
    )


def main() -> int:
    """Measure, plan and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    graph, step_s = measured(get_task("gpt2"), max(1, options.rounds))
    if problem := too_busy(graph.time_s, step_s):
        print(problem, file=sys.stderr)
        return 1
    plan = RecomputePlanner(budget=BUDGET)(graph)
    print(f"ops {format_seconds(graph.time_s)}, step {format_seconds(step_s)}; wrote {options.out}")
    write_whole(options.out, png(draw(graph, plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
