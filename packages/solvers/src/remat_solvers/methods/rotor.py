"""`rotor`: the optimal plan for a chain of heterogeneous stages.

Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains". The forward is cut at its articulation
points, where one value crosses; each stage is kept whole, kept by its input alone, or not at all;
`chain.table` finds the best plan of that form (the paper's "persistent" schedules). Exact on a chain where
the memory levels are; in other graphs, parts where several values cross are one coarse stage. O(stages^3 *
slots).
"""

from typing import ClassVar

import attrs

from remat_graph.partition import at_articulations
from remat_solvers.chain.table import ChainTable, ConservativeChain, fastest_within_budget, keep_all
from remat_solvers.evaluation.arrays import flatten
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge, level_count, part_count


@attrs.frozen(kw_only=True)
class Rotor(Rematerializer):
    """The dynamic program over stages between articulation points.

    Attributes:
        stages: most stages; neighbouring ones are joined beyond.
        slots: memory levels of the table.
    """

    name: ClassVar[str] = "rotor"
    stages: int = part_count(64)
    slots: int = level_count(500)

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, budget = problem.graph, problem.budget_nbytes
        groups = at_articulations(graph, self.stages)
        options = [[keep_all(groups, s)] for s in range(len(groups))]
        table = ChainTable(ConservativeChain(groups), options, budget, self.slots, deadline)
        order = fastest_within_budget(flatten(graph), table.orders(), budget)
        return judge(problem, order, stats={"stages": len(groups)})
