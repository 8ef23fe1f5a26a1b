"""`rockmate`: rotor over blocks, with a menu of integer-programmed options for each distinct block.

Zhao et al. 2023, "Rockmate: an efficient, fast, automatic and generic tool for re-materialization in
PyTorch". The forward is cut at its articulation points into a chain of blocks; each distinct block is
solved by the program of `checkmate` at several budgets, and the table of `chain_dp` chooses one option a
block and what to drop. Joins neighbouring blocks until there are at most `stages`. One small MIP an option,
some seconds at 60 ops; equal blocks share theirs.
"""

from typing import ClassVar

import attrs

from remat_solvers.blocks import menus
from remat_solvers.chain_dp import ChainTable, fastest_that_fits
from remat_solvers.checkmate import Checkmate
from remat_solvers.evaluate import flatten
from remat_solvers.noremat import Rematerializer
from remat_solvers.protocol import Deadline, Problem, Solution, judge, positive_or_none
from remat_solvers.rotor import stages


@attrs.frozen(kw_only=True)
class Rockmate(Rematerializer):
    """Options per block by an integer program, rotor over them.

    Attributes:
        stages: most blocks.
        slots: memory levels of the table.
        levels: budgets at which each distinct block is solved.
        block_seconds: limit by the clock for one block at one budget; None for none.
        backend: name of a mixed-integer solver that cvxpy has installed.
    """

    name: ClassVar[str] = "rockmate"
    stages: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    slots: int = attrs.field(default=500, validator=attrs.validators.ge(2))
    levels: int = attrs.field(default=6, validator=attrs.validators.ge(1))
    block_seconds: float | None = attrs.field(default=10.0, validator=positive_or_none)
    backend: str = "HIGHS"

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        graph, budget = problem.graph, problem.budget_nbytes
        pieces = stages(graph, self.stages)
        block = Checkmate(backend=self.backend)
        options = menus(graph, pieces, block.solve, self.levels, self.block_seconds, deadline)
        table = ChainTable(graph, pieces, options, budget, self.slots)
        order = fastest_that_fits(graph, flatten(graph), table, budget)
        stats: dict[str, int | float | str | bool] = {
            "stages": len(pieces),
            "options": sum(map(len, options)),
            "deadline": deadline.hit,
        }
        return judge(problem, None if order is None else order.tolist(), stats=stats)
