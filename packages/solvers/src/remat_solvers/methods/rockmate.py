"""`rockmate`: rotor over blocks, with integer-programmed options for each distinct block.

Zhao et al. 2023, "Rockmate: an efficient, fast, automatic and generic tool for re-materialization in
PyTorch". The forward is cut at its articulation points into a chain of blocks; each distinct block is solved
by the program of `checkmate` at several budgets, and `chain.table` chooses one option a block and which
blocks to recompute. Neighbouring blocks are joined until there are at most `stages`. One small MIP an option,
some seconds at 60 ops; equal blocks share their options.

A block that is too large for the program (a U-Net is one such block) gets its options from greedy eviction.
Plans of the table that exceed the budget are repaired, and plans are polished; see `repair`.
"""

from typing import ClassVar

import attrs

from remat_graph.partition import at_articulations
from remat_solvers.chain.block_options import GAP, OptionTable
from remat_solvers.chain.table import chain_orders
from remat_solvers.evaluation.arrays import flatten
from remat_solvers.local_search.repair import repair_orders
from remat_solvers.methods.base import Rematerializer
from remat_solvers.methods.checkmate import Checkmate
from remat_solvers.methods.greedy import Greedy
from remat_solvers.protocol import Deadline, Problem, Solution, judge, level_count, part_count, time_limit


@attrs.frozen(kw_only=True)
class RockmateSolver(Rematerializer):
    """Options per block by an integer program, rotor over them.

    Attributes:
        stages: most blocks.
        slots: memory levels of the table.
        levels: budgets for what each distinct block keeps.
        exact: a block with at most this many ops is solved by the integer program.
        block_seconds: limit by the clock for one block at one budget; None for none.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "rockmate"
    stages: int = part_count(32)
    slots: int = level_count(500)
    levels: int = part_count(6)
    exact: int = attrs.field(default=60, validator=attrs.validators.ge(0))
    block_seconds: float | None = time_limit(1.0)
    backend: str = "HIGHS"

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, budget = problem.graph, problem.budget_nbytes
        groups = at_articulations(graph, self.stages)
        option_table = OptionTable(levels=self.levels, seconds=self.block_seconds)
        options = option_table.options(groups, self.solve_block, deadline.share(0.75))
        plans = chain_orders(groups, options, budget, self.slots, deadline)
        order = repair_orders(flatten(graph), plans, budget, deadline)
        stats: dict[str, int | float | str | bool] = {
            "stages": len(groups),
            "options": sum(map(len, options)),
            "distinct": option_table.distinct,
            "solves": option_table.solves,
            "deadline": deadline.hit,
        }
        return judge(problem, order, stats=stats)

    def solve_block(self, problem: Problem, deadline: Deadline) -> Solution:
        """Solve by the integer program if the block is small enough, else by eviction."""
        if len(problem.graph.ops) <= self.exact:
            return Checkmate(backend=self.backend, gap=GAP).solve(problem, deadline)
        return Greedy().solve(problem, deadline)
