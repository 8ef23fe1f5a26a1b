"""Remember the plans of a step at the sizes seen so far, and decide when another size deserves a search.

A plan of the nearest size is carried over to a new one. It may be slower than one that is searched for: over
88 pairs of lengths from 333 to 1,024 (GPT-2 and BERT of four layers, budgets down to 45 %) by a quarter of a
point of the step on average and by 3.8 points at most, in a thirtieth of the time. The bound says how much a
search might save at most. Once steps by carried plans may have lost as much time as a search takes, the
present size is searched for, so all searches together take no longer than what they might have saved (ski
rental; A. R. Karlin, M. S. Manasse, L. Rudolph and D. D. Sleator, 1988).
"""

from collections import deque
from math import log

import attrs

from remat_graph import Grads, Plan

Kind = tuple[str, Grads]
"""Structure of a graph and state of ``.grad``."""

MOST_KNOWN = 32
"""Plans that are kept for each kind."""

TIGHTER = 1.5
"""A plan says little about a budget that is this many times tighter, as a share of what the step needs."""

DRIFT = 0.1
"""A plan that was carried over itself counts as farther by this, in ratios of sizes."""

MAY_SAVE_S = "may_save_s"
"""Key of `Plan.solver_stats` of a carried plan: seconds of a step that a search might save at most."""

SEARCHED_S = "searched_s"
"""Key of `Plan.solver_stats` of a carried plan: seconds that a search took."""


def carried(plan: Plan) -> bool:
    """Whether a plan was not searched for, but carried over from another size of the same step."""
    return plan.solver_stats.get("method") == "carried"


@attrs.define(kw_only=True, eq=False)
class KnownPlans:
    """The plans so far, and the time that steps by carried ones may have lost.

    Attributes:
        plans: per kind, the latest ones.
        lost_s: seconds since the last search.
        revised: fingerprints of graphs that were carried over first and searched for later.
    """

    plans: dict[Kind, deque[Plan]] = attrs.field(factory=dict)
    lost_s: float = 0.0
    revised: set[str] = attrs.field(factory=set)

    def add(self, kind: Kind, plan: Plan) -> None:
        """Remember a plan."""
        self.plans.setdefault(kind, deque(maxlen=MOST_KNOWN)).append(plan)

    def nearest(self, kind: Kind, needed_nbytes: int, budget_nbytes: int) -> tuple[Plan, Plan] | None:
        """The plan of the nearest size and tightness, and the nearest that was searched for; None without.

        Args:
            kind: of the graph.
            needed_nbytes: the peak of its unplanned step.
            budget_nbytes: what a plan may take.
        """
        known = tuple(self.plans.get(kind, ()))
        tightness = max(1.0, needed_nbytes / budget_nbytes)
        useful = [plan for plan in known if tightness <= TIGHTER * _tightness(plan)]
        searched = [plan for plan in useful if not carried(plan)]
        if not searched:
            return None

        def distance(plan: Plan) -> float:
            sizes = abs(log(needed_nbytes / plan.noremat_peak_nbytes))
            return abs(log(tightness / _tightness(plan))) + sizes + DRIFT * carried(plan)

        return min(useful, key=distance), min(searched, key=distance)

    def pays_off(self, plan: Plan) -> bool:
        """Count a step by a plan; whether carried plans have lost the time of a search by now."""
        may_save_s = plan.solver_stats.get(MAY_SAVE_S, 0.0)
        if not may_save_s or plan.fingerprint in self.revised:
            return False
        self.lost_s += may_save_s
        if self.lost_s < plan.solver_stats.get(SEARCHED_S, 0.0):
            return False
        self.lost_s = 0.0
        self.revised.add(plan.fingerprint)
        return True


def _tightness(plan: Plan) -> float:
    """What the unplanned step needs, in budgets; 1 where it fits."""
    return max(1.0, plan.noremat_peak_nbytes / plan.budget_nbytes)
