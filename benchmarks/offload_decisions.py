"""What the planner of moves decides for models larger than a device, and what that is predicted to take.

    python benchmarks/offload_decisions.py [CASE ...] [--time-limit SECONDS] [--json FILE]

Llama 3 8B and Qwen3 14B in bf16 with fp32 master weights and Adam's states, 1 x 8192 tokens a micro-batch,
captured on the meta device for a device of 450 TFLOP/s and 4.8 TB/s with the links of an H200: 55 GB/s either
way, 150 GB/s of host memory. An update moves 28 bytes a parameter, at 4.8 TB/s on the device. Everything is
the referee's prediction, nothing was run. The exit status is not zero if a bound is broken:

* resident: on 134 GiB nothing of the 8B's state moves, and the overhead is at most 3 %;
* share: on 74 GiB the plan is as fast as every share of the model set by hand, and all of it (to 0.5 %);
* split: the 14B fits 134 GiB and 112 GiB of host neither on the device nor on the host alone, but split;
* tight: on 22 GiB a step takes at most 1.40, 1.16 and 1.09 times its least time with 1, 2 and 4 micro-batches
  (`least_time_s`). Weights, gradients and states are 120 GiB, one op needs 13.7 beside them: gradients that
  add up do not fit 112 GiB of host;
* every plan within 60 s, capture included.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_executor import estimated_graph
from remat_graph import Grads, Graph, Lane, OptimizerStep, Role, Roofline, Schedule, Timeline, simulate
from remat_graph.platforms.data_sheets import h200
from remat_graph.training import Optimized, accumulating, training_graph, with_placement
from remat_solvers import Deadline, Problem, Solution
from remat_solvers.offload.candidate import PERIODS
from remat_solvers.offload.parameter_groups import params_of
from remat_solvers.offload.solver import Offload
from tests.helpers.models import import_transformers

GIB = 1 << 30
TOKENS = 8192
DEVICE = Roofline(flops_per_s=450e12, nbytes_per_s=4.8e12)
LINKS = h200().links
UPDATE_NBYTES = 28
LIMIT_S = 60.0
SPARE_S = 10.0  # of it, for what a search does beyond its deadline
AS_FAST = 1.005  # what counts as not slower: the search's own grain


@attrs.frozen(kw_only=True)
class Case:
    """One question: a model, its budgets in GiB, a style, and what is promised."""

    name: str
    model: str
    device_gib: float
    host_gib: float | None = None
    in_backward: bool = False
    micro_batches: int = 1
    overhead: float | None = None
    least_ratio: float | None = None
    shares: bool = False
    split: bool = False


CASES = (
    Case(name="resident", model="llama3_8b", device_gib=134, overhead=0.03),
    Case(name="share, ordinary", model="llama3_8b", device_gib=74, shares=True),
    Case(name="share, in backward", model="llama3_8b", device_gib=74, in_backward=True, shares=True),
    Case(name="split, ordinary", model="qwen3_14b", device_gib=134, host_gib=112, split=True),
    Case(
        name="split, in backward",
        model="qwen3_14b",
        device_gib=134,
        host_gib=112,
        in_backward=True,
        split=True,
    ),
    Case(name="tight, 1", model="llama3_8b", device_gib=22, host_gib=112, in_backward=True, least_ratio=1.40),
    Case(
        name="tight, 2",
        model="llama3_8b",
        device_gib=22,
        host_gib=124,
        in_backward=True,
        micro_batches=2,
        least_ratio=1.16,
    ),
    Case(
        name="tight, 4",
        model="llama3_8b",
        device_gib=22,
        host_gib=124,
        in_backward=True,
        micro_batches=4,
        least_ratio=1.09,
    ),
    Case(name="tight, 1, ordinary", model="llama3_8b", device_gib=22, host_gib=124),
    Case(name="tight, 4, ordinary", model="llama3_8b", device_gib=22, host_gib=124, micro_batches=4),
)


@attrs.frozen(kw_only=True)
class Row:
    """What came out; GiB and seconds."""

    case: str
    device: float
    device_budget: float
    host: float
    host_budget: float | None
    away: float
    streamed: float
    moved: float
    time_s: float | None
    overhead: float | None
    overhead_allowed: float | None
    least_ratio: float | None
    least_ratio_allowed: float | None
    fastest_by_hand_s: float | None
    planned_s: float
    why: tuple[str, ...]
    broken: tuple[str, ...]


def llama3_8b() -> torch.nn.Module:
    """Llama 3 8B on the meta device."""
    hf = import_transformers()
    config = hf.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
        max_position_embeddings=TOKENS,
        rope_theta=500000.0,
    )
    return _on_meta(lambda: hf.LlamaForCausalLM(config))


def qwen3_14b() -> torch.nn.Module:
    """Qwen3 14B on the meta device."""
    hf = import_transformers()
    config = hf.Qwen3Config(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        use_cache=False,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )
    return _on_meta(lambda: hf.Qwen3ForCausalLM(config))


MODELS = {"llama3_8b": llama3_8b, "qwen3_14b": qwen3_14b}


def _on_meta(make: Callable[[], Any]) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = make().to(torch.bfloat16)
    return model


def step_of(name: str) -> Graph:
    """The training step: states of an Adam with fp32 master weights."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    model = MODELS[name]()
    graph = estimated_graph(model, (), {"input_ids": ids, "labels": ids}, DEVICE)
    rate = LINKS.host_nbytes_per_s
    assert rate is not None
    optimized = []
    for index, value in enumerate(graph.values):
        if value.role is Role.PARAM:
            count = value.nbytes // 2
            moved = UPDATE_NBYTES * count
            optimized.append(
                Optimized(
                    param=index,
                    states=(("master", 4 * count), ("exp_avg", 4 * count), ("exp_avg_sq", 4 * count)),
                    device_time_s=moved / DEVICE.nbytes_per_s,
                    cpu_time_s=moved / rate,
                )
            )
    return training_graph(graph, optimized)


def solve(case: Case, graph: Graph, seconds: float | None, on_host: frozenset[int] | None = None) -> Solution:
    """Plan one case."""
    host_nbytes = None if case.host_gib is None else int(case.host_gib * GIB)
    problem = Problem(graph, int(case.device_gib * GIB), LINKS, host_nbytes)
    solver = Offload(
        in_backward=case.in_backward, accumulate=False, micro_batches=case.micro_batches, on_host=on_host
    )
    return solver.solve(problem, Deadline(seconds))


def referee(case: Case, graph: Graph, solution: Solution) -> Timeline:
    """Its word on a plan."""
    assert solution.schedule is not None
    placed = with_placement(graph, solution.on_host)
    if case.micro_batches > 1:
        return simulate(
            accumulating(placed),
            solution.schedule,
            grads=Grads.ACCUMULATE,
            links=LINKS,
            periods=PERIODS,
            passes=case.micro_batches,
        )
    return simulate(placed, solution.schedule, links=LINKS, periods=PERIODS)


def least_time_s(case: Case, graph: Graph, schedule: Schedule, timeline: Timeline) -> float:
    """A lower bound on a step with the plan's recomputation and placement, in seconds.

    A lane cannot take less than its own work. A parameter that the CPU updates gets its last gradient in the
    last backward and is read by the next forward: so these updates, with the last addition to their
    gradients, run while the device computes one micro-batch, and the others come on top.
    """
    queued = {
        s.value for s in schedule.steps if isinstance(s, OptimizerStep) and s.lane is Lane.CPU_OPTIMIZER
    }
    updates_s = sum(u.cpu_time_s for u in graph.updates if u.param in queued)
    if case.micro_batches > 1:
        assert LINKS.host_nbytes_per_s is not None
        added = sum(graph.values[u.grad].nbytes for u in graph.updates if u.param in queued)
        updates_s += 3 * added / LINKS.host_nbytes_per_s
    others_s = timeline.lane_s[Lane.COMPUTE] * (1 - 1 / case.micro_batches)
    return max(*timeline.lane_s.values(), others_s + updates_s)


def by_hand(case: Case, graph: Graph, seconds: float | None) -> float | None:
    """The fastest of 0 to 100 % of the model placed on the host, its end first."""
    params = params_of(graph)[::-1]
    whole = sum(param.charge_nbytes for param in params)
    found = []
    for tenths in range(11):
        on_host: set[int] = set()
        passed = 0
        for param in params:
            passed += param.charge_nbytes
            if passed <= whole * tenths / 10:
                on_host |= {param.index, *param.states}
        solution = solve(case, graph, seconds, frozenset(on_host))
        if solution.time_s is not None:
            found.append(solution.time_s)
    return min(found, default=None)


def measure(case: Case, graph: Graph, captured_s: float, seconds: float | None) -> Row:
    """Plan, ask the referee, judge."""
    began_s = time.perf_counter()
    solution = solve(case, graph, seconds)
    planned_s = captured_s + time.perf_counter() - began_s
    broken = [] if planned_s <= LIMIT_S else [f"{planned_s:.0f} s to plan"]
    unplanned_s = case.micro_batches * graph.time_s + sum(u.device_time_s for u in graph.updates)
    timeline = None if solution.schedule is None else referee(case, graph, solution)
    overhead = ratio = hand_s = None
    if timeline is None:
        broken.append("no plan")
    else:
        overhead = timeline.time_s / unplanned_s - 1.0
        ratio = timeline.time_s / least_time_s(case, graph, solution.schedule, timeline)
        if timeline.peak_nbytes > case.device_gib * GIB:
            broken.append("above the device's budget")
        if case.host_gib is not None and timeline.host_peak_nbytes > case.host_gib * GIB:
            broken.append("above the host's budget")
        if case.overhead is not None and (overhead > case.overhead or solution.on_host):
            broken.append("slower than promised, or states moved")
        if case.least_ratio is not None and ratio > case.least_ratio:
            broken.append("further from its least time than promised")
        if case.shares:
            hand_s = by_hand(case, graph, seconds)
            if hand_s is not None and timeline.time_s > AS_FAST * hand_s:
                broken.append("slower than a share set by hand")
        if case.split:
            params = params_of(graph)
            whole = frozenset(v for param in params for v in (param.index, *param.states))
            for on_host in (frozenset[int](), whole):
                if solve(case, graph, 1.0, on_host).schedule is not None:
                    broken.append("it fits without a split")
    stats = solution.stats
    values = graph.values
    held = {v.of for i, v in enumerate(values) if i in solution.on_host and v.role is Role.OPTIMIZER_STATE}
    away = {i for i in solution.on_host if values[i].role is Role.PARAM}
    charge = {param.index: param.charge_nbytes for param in params_of(graph)}
    return Row(
        case=case.name,
        device=0.0 if timeline is None else timeline.peak_nbytes / GIB,
        device_budget=case.device_gib,
        host=0.0 if timeline is None else timeline.host_peak_nbytes / GIB,
        host_budget=case.host_gib,
        away=sum(charge[i] for i in away) / sum(charge.values()),
        streamed=sum(charge[i] for i in held - away if i is not None) / sum(charge.values()),
        moved=int(stats.get("moved_activations_nbytes", 0)) / GIB,
        time_s=None if timeline is None else timeline.time_s,
        overhead=overhead,
        overhead_allowed=case.overhead,
        least_ratio=ratio,
        least_ratio_allowed=case.least_ratio,
        fastest_by_hand_s=hand_s,
        planned_s=planned_s,
        why=solution.explanation,
        broken=tuple(broken),
    )


def _bounded(value: float | None, bound: float | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form) + ("" if bound is None else f" ({format(bound, form)})")


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="cases whose names begin so; all by default")
    parser.add_argument(
        "--time-limit", type=float, help="seconds to plan a case; by default what is left of 60"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    columns = "{:<20}{:>16}{:>16}{:>9}{:>10}{:>9}{:>9}{:>18}{:>14}{:>10}{:>9}"
    print("bounds in brackets; GiB, seconds")
    print(
        columns.format(
            *("case", "device", "host", "away", "streamed", "moved", "step s", "overhead", "/ least"),
            *("by hand", "plan s"),
        )
    )
    graphs: dict[str, tuple[Graph, float]] = {}
    rows = []
    for case in CASES:
        if arguments.cases and not any(case.name.startswith(name) for name in arguments.cases):
            continue
        if case.model not in graphs:
            began_s = time.perf_counter()
            graphs[case.model] = step_of(case.model), time.perf_counter() - began_s
        graph, captured_s = graphs[case.model]
        left_s = max(1.0, LIMIT_S - SPARE_S - captured_s)
        row = measure(case, graph, captured_s, arguments.time_limit or left_s)
        rows.append(row)
        print(
            columns.format(
                row.case,
                _bounded(row.device, row.device_budget, ".1f"),
                _bounded(row.host, row.host_budget, ".1f"),
                f"{row.away:.1%}",
                f"{row.streamed:.1%}",
                f"{row.moved:.1f}",
                _bounded(row.time_s, None, ".3f"),
                _bounded(row.overhead, row.overhead_allowed, ".2%"),
                _bounded(row.least_ratio, row.least_ratio_allowed, ".3f"),
                _bounded(row.fastest_by_hand_s, None, ".3f"),
                f"{row.planned_s:.0f}",
            ),
            flush=True,
        )
        for problem in row.broken:
            print(f"BROKEN: {row.case}: {problem}", flush=True)
    if arguments.json:
        packages = ["remat-graph", "remat-solvers", "torch", "transformers"]
        record.write(arguments.json, list(map(attrs.asdict, rows)), packages=packages)
    return 1 if any(row.broken for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
