"""Remember the plans of a step at the sizes seen so far, and decide when another size deserves a search.

A plan of the nearest size is carried over to a new one. It may be slower than one that is searched for: over
88 pairs of lengths from 333 to 1,024 (GPT-2 and BERT of four layers, budgets down to 45 %) by a quarter of a
point of the step on average and by 3.8 points at most, in a thirtieth of the time. Its gap to the bound,
beyond that of searched plans, is what a search is expected to save. Once steps by carried plans have lost as
much time as a search takes, the present size is searched for, so all searches together take no longer than
they are expected to save (ski rental; A. R. Karlin, M. S. Manasse, L. Rudolph and D. D. Sleator, 1988).
"""

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

PLANNING_S = "planning_s"
"""Key of `Plan.solver_stats`: seconds of planning."""

SOLVING_S = "solving_s"
"""Key of `Plan.solver_stats` of a plan from the zoo: the seconds of planning when it was made."""

SAVED = "saved"
"""Key of `Plan.solver_stats`: present, and true, if the plan was loaded from the zoo."""

SAVING_S = "saving_s"
"""Key of `Plan.solver_stats` of a carried plan: seconds of a step that a search is expected to save, by
the gap beyond that of the nearest plan that was searched for."""

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
        searched_later: graphs, by fingerprint and state of ``.grad``, that were carried over first.
    """

    plans: dict[Kind, list[Plan]] = attrs.field(factory=dict)
    lost_s: float = 0.0
    searched_later: set[tuple[str, Grads]] = attrs.field(factory=set)

    def add(self, kind: Kind, plan: Plan) -> None:
        """Remember a plan; of too many, the oldest that was carried over is dropped."""
        known = self.plans.setdefault(kind, [])
        known.append(plan)
        if len(known) > MOST_KNOWN:
            del known[next((i for i, each in enumerate(known) if carried(each)), 0)]

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
        saving_s = plan.solver_stats.get(SAVING_S, 0.0)
        if not saving_s or (plan.fingerprint, plan.grads) in self.searched_later:
            return False
        self.lost_s += saving_s
        if self.lost_s < plan.solver_stats.get(SEARCHED_S, 0.0):
            return False
        self.lost_s = 0.0
        self.searched_later.add((plan.fingerprint, plan.grads))
        return True


def _tightness(plan: Plan) -> float:
    """What the unplanned step needs, in budgets; 1 where it fits."""
    return max(1.0, plan.noremat_peak_nbytes / plan.budget_nbytes)
