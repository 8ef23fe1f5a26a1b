"""Dynamic programming over intervals of the linear order, with sets of values as interfaces, then polish.

Idea: rotor (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains") on a graph that is no
chain. The forward is cut into up to `stages` groups where little crosses; `chain.table` keeps everything that
the backward reads of a group, or drops it and recomputes it. The memory inside a group is a lower estimate
(`OptimisticChain`), so the table is read at several memory levels, useless repeats are dropped, and the
fastest sequence that really fits is polished. O(stages^3 * slots) vectorized over the slots: about 0.2 s.

Imperfect: a group is kept entirely or not at all; the polish and the search improve on that.
"""

from typing import ClassVar

import attrs

from remat_graph import Graph
from remat_graph.partition import at_narrow_places
from remat_solvers.chain.table import ChainTable, OptimisticChain, fastest_within_budget, keep_all
from remat_solvers.evaluation.arrays import Arrays, Ints, flatten
from remat_solvers.local_search.polish import polish
from remat_solvers.methods.base import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge, level_count, part_count

STAGES, SLOTS = 36, 160  # groups and memory levels of the table


@attrs.frozen(kw_only=True)
class IntervalDP(Rematerializer):
    """Interval DP and polish.

    Attributes:
        stages: most segments.
        slots: memory levels of the table.
    """

    name: ClassVar[str] = "interval_dp"
    stages: int = part_count(STAGES)
    slots: int = level_count(SLOTS)

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        arrays = flatten(problem.graph)
        order = plan(problem.graph, arrays, problem.budget_nbytes, deadline, self.stages, self.slots)
        if order is not None:
            order = polish(arrays, order, problem.budget_nbytes, deadline)
        return judge(problem, order)


def plan(
    graph: Graph,
    arrays: Arrays,
    budget_nbytes: int,
    deadline: Deadline,
    stages: int = STAGES,
    slots: int = SLOTS,
) -> Ints | None:
    """The fastest sequence that the table yields within the budget, not polished; None if none fits."""
    groups = at_narrow_places(graph, stages)
    options = [[keep_all(groups, s)] for s in range(len(groups))]
    table = ChainTable(OptimisticChain(groups), options, budget_nbytes, slots, deadline)
    return fastest_within_budget(arrays, table.orders(), budget_nbytes)
