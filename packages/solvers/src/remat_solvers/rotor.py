"""`rotor`: the optimal plan for a chain of heterogeneous stages.

Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains". The forward is cut at its
articulation points, where one value crosses; each stage is kept whole, kept by its input alone, or not at
all; the table of `chain_dp` finds the best plan of that form (the paper's "persistent" schedules). Exact on
a chain where the memory levels are; a graph that is no chain is one coarse stage wherever several values
cross. O(stages^3 * slots).
"""

from typing import ClassVar

import attrs

from remat_graph import Graph
from remat_solvers.chain_dp import ChainTable, fastest_that_fits, keep_all
from remat_solvers.evaluate import flatten
from remat_solvers.linear import Segments, articulation_places, cut
from remat_solvers.noremat import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge


@attrs.frozen(kw_only=True)
class Rotor(Rematerializer):
    """The dynamic program over stages between articulation points.

    Attributes:
        stages: most stages; neighbouring ones are joined where there are more.
        slots: memory levels of the table.
    """

    name: ClassVar[str] = "rotor"
    stages: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    slots: int = attrs.field(default=500, validator=attrs.validators.ge(2))

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, budget = problem.graph, problem.budget_nbytes
        pieces = stages(graph, self.stages)
        options = [[keep_all(pieces, s)] for s in range(len(pieces))]
        table = ChainTable(graph, pieces, options, budget, self.slots)
        order = fastest_that_fits(graph, flatten(graph), table, budget)
        return judge(problem, None if order is None else order.tolist(), stats={"stages": len(pieces)})


def stages(graph: Graph, most: int) -> Segments:
    """The forward cut at its articulation points, evenly thinned out to at most so many stages.

    A value that only the next op reads is a poor place to cut: the table holds what crosses a cut until the
    backward is past it. So the backward must read it too, where there are such places.
    """
    places = articulation_places(graph)
    read = {v for op in graph.ops if op.backward for v in op.first.inputs}
    pieces = cut(graph, places)
    useful = [place for place, values in zip(places, pieces.crossing[1:], strict=True) if values & read]
    places = useful or places
    if len(places) >= most:
        places = [places[i * len(places) // (most - 1)] for i in range(most - 1)] if most > 1 else []
    return cut(graph, places)
