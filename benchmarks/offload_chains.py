"""Chains whose activations may move: `offload` beside the chain DP `pofo`, and beside recomputation alone.

    python benchmarks/offload_chains.py [--seeds N] [--json FILE]

Each chain is planned at several budgets with links of several speeds. Two things are promised: the time of
`offload` is within 3 % of `pofo`'s, and of the overhead of the best plan that only recomputes (`auto`) at
least a third goes where the link allows it: where the bytes that do not fit can leave in three quarters of
the forward's time and return in three quarters of the backward's; what is made last cannot leave before, so
that all of the time is never there. The exit status is not zero if a promise is broken.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from remat_graph import Graph, Links, noremat_peak_nbytes
from remat_graph.testing.random_graphs import random_chain
from remat_solvers import Deadline, Problem, Solution, get_solver
from remat_solvers.methods.pofo import Pofo
from remat_solvers.offload.solver import Offload
from remat_solvers.testing import chain, mobile

STAGES = (5, 8, 12, 16, 24)
FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.9)
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # unplanned peaks that a direction carries during the step
WITHIN = 0.03  # of the chain DP's time
REMOVED = 1 / 3  # of the overhead of recomputation
ALLOWED = 0.75  # of the time of forward or backward, which copies may need there
AUTO_S = 5.0


@attrs.frozen(kw_only=True)
class Row:
    """One chain, budget and link; overheads are ratios of the unplanned step's time.

    Attributes:
        graph: name of the chain.
        budget_fraction: of the unplanned peak.
        to_host: unplanned peaks that can leave during the step's compute time.
        to_device: that can come.
        allowed: whether the link allows what does not fit to be away.
        recomputed: overhead of the best plan that only recomputes; None if there is none.
        pofo: of the chain DP.
        offload: of `offload`.
        pofo_s: seconds of planning.
        offload_s: likewise.
    """

    graph: str
    budget_fraction: float
    to_host: float
    to_device: float
    allowed: bool
    recomputed: float | None
    pofo: float | None
    offload: float | None
    pofo_s: float
    offload_s: float

    @property
    def above(self) -> float | None:
        """How far `offload` is above the chain DP, as a ratio of the time."""
        if self.pofo is None or self.offload is None:
            return None
        return (1 + self.offload) / (1 + self.pofo) - 1

    @property
    def removed(self) -> float | None:
        """Which part of the overhead of recomputation is gone, where the link allows it."""
        if not self.allowed or self.offload is None or not self.recomputed:
            return None
        return 1 - self.offload / self.recomputed

    def broken(self) -> list[str]:
        """The promises that this row breaks."""
        found = []
        if self.pofo is not None and self.offload is None:
            found.append("no plan, and the chain DP has one")
        if self.above is not None and self.above > WITHIN:
            found.append(f"{100 * self.above:.1f} % above the chain DP")
        if self.removed is not None and self.removed < REMOVED:
            found.append(f"{100 * self.removed:.0f} % of the recomputation's overhead are gone")
        return found


def cases(seeds: int) -> Iterator[tuple[Graph, float, float, float]]:
    """Chains of unlike stages, of equal ones and of a pyramid, with budget and speeds of the link."""
    for seed in range(seeds):
        rng = random.Random(seed)
        graph = random_chain(seed, rng.choice(STAGES))
        yield graph, rng.choice(FRACTIONS), rng.choice(SPEEDS), rng.choice(SPEEDS)
    for graph in (chain(12), chain(24), mobile(5)):
        for fraction in (0.5, 0.7):
            for speed in (0.5, 1.0, 4.0):
                yield graph, fraction, speed, speed


def measure(graph: Graph, fraction: float, to_host: float, to_device: float) -> Row:
    """Plan one."""
    peak = noremat_peak_nbytes(graph)
    rate = peak / graph.time_s
    links = Links(to_host_nbytes_per_s=to_host * rate, to_device_nbytes_per_s=to_device * rate)
    problem = Problem(graph, int(fraction * peak), links)
    forward_s = sum(op.first.time_s for op in graph.ops if not op.backward)
    excess = peak - problem.budget_nbytes
    pofo, pofo_s = timed(problem, Pofo())
    offload, offload_s = timed(problem, Offload())
    recomputed = get_solver("auto").solve(Problem(graph, problem.budget_nbytes), Deadline(AUTO_S))
    return Row(
        graph=graph.name,
        budget_fraction=fraction,
        to_host=to_host,
        to_device=to_device,
        allowed=excess <= ALLOWED * links.to_host_nbytes_per_s * forward_s
        and excess <= ALLOWED * links.to_device_nbytes_per_s * (graph.time_s - forward_s),
        recomputed=recomputed.overhead,
        pofo=pofo.overhead,
        offload=offload.overhead,
        pofo_s=pofo_s,
        offload_s=offload_s,
    )


def timed(problem: Problem, solver: Pofo | Offload) -> tuple[Solution, float]:
    """A solution and its wall-clock seconds."""
    start = time.perf_counter()
    solution = solver.solve(problem)
    return solution, time.perf_counter() - start


def shown(overhead: float | None) -> str:
    """An overhead in percent."""
    return "    none" if overhead is None else f"{100 * overhead:7.2f}%"


def summary(rows: list[Row]) -> list[str]:
    """Medians and the worst."""
    above = sorted(row.above for row in rows if row.above is not None)
    removed = sorted(row.removed for row in rows if row.removed is not None)
    lines = []
    if above:
        lines.append(
            f"beside the chain DP, {len(above)} rows: median {100 * statistics.median(above):.2f} %, "
            f"worst {100 * above[-1]:.2f} %, best {100 * above[0]:.2f} %"
        )
    if removed:
        lines.append(
            f"overhead gone where the link allows it, {len(removed)} rows: "
            f"median {100 * statistics.median(removed):.0f} %, least {100 * removed[0]:.0f} %"
        )
    lines.append(
        f"seconds of planning: {sum(row.offload_s for row in rows):.1f}, of the chain DP "
        f"{sum(row.pofo_s for row in rows):.1f}"
    )
    return lines


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="random chains")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    rows, broken = [], 0
    print(f"{'chain':16} budget   out  back  recompute     pofo  offload")
    for graph, fraction, to_host, to_device in cases(arguments.seeds):
        row = measure(graph, fraction, to_host, to_device)
        rows.append(row)
        broken += len(row.broken())
        print(
            f"{row.graph:16} {row.budget_fraction:6.0%} {row.to_host:5} {row.to_device:5}  "
            f"{shown(row.recomputed):>9} {shown(row.pofo)} {shown(row.offload)}  {'; '.join(row.broken())}",
            flush=True,
        )
    print(*summary(rows), f"{len(rows)} rows, {broken} promises broken", sep="\n")
    if arguments.json:
        derived = [{**attrs.asdict(row), "above": row.above, "removed": row.removed} for row in rows]
        record.write(
            arguments.json, derived, packages=["remat-graph", "remat-solvers"], promises_broken=broken
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
