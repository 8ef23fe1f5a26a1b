"""Overlap: what a step of training takes with values moved, beside what must take that long.

    python benchmarks/offload.py [--steps N] [--json FILE]

On a machine without a GPU the device is simulated: computing is the CPU's, copies really move bytes in
threads of their own, over links as slow as the benchmark says, so slow that what is hidden can be told from
noise. A row trains a Llama at one budget and one style of stepping, over links whose bytes take a given share
of the computing.

"compute" is the median of steps of the same plan on a machine whose links take no time, measured in turns
with the steps that are judged; "link" is each link's bytes over its bandwidth, "optimizer" what the updates
on the CPU take alone. "roof" is the longest of the three, "step" what a step took, "plan" what the plan
predicts. Where the plan says that all is hidden, a step may take a tenth more than the roof. The last row is
the optimizer on the CPU's lane beside one fused step over a flat buffer, in turns, both while copies go both
ways. The exit status tells whether a step took more, or the lane was less than 95 % as fast.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_facade import Offmate
from remat_graph import Lane, Links, simulate
from remat_offload import SimulatedMachine
from remat_offload.optimizer.states import OptimizerStates
from tests.helpers.models import import_transformers

MOST = 1.10  # of the roof, where all is hidden
HIDDEN = 1.02  # of the busiest lane: a plan that predicts no more says so
AS_FAST = 0.95  # of a step over one flat buffer
PARAMETERS, NUMEL = 8, 1 << 22  # the number of parameters of `optimizer_row`, and the elements of each


def llama() -> nn.Module:
    """Six layers, so that there is something to hide behind."""
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    """Enough tokens for a step of some tenths of a second."""
    tokens = torch.randint(0, 1024, (4, 256), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def module(budget: str, links: Links, plans: str, *, in_backward: bool, free: bool) -> Offmate:
    """One whose links take the time of `links`, or none; with the plan that is kept in a folder, if any."""
    model = llama()
    machine = (
        SimulatedMachine()
        if free
        else SimulatedMachine(links.to_host_nbytes_per_s, links.to_device_nbytes_per_s)
    )
    return Offmate(
        model,
        batch(),
        budget,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        optimizer_in_backward=in_backward,
        machine=machine,
        links=links,
        host_budget="2GiB",
        cache_dir=plans,
    )


def step_s(trained: Offmate) -> float:
    """Seconds of one step of training; updates on the CPU may go on after it, beside the next."""
    began_s = time.perf_counter()
    trained(**batch()).loss.backward()
    if not trained.optimizer_in_backward:
        trained.optimizer.step()
    trained.zero_grad()
    return time.perf_counter() - began_s


def row(budget: str, share: float, *, in_backward: bool, steps: int) -> dict[str, Any]:
    """Measure one plan over links that are busy for about a share of the computing."""
    with tempfile.TemporaryDirectory() as plans:
        quick = module(budget, Links(), plans, in_backward=in_backward, free=True)
    for _ in range(2):
        step_s(quick)
    quick.synchronize()
    base_s = statistics.median(step_s(quick) for _ in range(3))
    state_nbytes = sum(p.nbytes for p in quick.parameters())
    rate = 2 * state_nbytes / (share * base_s)
    links = Links(to_host_nbytes_per_s=rate, to_device_nbytes_per_s=rate)
    with tempfile.TemporaryDirectory() as plans:
        trained, free = (
            module(budget, links, plans, in_backward=in_backward, free=free) for free in (False, True)
        )
    assert trained.plan.schedule == free.plan.schedule, "the two would not be the same work"
    taken: dict[str, list[float]] = {"step": [], "compute": []}
    for turn in range(steps + 2):
        for name, each in (("step", trained), ("compute", free)):
            spent_s = step_s(each)
            if turn >= 2:
                taken[name].append(spent_s)
            if name == "step":
                continue
            each.synchronize()
    timeline = simulate(trained.graph, trained.plan.schedule, links=links)
    busy = timeline.lane_s
    roof_s = max(
        statistics.median(taken["compute"]),
        busy[Lane.TO_HOST],
        busy[Lane.TO_DEVICE],
        busy[Lane.CPU_OPTIMIZER],
    )
    measured_s = statistics.median(taken["step"])
    return {
        "budget": budget,
        "style": "in backward" if in_backward else "step()",
        "share": share,
        "compute_s": statistics.median(taken["compute"]),
        "to_host_s": busy[Lane.TO_HOST],
        "to_device_s": busy[Lane.TO_DEVICE],
        "optimizer_s": busy[Lane.CPU_OPTIMIZER],
        "recomputed_s": timeline.recomputed_s,
        "roof_s": roof_s,
        "step_s": measured_s,
        "predicted_s": trained.plan.time_s,
        "ratio": measured_s / roof_s,
        "on_host": len(trained.plan.on_host),
        "hidden": trained.plan.time_s <= HIDDEN * max(busy.values()),
    }


def optimizer_row(repeats: int) -> dict[str, Any]:
    """Updates on the CPU's lane beside one step over a flat buffer, both while copies go both ways."""
    model = [nn.Parameter(torch.randn(NUMEL)) for _ in range(PARAMETERS)]
    flat = nn.Parameter(torch.randn(PARAMETERS * NUMEL))
    optimizer = torch.optim.AdamW(model, fused=True)
    whole = torch.optim.AdamW([flat], fused=True)
    states = OptimizerStates(optimizer, torch.device("cpu"))
    states.apply_placement()
    grads = [torch.randn(NUMEL) for _ in model]
    flat.grad = torch.randn(PARAMETERS * NUMEL)
    block, there = torch.empty(1 << 26, dtype=torch.uint8), torch.empty(1 << 26, dtype=torch.uint8)
    other, back = torch.empty(1 << 26, dtype=torch.uint8), torch.empty(1 << 26, dtype=torch.uint8)
    taken: dict[str, list[float]] = {"lane": [], "flat": []}
    with SimulatedMachine(5e8, 5e8) as machine:
        for turn in range(repeats + 1):
            for name, found in taken.items():
                machine.copy(Lane.TO_HOST, block, there)
                machine.copy(Lane.TO_DEVICE, other, back)
                began_s = time.perf_counter()
                if name == "flat":
                    last = machine.work(whole.step)
                else:
                    for parameter, grad in zip(model, grads, strict=True):
                        last = machine.work(states.on_host(parameter, parameter.data, grad, None))
                last.synchronize()
                if turn:
                    found.append(time.perf_counter() - began_s)
                machine.drain()
    lane_s, flat_s = (statistics.median(taken[name]) for name in ("lane", "flat"))
    gigabytes_per_s = 28 * PARAMETERS * NUMEL / 1e9
    return {
        "parameters": PARAMETERS * NUMEL,
        "lane_s": lane_s,
        "flat_s": flat_s,
        "lane_gb_per_s": gigabytes_per_s / lane_s,
        "flat_gb_per_s": gigabytes_per_s / flat_s,
        "as_fast": statistics.median(f / o for f, o in zip(taken["flat"], taken["lane"], strict=True)),
    }


def main() -> int:
    """Print a table; 1 if what the plan says is hidden was not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--budgets", default="70%,40%,20%")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for budget in options.budgets.split(","):
        for in_backward in (False, True):
            for share in (0.3, 0.8):
                rows.append(row(budget, share, in_backward=in_backward, steps=options.steps))
                print(
                    {name: round(v, 4) if isinstance(v, float) else v for name, v in rows[-1].items()},
                    flush=True,
                )
    rows.append(optimizer_row(options.steps))
    if options.json:
        record.write(options.json, rows, packages=("torch", "transformers"), threads=torch.get_num_threads())
    print(rows[-1])
    slow = [r for r in rows[:-1] if r["hidden"] and r["ratio"] > MOST]
    print(f"{sum(r['hidden'] for r in rows[:-1])} rows are said to be hidden, {len(slow)} of them take more")
    return 1 if slow or rows[-1]["as_fast"] < AS_FAST else 0


if __name__ == "__main__":
    sys.exit(main())
