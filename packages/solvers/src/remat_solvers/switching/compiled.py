"""Compile the loops of searches before a clock starts.

They are compiled where they are first called, once for each installation, which takes some 20 s: as long as a
user may have allowed for a plan.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import attrs
import numpy as np

from remat_graph import Alternative, Graph, Implementation, Op, Role, Value, noremat_peak_nbytes, specialize
from remat_solvers.bounds.last_run import LastRuns
from remat_solvers.bounds.reachability import reachability
from remat_solvers.bounds.time_bound import CutBound
from remat_solvers.evaluation.arrays import flatten
from remat_solvers.local_search.joint import JointSearch, Walk
from remat_solvers.local_search.second_pass import with_second_pass
from remat_solvers.protocol import Deadline

LAYERS = 4
MOVES = 20


def are_loops_compiled() -> bool:
    """Whether an earlier process has compiled the longest of them."""
    from remat_solvers.kernels.anneal import anneal  # imports numba

    return any(Path(anneal.stats.cache_path or "").glob("anneal.anneal-*.nbi"))


def compile_first(announce: Callable[[str], None]) -> None:
    """Compile them, so that the limit of a search is not spent on it; announced if no process has before."""
    if not are_loops_compiled():
        announce("compiling the loops of searches, once for this installation")
    compile_loops()


@cache
def compile_loops() -> None:
    """Run each compiled loop on a tiny graph, once in a process.

    It takes half a second where an earlier process has compiled them, in which they are loaded.
    """
    graph, deadline = _step(), Deadline()
    off = specialize(graph, ()).graph
    budget = noremat_peak_nbytes(off) - 1
    bound = CutBound(off, reachability(off))
    bound.extra_s(budget, deadline)
    bound.binding()
    LastRuns(off).kept_nbytes((), ())
    with_second_pass(flatten(off), np.arange(len(off.ops)), deadline)
    search = JointSearch(graph, budget)
    search.quick((), graph.switches, deadline=deadline)
    for one in tuple(search.found.values()):
        walk = Walk(start=one, moves=MOVES, hot=1.0, price=1.0)
        search.anneal([walk], deadline)
        search.anneal_sequences([walk], deadline)
        search.flip_greedily(one, deadline)


def _step() -> Graph:
    """Layers whose backward reads their inputs, one with another way to run."""
    values = [Value(name="input", nbytes=8, external=True)]
    ops: list[Op] = []

    def run(name: str, inputs: list[int], *, backward: bool) -> int:
        values.append(Value(name=name, nbytes=8))
        way = Implementation(inputs=inputs, outputs=[len(values) - 1], time_s=1.0)
        ops.append(Op(name=f"make_{name}", target="layer", backward=backward, implementations=[way]))
        return len(values) - 1

    saved = [0]
    for i in range(LAYERS):
        saved.append(run(f"forward{i}", [saved[-1]], backward=False))
    other = Implementation(inputs=[0], outputs=[1], time_s=2.0)
    ops[0] = Op(
        name="make_forward0",
        target="layer",
        implementations=[*ops[0].implementations, other],
        alternatives=[Alternative(switch="other.0", first=1, again=1)],
    )
    gradient = saved[-1]
    for i in reversed(range(LAYERS)):
        gradient = run(f"back{i}", [gradient, saved[i]], backward=True)
    values[gradient] = attrs.evolve(values[gradient], role=Role.GRAD)
    return Graph(name="loops", values=values, ops=ops)
