"""`checkmate`: the integer program of the stage form, solved to proven optimality where time allows.

Jain et al. 2020, "Checkmate: breaking the memory wall with optimal tensor rematerialization". See
`mip.stage_program` for the program. Exact in its own space (trace order, frontier-advancing stages, an op at
most once a stage); with HiGHS some 30 s at 90 ops, hopeless from some 200.

Memory is counted as the referee does: the paper's rule (an op's output comes live, values no longer needed
are freed), plus workspace, tangents and several outputs per op. With ``accounting="paper"`` memory is counted
as in the paper, to reproduce its figures: see `paper_graph`. The budget then bounds the paper's U. The
referee judges the result in either case: a schedule above the budget is not returned, and its time and peak
in the paper's terms are in `Solution.stats` (``paper_time_s``, ``paper_peak_nbytes``). On layer-level graphs,
for which the paper's rule was made, both countings agree.
"""

from typing import ClassVar

import attrs

from remat_graph import Graph, Implementation, Op, Role, Value
from remat_graph.partition import repeatable
from remat_solvers.methods.base import Rematerializer
from remat_solvers.mip.cvxpy_backend import solve_whole
from remat_solvers.protocol import Deadline, Problem, Solution, judge

ACCOUNTINGS = ("referee", "paper")


@attrs.frozen(kw_only=True)
class Checkmate(Rematerializer):
    """The exact program of the stage form.

    Attributes:
        backend: name of a mixed-integer solver that cvxpy has installed.
        accounting: how memory and time are counted: "referee", or "paper".
        gap: ratio of the repeats' seconds at which the solver may stop.
    """

    name: ClassVar[str] = "checkmate"
    backend: str = "HIGHS"
    gap: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    accounting: str = attrs.field(default="referee", validator=attrs.validators.in_(ACCOUNTINGS))

    def solve(self, problem: Problem, deadline: Deadline | None = None) -> Solution:
        """See the module docstring."""
        if self.accounting == "referee":
            return super().solve(problem, deadline)
        found = super().solve(Problem(paper_graph(problem.graph), problem.budget_nbytes), deadline)
        stats = dict(found.stats)
        if found.time_s is not None and found.peak_nbytes is not None:
            stats |= {"paper_time_s": found.time_s, "paper_peak_nbytes": found.peak_nbytes}
        return judge(problem, found.order, stats=stats)

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        return solve_whole(problem, deadline, self.backend, gap=self.gap)


def paper_graph(graph: Graph) -> Graph:
    """The graph as the paper counts it: the same ops, each with one value for all its outputs.

    So the outputs of an op come and go together, no value has to stay, and a repeat costs as much as the
    first run. Omitted is what the paper does not model (workspace, tangents, storage reuse, the allocator's
    rounding) and what it subtracts from the budget beforehand (its constant for inputs, parameters and their
    gradients): gradients count 0 bytes.
    """
    again = frozenset(repeatable(graph, range(len(graph.ops))))
    ops, values = [], []
    for i, op in enumerate(graph.ops):
        # A repeat may read a generator's state that the first run did not: both get the inputs of both.
        ways = (op.first, op.implementations[op.rerun]) if op.rerun is not None else (op.first,)
        read = {graph.producer[v] for way in ways for v in way.inputs if not graph.values[v].external}
        ops.append(
            Op(
                name=op.name,
                target=op.target,
                backward=op.backward,
                rerun=0 if i in again else None,
                implementations=[
                    Implementation(
                        inputs=sorted(source for source in read if source is not None and source != i),
                        outputs=[i],
                        time_s=op.first.time_s,
                    )
                ],
            )
        )
        made = [graph.values[v] for v in op.first.outputs]
        nbytes = sum(value.nbytes for value in made if not value.external and value.role is not Role.GRAD)
        values.append(Value(name=op.name, nbytes=nbytes))
    return Graph(name=graph.name, values=values, ops=ops)
