"""Write down what the code does, so that a reorganization can show that it still does the same.

    python benchmarks/behaviour.py [--json FILE] [--check FILE] [--only schedules,steps]

Schedules: of each registered solver on the corpus and on small synthetic graphs, with work limits and seeds
of their own and no clock; a row holds the hash of the schedule. A solve that takes more than `CPU_S`
seconds of CPU is ended and not compared. Steps: losses, metered peak and weights of six models, planned at
40 % with the times of a platform, so that plans do not depend on the machine. With ``--check`` rows are
compared with those of a file, and the exit status is 1 if one differs.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import record
from remat_executor import MemoryMeter
from remat_facade import Hiremate, Offmate
from remat_graph import Graph, load_graph, noremat_peak_nbytes
from remat_graph.serialization.schedules import schedule_to_data
from remat_graph.testing.random_training import random_links, random_training
from remat_solvers import Deadline, Problem, get_solver, min_budget, solver_names
from remat_solvers.testing import chain, dense, mobile, transformer, unet
from tests.helpers.acceptance import whole_step
from tests.helpers.models import get_case
from tests.helpers.offmates import LINKS, PLATFORM, convolutions, images

GRAPHS = Path(__file__).parents[1] / "tests" / "data" / "graphs"
SLOW = ("checkmate", "moccasin", "checkmate_lp", "hilp", "interval_dp")  # on small graphs alone
MOVING = ("pofo", "offload")
TIMED = {  # parts of these solvers have limits by the clock, unless they are switched off
    "rockmate": {"block_seconds": None},
    "hiremate": {"leaf_seconds": None},
    "hilp": {"leaf_seconds": None, "top_seconds": None},
}
MODELS = ("gpt2", "llama", "resnet18", "mobilenet_v2", "shared_layer", "unet_dropout")
FRACTIONS = (0.7, 0.4)
STEPS = 3
CPU_S = 60  # of one solve


def digest(data: Any) -> str:
    """A short hash of what can be written as JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def small_graphs() -> Iterator[Graph]:
    """Synthetic graphs that an integer program solves too."""
    yield chain(8)
    yield chain(7, skips=2, seed=1)
    yield unet(2)
    yield dense(1, layers=3)
    yield mobile(2)
    yield transformer(1)


def corpus() -> Iterator[Graph]:
    """The graphs of the corpus that every other method plans in seconds."""
    for name in ("vgg16", "unet", "resnet50", "gpt2", "gpt2_nohead", "llama24_nohead"):
        yield load_graph(GRAPHS / f"{name}.json")


def schedules(solvers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each of these solvers, each graph and budget."""
    small = [(f"small {index} {graph.name}", graph) for index, graph in enumerate(small_graphs())]
    large = [(graph.name, graph) for graph in corpus()]
    for name, graph in [*small, *large]:
        least = min_budget(graph).nbytes
        peak = noremat_peak_nbytes(graph)
        row = {"graph": name, "solver": "min_budget", "budget_nbytes": 0, "found": [least, peak]}
        yield row
        for solver in solver_names():
            if (
                solver not in solvers
                or solver in MOVING
                or (solver in SLOW and graph in [g for _, g in large])
            ):
                continue
            if len(graph.ops) > 1000 and solver != "auto":
                continue
            for fraction in FRACTIONS[: 1 if solver in SLOW else 2]:
                budget = int(least + fraction * (peak - least))
                yield one(name, solver, Problem(graph, budget))
    for seed in range(4):
        graph = random_training(seed, 6)
        moved = Problem(graph, int(0.6 * noremat_peak_nbytes(graph)), random_links(graph, seed))
        for solver in (each for each in MOVING if each in solvers):
            yield one(f"training {seed}", solver, moved)


def one(name: str, solver: str, problem: Problem) -> dict[str, Any]:
    """Solve in a process of its own, which the system ends after `CPU_S` seconds of its CPU time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        sender.send(solved(name, solver, problem))

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv()
    except EOFError:
        row = {"graph": name, "solver": solver, "budget_nbytes": problem.budget_nbytes, "found": None}
    process.join()
    return row


def solved(name: str, solver: str, problem: Problem) -> dict[str, Any]:
    """Solve, without a clock."""
    if solver == "offload":
        from remat_solvers.offload.solver import Offload

        made: Any = Offload()
    else:
        made = get_solver(solver, **TIMED.get(solver, {}))
    began_s = time.perf_counter()
    solution = made.solve(problem, Deadline(None))
    schedule = None if solution.schedule is None else schedule_to_data(solution.schedule)
    return {
        "graph": name,
        "solver": solver,
        "budget_nbytes": problem.budget_nbytes,
        "found": [solution.status.name, digest(schedule), solution.overhead, solution.lower_bound_overhead],
        "wall_s": time.perf_counter() - began_s,
    }


def bits(value: float) -> str:
    """A float to its last bit."""
    return struct.pack(">d", value).hex()


def steps() -> Iterator[dict[str, Any]]:
    """A row for each model: what three steps leave behind, and the peak of the second."""
    for name in MODELS:
        case = get_case(name)
        model, loss_of = whole_step(case)
        args, kwargs = case.sample(0)
        with tempfile.TemporaryDirectory() as cache:
            module = Hiremate(
                model, args, "40%", sample_kwargs=kwargs, platform=PLATFORM, zoo=False, cache_dir=cache
            )
            yield trained(name, module, lambda m, a=args, k=kwargs, f=loss_of: f(m(*a, **k)))
    for budget in ("60%", "90%"):
        model = convolutions()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with tempfile.TemporaryDirectory() as cache:
            moving = Offmate(
                model, images(0), budget, optimizer=optimizer, platform=PLATFORM, links=LINKS, cache_dir=cache
            )
            yield trained(f"offmate {budget}", moving, lambda m: m(**images(0)), optimizer)


def trained(name: str, module: Any, loss_of: Any, optimizer: Any = None) -> dict[str, Any]:
    """Three steps from one seed."""
    torch.manual_seed(7)
    step = optimizer or torch.optim.SGD(module.parameters(), lr=1e-3)
    losses, peaks = [], []
    for _ in range(STEPS):
        with MemoryMeter() as meter:
            loss = loss_of(module)
            loss.backward()
        peaks.append(meter.peak_nbytes)
        step.step()
        step.zero_grad()
        losses.append(bits(loss.item()))
        del loss
    state = {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in module.state_dict().items()
        if tensor.numel() and tensor.dim()
    }
    # What an Offmate's plan holds depends on the measured times of its optimizer.
    peak = [] if isinstance(module, Offmate) else [module.plan.peak_nbytes, peaks[1]]
    return {"graph": name, "solver": "step", "budget_nbytes": 0, "found": [losses, digest(state), *peak]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--check", type=Path, help="compare the rows with those of this file")
    parser.add_argument("--only", default="schedules,steps")
    parser.add_argument(
        "--solvers", default=",".join((*solver_names(), "offload")), help="such as auto,rotor"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = {}
    if arguments.check:
        rows = json.loads(arguments.check.read_text())["rows"]
        before = {(row["graph"], row["solver"], row["budget_nbytes"]): row["found"] for row in rows}
    rows, different = [], 0
    kinds = {"schedules": lambda: schedules(arguments.solvers.split(",")), "steps": steps}
    for kind in arguments.only.split(","):
        for row in kinds[kind]():
            rows.append(row)
            key = (row["graph"], row["solver"], row["budget_nbytes"])
            found = json.loads(json.dumps(row["found"]))
            verdict = "" if not before else "same" if before.get(key) == found else "DIFFERENT"
            if verdict and (found is None or (key in before and before[key] is None)):
                verdict = "no end"  # on one side; not compared
            different += verdict == "DIFFERENT"
            name = f"{row['graph']:24} {row['solver']:18} {row['budget_nbytes']:>14}"
            print(
                name,
                f"{row.get('wall_s', 0.0):7.1f} s {verdict}",
                *((found or ()) if not verdict else ()),
                flush=True,
            )
    if arguments.json:
        record.write(arguments.json, rows, packages=("torch", "numba", "highspy", "cvxpy"))
    print(
        f"{len(rows)} rows, {different} different from {arguments.check}" if before else f"{len(rows)} rows"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
