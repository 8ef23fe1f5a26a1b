"""Same input, seed, work limit and versions: the same schedule, whatever the threads and the hash seed."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json
from remat_graph import Schedule, simulate
from remat_graph.serialization.plans import schedule_to_data
from remat_graph.testing.random_training import random_links, random_training
from remat_solvers import Deadline, Problem, get_solver, solver_names
from remat_solvers.testing import chain, mobile, unet
from remat_solvers.offload.solver import Offload

PROGRAMS = {"checkmate", "checkmate_lp", "monet", "moccasin", "rockmate", "hilp", "hiremate"}
found = {}
for graph, fraction in ((unet(4), 0.7), (mobile(5), 0.6), (chain(24, skips=4), 0.5), (chain(7), 0.8)):
    peak = simulate(graph, Schedule.unplanned(graph)).peak_nbytes
    for name in solver_names():
        if len(graph.ops) > 30 and name in PROGRAMS:
            continue
        parameters = {"moves": 20_000} if name in ("auto", "search") else {}
        parameters |= {"seed": 7} if name in ("auto", "search") else {}
        deadline = Deadline()
        solution = get_solver(name, **parameters).solve(Problem(graph, int(fraction * peak)), deadline)
        order = None if solution.order is None else list(solution.order)
        clock = deadline.hit or bool(solution.stats.get("deadline"))
        found[f"{graph.name} {name}"] = [order, solution.lower_bound_s, clock]
for seed in range(4):
    graph = random_training(seed, 5)
    peak = simulate(graph, Schedule.unplanned(graph)).peak_nbytes
    solver = Offload(in_backward=bool(seed % 2), micro_batches=1 + seed // 2)
    problem, deadline = Problem(graph, int(0.9 * peak), random_links(graph, seed)), Deadline()
    solution = solver.solve(problem, deadline)
    steps = None if solution.schedule is None else schedule_to_data(solution.schedule)
    found[f"{graph.name} moves"] = [[steps, sorted(solution.on_host)], dict(solution.stats), deadline.hit]
print(json.dumps(found))
"""


def schedules(threads: int, hash_seed: int) -> dict[str, list[object]]:
    """What every method answers in a process of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": str(hash_seed),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    answers = json.loads(done.stdout)
    assert isinstance(answers, dict)
    return answers


def test_threads_and_hash_seeds_change_nothing() -> None:
    """Every registered method, in processes that differ in both; a result cut by the deadline says so."""
    one, other = schedules(1, 1), schedules(4, 2)
    assert one.keys() == other.keys()
    by_clock = {name for name, answer in (*one.items(), *other.items()) if answer[2]}
    assert {name: answer for name, answer in one.items() if name not in by_clock} == {
        name: answer for name, answer in other.items() if name not in by_clock
    }
    sure = {name.split()[1] for name in one if name not in by_clock}
    assert {
        "auto",
        "search",
        "greedy",
        "interval_dp",
        "mincut",
        "rotor",
        "checkmate",
        "twremat",
        "moves",
    } <= sure
    assert sum(answer[0] is not None for answer in one.values()) > len(one) / 2
