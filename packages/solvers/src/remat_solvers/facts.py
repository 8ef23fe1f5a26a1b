"""The figures of plans and budgets as JSON has them, for the commands and their ``--json``."""

import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs

from remat_graph import Graph, Plan
from remat_solvers.running.stopping import interrupted

if TYPE_CHECKING:  # it imports numpy
    from remat_solvers.queries import MinBudget


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The figures of a plan by the names of its attributes, without its schedule."""
    names = (
        *("graph_name", "solver", "platform", "grads", "budget_nbytes", "peak_nbytes", "live_peak_nbytes"),
        *("noremat_peak_nbytes", "gradient_nbytes", "time_s", "noremat_time_s", "noremat_step_s"),
        *("recomputed_s", "overhead", "recomputed_overhead", "lower_bound_s", "lower_bound_overhead", "gap"),
        *("deadline_hit", "switched", "rounding", "layers", "ways"),
    )
    runs = plan.schedule.order
    counts = {"ops": len(set(runs)), "runs": len(runs), "interrupted": interrupted(plan)}
    return {name: getattr(plan, name) for name in names} | counts


def min_budget_facts(graph: Graph, found: "MinBudget") -> dict[str, Any]:
    """The figures of a smallest budget by the names of its attributes, without its schedule."""
    figures = {field.name: getattr(found, field.name) for field in attrs.fields(type(found))}
    del figures["schedule"]
    return {"graph_name": graph.name, **figures}


def plain(value: object) -> Any:
    """The value as JSON has it: attrs classes are objects, and numbers that are not finite are null."""
    if isinstance(value, type):
        return value.__name__
    if attrs.has(kind := type(value)):
        public = [field.name for field in attrs.fields(kind) if not field.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in public}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)
