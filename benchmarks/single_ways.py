"""What one family of ways brings to a step on this machine, forced on: peak and time, from one run.

    python benchmarks/single_ways.py [CASE ...] [--steps N]

No solver chooses: every op runs once, with all ways of the family off and on; activations behind norms are
dropped and repeated once, as in plans with a small budget. Steps take turns; the ratio is the median over
pairs, so that other load on the machine cancels. Peaks are the allocator's. The models are those of
`measured_ways.py`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measured_ways import MODELS
from remat_executor import PlanFunction, PlannedModule, allocator_peak
from remat_executor.ways.fused_gelu import fused_gelu
from remat_executor.ways.linear_head import linear_head
from remat_executor.ways.loss_head import loss_head
from remat_executor.ways.norm_activations import norm_activations
from remat_executor.ways.substitution import Family
from remat_graph import Graph, Plan, Roofline, Schedule, specialize

MIB = 1 << 20
CASES: Mapping[str, tuple[str, Family, torch.dtype]] = {
    f"{family.__name__} {model} {str(dtype).removeprefix('torch.')}": (model, family, dtype)
    for family, models in (
        (loss_head, ("gpt2",)),
        (linear_head, ("gpt2",)),
        (fused_gelu, ("gpt2",)),
        (norm_activations, ("resnet50", "mobilenet_v2", "unet")),
    )
    for model in models
    for dtype in (torch.float32, torch.bfloat16)
}


def forced(graph: Graph, *, on: bool, repeats: bool) -> Plan:
    """A plan with all switches off or on; with `repeats`, what a norm and its activation make is repeated."""
    decided = specialize(graph, graph.switches if on else ())
    ops = range(len(decided.graph.ops))
    forward = [i for i in ops if not decided.graph.ops[i].backward]
    again: list[int] = []
    if repeats:
        again = repeated_ops(graph, [decided.ops[i] for i in forward], on=on)
        place = {op: i for i, op in enumerate(decided.ops)}
        again = [place[op] for op in again]
    order = [*forward, *again, *(i for i in ops if decided.graph.ops[i].backward)]
    schedule = decided.restore(Schedule.from_order(decided.graph, order))
    return Plan.from_schedule(graph, schedule, budget_nbytes=1 << 50, lower_bound_s=0.0, solver="forced")


def repeated_ops(graph: Graph, forward: list[int], *, on: bool) -> list[int]:
    """The activations with a way; with the ways off, also the ops between the norm's input and them."""
    activations = {i for i in forward if graph.ops[i].alternatives}
    if on:
        return sorted(activations)
    found = set(activations)
    for i in activations:
        for alternative in graph.ops[i].alternatives:
            given = set(graph.ops[i].implementations[alternative.again or 0].inputs)
            waiting = list(graph.ops[i].first.inputs)
            while waiting:
                value = waiting.pop()
                op = graph.producer[value]
                if value not in given and op is not None and op not in found:
                    found.add(op)
                    waiting += graph.ops[op].first.inputs
    return sorted(found)


def step(module: nn.Module, sample: Tensor) -> float:
    """Seconds of a step whose gradients are new."""
    module.zero_grad()
    began_s = time.perf_counter()
    module(sample).backward()
    return time.perf_counter() - began_s


def shown(case: str, steps: int) -> str:
    """Run a case; a line of the table."""
    name, family, dtype = CASES[case]
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    model.train().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    sample = sample.to(dtype) if sample.is_floating_point() else sample
    planners: list[PlanFunction] = [
        partial(forced, on=on, repeats=family is norm_activations) for on in (False, True)
    ]
    made = [
        PlannedModule(model, (sample,), {}, planner, platform=Roofline(), ways=[family])
        for planner in planners
    ]
    peaks = []
    for module in made:
        step(module, sample)
        module.zero_grad()
        peaks.append(allocator_peak(partial(step, module, sample)).peak_nbytes / MIB)
    times = [[step(module, sample) for module in made] for _ in range(steps)]
    ratio = statistics.median(on / off for off, on in times)
    seconds = [min(column) for column in zip(*times, strict=True)]
    ways = len(made[1].graph.switches)
    return (
        f"{case:38} {ways:4} {peaks[0]:8.1f} {peaks[1]:8.1f} {ratio:7.3f} {seconds[0]:8.3f} {seconds[1]:8.3f}"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), help="all by default")
    parser.add_argument("--steps", type=int, default=7, help="timed pairs of each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'case':38} ways  off MiB   on MiB   ratio  least s  least s")
    for case in options.cases:
        print(shown(case, options.steps), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
