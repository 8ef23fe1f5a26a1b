"""Memory that oneDNN takes past torch on the CPU: a whole process against the budget of its step.

    python benchmarks/scratch.py [MODEL ...] [--ways default,cache0,off] [--json FILE]

Meter and allocator see what torch hands out. oneDNN, which runs convolutions, LSTM layers and products in 16
bits on the CPU, takes its scratch from the C library and keeps the primitives that it has compiled. Here the
C library counts (scratch.c, preloaded), blocks of 4 KiB and more, in a process that finds costs and plan on
disk, so that the first step is truly the first. Each row gives the budget, what the meter reads in a step,
and what the process takes above what it holds when the step begins: in its first step, and the most of four
later ones. What it goes on to hold after the first step stands apart, and so does what compiled code
reserves, of which few pages are ever touched. Needs glibc on Linux and a C compiler.

Ways: `default`; `cache0`, with oneDNN's cache of primitives off; `off`, without oneDNN.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.child import run_child

HERE = Path(__file__).resolve().parent
MODELS = ("resnet18", "unet_dropout", "lstm", "gpt2")
BUDGETS = ("smallest", "60%")
WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "cache0": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"},
    "off": {},
}
COLUMNS = ("metered", "first", "later", "kept", "code")
LATER = 4


def observe(model: str, budget: str, way: str) -> dict[str, Any]:
    """Train a planned model for a few steps and read the process's peaks."""
    import torch

    from remat_executor import MemoryMeter, step_graph
    from remat_facade import Hiremate
    from remat_solvers import min_budget
    from tests.helpers.models import get_case

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = way != "off"
    case = get_case(model)
    module = case.build()
    args, kwargs = case.sample(0)
    granted: int | str = int(budget) if budget.isdigit() else budget
    if granted == "smallest":
        granted = min_budget(step_graph(module, args, kwargs)).nbytes
    planned = Hiremate(module, args, granted, sample_kwargs=kwargs, time_limit_s=10.0)
    library = ctypes.CDLL(None)
    for name in ("scratch_live", "scratch_peak", "scratch_code"):
        getattr(library, name).restype = ctypes.c_long
    coded_nbytes = library.scratch_code()
    took: list[int] = []
    held: list[int] = []
    took_s: list[float] = []

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        case.loss(planned(*args, **kwargs)).backward()

    for _ in range(1 + LATER):
        for parameter in module.parameters():
            parameter.grad = None
        gc.collect()
        library.scratch_reset()
        held.append(library.scratch_live())
        began_s = time.perf_counter()
        step()
        took_s.append(time.perf_counter() - began_s)
        took.append(library.scratch_peak() - held[-1])
    for parameter in module.parameters():
        parameter.grad = None
    with MemoryMeter(module, args, kwargs) as meter:
        step()
    return {
        "budget_nbytes": planned.plan.budget_nbytes,
        "metered_nbytes": meter.peak_nbytes,
        "first_nbytes": took[0],
        "later_nbytes": max(took[1:]),
        "kept_nbytes": held[-1] - held[0],
        "code_nbytes": library.scratch_code() - coded_nbytes,
        "step_s": min(took_s[1:]),
        "notes": list(planned.plan.notes),
    }


def child(words: list[str], library: Path, cache: str) -> dict[str, Any]:
    """The row of one way, with a library preloaded."""
    variables = {
        **WAYS[words[2]],
        "LD_PRELOAD": str(library),
        "PYTHONMALLOC": "malloc",  # without arenas: what Python maps is no scratch
        "OMP_NUM_THREADS": "1",
    }
    return run_child(__file__, words, cache, variables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--ways", default="default", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(observe(*options.child)))
        return 0
    rows = []
    budgets: dict[tuple[str, str, str], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "scratch.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, HERE / "scratch.c"], check=True)
        print(f"{'':24}{'MiB':>9}{'of the budget, in %':>38}")
        print(
            f"{'model':14}{'budget':10}{'budget':>9}",
            *(f"{name:>7}" for name in COLUMNS),
            "      ms  way",
            flush=True,
        )
        for model in options.models:
            for budget in options.budgets.split(","):
                for way in options.ways.split(","):
                    kernels = "off" if way == "off" else "default"  # the same plan for both ways of oneDNN
                    cache = str(Path(folder, kernels))
                    if (model, budget, kernels) not in budgets:
                        planned = child([model, budget, kernels], library, cache)
                        budgets[model, budget, kernels] = planned["budget_nbytes"]
                    granted = budgets[model, budget, kernels]
                    found = child([model, str(granted), way], library, cache)  # finds costs and plan
                    rows.append(row := {"model": model, "budget": budget, "way": way, **found})
                    shares = (row[f"{what}_nbytes"] / granted for what in COLUMNS)
                    print(
                        f"{model:14}{budget:10}{granted / 2**20:9.2f}",
                        *(f"{100 * share:7.1f}" for share in shares),
                        f" {1e3 * row['step_s']:7.0f}  {way}",
                        flush=True,
                    )
    if options.json:
        record.write(options.json, rows, packages=["torch"], threads=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
