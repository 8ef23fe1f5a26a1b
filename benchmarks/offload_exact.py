"""Exactness and honesty of offloaded training: the full run of which CI takes a cut.

    python benchmarks/offload_exact.py [--models NAME ...] [--steps 50] [--long 300] [--json FILE]

Every row trains a small model plainly and by `Offmate`, with dropout, tied weights, clipping (in the ordinary
style), four micro-batches a step, a cosine schedule, AdamW or SGD, at five budgets from all that training
holds down to the smallest for which a plan is found, in both styles of stepping. It asks for equal bits of
losses, parameters, buffers and states after all steps; for the same of a run that is saved in the middle and
resumed by another module; and that what the device and the host hold, metered at every step, stays within the
budgets. One row a model and style goes on for some hundred steps, whose readings may not grow. The exit
status tells whether a rule was broken.
"""

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_executor import MemoryMeter
from remat_facade import NoRoom
from remat_graph import format_nbytes
from remat_offload import HostPool, SimulatedMachine
from tests.helpers.offmates import MODELS, OPTIMIZERS, Mapped, Run, differences, kept_on_device, offmate

HOST_NBYTES = 64 << 20
BUDGETS = 5


def prepared(name: str, kind: str, in_backward: bool, steps: int, budget: int | str | None) -> Run:
    """A run at its beginning: plain without a budget. Each backward of the in-backward style is a step."""
    make, batches = MODELS[name]
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    called = model
    if budget is not None:
        memory = Mapped()
        called = offmate(
            model,
            batches(0),
            budget,
            optimizer=optimizer,
            optimizer_in_backward=in_backward,
            machine=SimulatedMachine(),
            pool=HostPool(HOST_NBYTES, memory=memory),
            time_limit_s=None,
        )
    run = Run(
        called,
        optimizer,
        batches,
        accumulation=1 if in_backward else 4,
        in_backward=in_backward,
        steps=steps,
    )
    if budget is not None:
        run.memory = memory
    return run


def metered(run: Run, steps: int) -> list[int]:
    """Device bytes of each step: what persists there, and the most that the step made beside it."""
    readings = []
    for _ in range(steps):
        run.model.synchronize()
        with MemoryMeter(kept_on_device(run), device="cpu") as meter:
            run.train(1)
            run.model.synchronize()
        readings.append(meter.baseline_nbytes + meter.peak_nbytes)
    return readings


def resumed(first: Run, second: Run) -> Run:
    """The second run where the first one stands, by their state dicts."""
    saved = copy.deepcopy(
        {
            "model": first.model.state_dict(),
            "optimizer": first.optimizer.state_dict(),
            "scheduler": first.scheduler.state_dict(),
        }
    )
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.scheduler.load_state_dict(saved["scheduler"])
    second.step, second.losses = first.step, list(first.losses)
    return second


def budgets_of(name: str, kind: str, in_backward: bool, steps: int) -> list[int]:
    """From all that training holds down to the smallest that works, evenly."""
    asked = 1 << 16
    while True:  # until it is too little
        try:
            prepared(name, kind, in_backward, steps, asked)
        except NoRoom as error:
            least = error.least_nbytes
            break
        asked //= 2
    run = prepared(name, kind, in_backward, steps, "100%")
    lent = {t.data_ptr(): t.nbytes for t in (*run.model.buffers(), *run.batches(0).values())}
    whole = run.model.plan.budget_nbytes + sum(lent.values())
    return [whole - (whole - least) * i // (BUDGETS - 1) for i in range(BUDGETS)]


def row(name: str, kind: str, in_backward: bool, budget: int, steps: int, plain: Run) -> dict[str, Any]:
    """One budget, with a stop in the middle."""
    began_s = time.perf_counter()
    ours = prepared(name, kind, in_backward, steps, budget)
    readings = metered(ours, steps // 2)
    other = resumed(ours, prepared(name, kind, in_backward, steps, budget))
    readings += metered(ours, steps - steps // 2)
    again = metered(other, steps - steps // 2)
    plan = ours.model.plan
    host: list[int] = [run.model.host.peak_nbytes for run in (ours, other)]
    return {
        "model": name,
        "optimizer": kind,
        "style": "in backward" if in_backward else "step()",
        "budget": format_nbytes(budget),
        "budget_nbytes": budget,
        "predicted_nbytes": plan.peak_nbytes,
        "metered_nbytes": max(*readings, *again),
        "host_predicted_nbytes": plan.host_peak_nbytes,
        "host_metered_nbytes": max(host),
        "recomputed": plan.overhead,
        "on_host": len(plan.on_host),
        "differences": differences(plain, ours)[:5],
        "after_resuming": differences(plain, other)[:5],
        "broken": [
            rule
            for rule, kept in {
                "bits": not differences(plain, ours),
                "bits after resuming": not differences(plain, other),
                "device budget": max(*readings, *again) <= budget,
                "host budget": ours.memory.peak_nbytes <= HOST_NBYTES,
                "host prediction": ours.model.host.peak_nbytes <= plan.host_peak_nbytes,
                "planned": set(ours.model.runs) <= {"planned"},
            }.items()
            if not kept
        ],
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def long_row(name: str, in_backward: bool, budget: int, steps: int) -> dict[str, Any]:
    """Many steps: from the third on every reading is the same."""
    run = prepared(name, "adamw", in_backward, steps, budget)
    readings = metered(run, steps)
    held = run.model.host
    return {
        "model": name,
        "style": "in backward" if in_backward else "step()",
        "steps": steps,
        "first_nbytes": readings[2],
        "last_nbytes": readings[-1],
        "host_held_nbytes": held.held_nbytes,
        "host_taken_from_the_system_nbytes": run.memory.peak_nbytes,
        "broken": [] if len(set(readings[2:])) == 1 else ["growth"],
    }


def main() -> int:
    """Print rows as they come; 1 if a rule was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--long", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for in_backward in (False, True):
            for kind in OPTIMIZERS:
                plain = prepared(name, kind, in_backward, options.steps, None).train(options.steps)
                budgets = budgets_of(name, kind, in_backward, options.steps)
                for budget in budgets:
                    rows.append(row(name, kind, in_backward, budget, options.steps, plain))
                    print(rows[-1], flush=True)
            if options.long:
                rows.append(long_row(name, in_backward, budgets[len(budgets) // 2], options.long))
                print(rows[-1], flush=True)
    broken = sum(bool(r["broken"]) for r in rows)
    print(f"{len(rows)} rows, {broken} with a rule broken")
    if options.json:
        record.write(options.json, rows, packages=("torch", "transformers"), threads=torch.get_num_threads())
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
