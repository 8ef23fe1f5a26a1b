"""`pofo`: keep, recompute or offload, on a chain of heterogeneous stages.

Beaumont, Eyraud-Dubois, Shilova 2021, "Efficient combination of rematerialization and offloading for training
DNNs". The forward is cut as in `rotor`. Each stage is kept whole, or lies in a segment that keeps its input
alone and is recomputed by rotor's table; the values that a stage or a segment holds between its forward and
its backward stay on the device or are offloaded, part by part. Nothing is offloaded inside a segment that is
recomputed. `chain.offload_table` finds plans of this form, `transfers.placement` schedules the copies of the
most promising ones, and the referee's time over all lanes decides between them and rotor's plan.

Budgets, repeats and the time of each plan are exact. The choice is not: the table rounds its labels and
models the two lanes as queues, so the best plan may be missing, and the schedule of its copies may not be
optimal. Compared with brute force over rotor's orders with any copies at any time, 352 of 357 results on
random chains of 3 to 5 stages are optimal and the others 1 to 3.3 % slower; on 8 to 30 stages more labels and
plans save up to 1 %. Schedules that keep a stage in part may be faster than any of this form. Without links
the result is rotor's. O(stages^3 * slots) for rotor's table, O(stages^2 * labels) numpy rows for the other;
about 1 s for 10 stages, 6 s for 50 and 40 s for 100 on one core.
"""

from typing import ClassVar

import attrs

from remat_graph import Links, Schedule
from remat_graph.partition import at_articulations
from remat_solvers.chain.offload_table import ChainPlan, PofoTable
from remat_solvers.chain.table import ChainTable, ConservativeChain, keep_all, order_of_runs
from remat_solvers.methods.base import Rematerializer
from remat_solvers.methods.rotor import Rotor
from remat_solvers.protocol import (
    Deadline,
    Problem,
    Solution,
    Status,
    judge_schedule,
    level_count,
    part_count,
)
from remat_solvers.transfers.idle_intervals import idle_intervals
from remat_solvers.transfers.placement import schedule_transfers


@attrs.frozen(kw_only=True)
class Pofo(Rematerializer):
    """Rotor's plans with offloaded activations.

    Attributes:
        stages: most stages; neighbouring ones are joined beyond.
        slots: memory levels of rotor's table.
        labels: most labels that the table keeps per stage.
        plans: how many of its plans are scheduled and judged.
    """

    name: ClassVar[str] = "pofo"
    stages: int = part_count(64)
    slots: int = level_count(500)
    labels: int = level_count(300, 1)
    plans: int = level_count(100, 1)

    def recompute(self, problem: Problem, deadline: Deadline) -> Solution:
        """See the module docstring."""
        best = Rotor(stages=self.stages, slots=self.slots).recompute(problem, deadline)
        links = problem.links
        if links is None:
            return best
        groups = at_articulations(problem.graph, self.stages)
        options = [[keep_all(groups, s)] for s in range(len(groups))]
        chain = ChainTable(ConservativeChain(groups), options, problem.budget_nbytes, self.slots, deadline)
        worth_s = float("inf") if best.time_s is None else best.time_s - best.base_s
        table = PofoTable(chain, problem, links, self.labels, worth_s, deadline)
        tried: list[ChainPlan] = []
        for plan in table.plans():
            if len(tried) == self.plans or best.status is Status.OPTIMAL or deadline.reached():
                break
            if any(plan.moves_more_than(other) for other in tried):
                continue
            tried.append(plan)
            found = judge_schedule(problem, _placed(problem, links, chain, plan))
            if found.time_s is not None and (best.time_s is None or found.time_s < best.time_s):
                best = found
                deadline.report(self.name, best.time_s, best.lower_bound_s)
        return attrs.evolve(best, stats={"stages": len(groups), "plans": len(tried)})


def _placed(problem: Problem, links: Links, chain: ChainTable, plan: ChainPlan) -> Schedule:
    """The schedule of a plan; offloaded values are on the host between their uses in forward and backward."""
    graph = problem.graph
    order = order_of_runs(chain.groups, chain.options, plan.runs)
    boundary = sum(not op.backward for op in graph.ops)
    moves = [
        idle
        for idle in idle_intervals(graph, order)
        if idle.value in plan.moved and idle.after < boundary <= idle.before
    ]
    return schedule_transfers(graph, order, moves, problem.budget_nbytes, links)
