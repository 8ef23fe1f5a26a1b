"""A training step as plain data: the graph, the schedule, and the referee that judges one on the other."""

from remat_graph.budget import Budget, noremat_peak_nbytes, parse_nbytes, percent_of, resolve_budget
from remat_graph.errors import (
    BadBudget,
    BadFile,
    CannotWrite,
    FalseBound,
    ForeignPlan,
    InvalidGraph,
    InvalidSchedule,
    OverBudget,
    RematError,
    UnknownPlatform,
)
from remat_graph.fingerprint import fingerprint, structure
from remat_graph.ir import Alternative, Graph, Implementation, Op, Placement, Role, Update, Value
from remat_graph.links import Links
from remat_graph.plan import Plan
from remat_graph.platforms.base import OpCost, Platform, Roofline, get_platform, platform_names, with_platform
from remat_graph.platforms.measured import Measured, find_platform, load_platform, save_platform
from remat_graph.schedule import (
    Compute,
    Deliver,
    Free,
    FreeHost,
    Lane,
    OptimizerStep,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
)
from remat_graph.serialization.graphs import load_graph, save_graph
from remat_graph.serialization.plans import load_plan, save_plan
from remat_graph.serialization.schedules import load_order, save_order
from remat_graph.simulator.simulate import simulate
from remat_graph.simulator.timeline import Grads, Timeline
from remat_graph.switches.relax import relaxed
from remat_graph.switches.specialize import Specialized, decide, specialize, switches_on
from remat_graph.units import format_nbytes, format_seconds
from remat_graph.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Alternative",
    "BadBudget",
    "BadFile",
    "Budget",
    "CannotWrite",
    "Compute",
    "Deliver",
    "FalseBound",
    "ForeignPlan",
    "Free",
    "FreeHost",
    "Grads",
    "Graph",
    "Implementation",
    "InvalidGraph",
    "InvalidSchedule",
    "Lane",
    "Links",
    "Measured",
    "Op",
    "OpCost",
    "OptimizerStep",
    "OverBudget",
    "Placement",
    "Plan",
    "Platform",
    "RematError",
    "Role",
    "Roofline",
    "Schedule",
    "Specialized",
    "Start",
    "Step",
    "Timeline",
    "Transfer",
    "UnknownPlatform",
    "Update",
    "Value",
    "Wait",
    "decide",
    "find_platform",
    "fingerprint",
    "format_nbytes",
    "format_seconds",
    "get_platform",
    "load_graph",
    "load_order",
    "load_plan",
    "load_platform",
    "noremat_peak_nbytes",
    "parse_nbytes",
    "percent_of",
    "platform_names",
    "relaxed",
    "resolve_budget",
    "save_graph",
    "save_order",
    "save_plan",
    "save_platform",
    "simulate",
    "specialize",
    "structure",
    "switches_on",
    "verify",
    "with_platform",
]
